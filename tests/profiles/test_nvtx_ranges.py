"""The ranges and marks that a tool receives, with their steps, for each version of nvtx."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from schedbench.profiles.cuda import nvtx_ranges
from schedbench.profiles.cuda.nvtx_ranges import INJECTED, NvtxRanges, listening, measuring
from schedbench.sched.observe import StepInfo


class ReceivedRanges:
    """Records what arrived, in order."""

    def __init__(self) -> None:
        self.sent: list[tuple] = []


class DummyDomain:
    """The domain of a process without a tool."""


class Domain(ReceivedRanges):
    """nvtx since 0.2.12."""

    def get_event_attributes(self, **attributes):
        return SimpleNamespace(**attributes)

    def push_range(self, attributes):
        self.sent.append(("push", attributes.message, getattr(attributes, "payload", None)))

    def pop_range(self):
        self.sent.append(("pop",))

    def mark(self, attributes):
        self.sent.append(("mark", attributes.message, attributes.payload))


class OldNvtx(ReceivedRanges):
    """nvtx 0.2.11: domains without methods, functions beside them."""

    def get_domain(self, name):
        return SimpleNamespace(name=name)

    def push_range(self, *, message, domain, category=None, payload=None):  # noqa: ARG002
        self.sent.append(("push", message, payload))
        assert domain == "schedbench"

    def pop_range(self, *, domain):
        self.sent.append(("pop",))
        assert domain == "schedbench"

    def mark(self, *, message, domain, payload):
        self.sent.append(("mark", message, payload))
        assert domain == "schedbench"


def new() -> tuple[ReceivedRanges, object]:
    domain = Domain()
    return domain, SimpleNamespace(get_domain=lambda name: domain)  # noqa: ARG005


def old() -> tuple[ReceivedRanges, object]:
    module = OldNvtx()
    return module, module


@pytest.mark.parametrize("version", [new, old])
def test_ranges_and_marks_carry_their_steps(monkeypatch, version):
    received, module = version()
    monkeypatch.setattr(nvtx_ranges, "nvtx", module)
    monkeypatch.setenv(INJECTED, "/some/tool.so")
    ranges = NvtxRanges()
    info = StepInfo(7, "decode", 4, 4, False)
    with measuring(), ranges.range("model", 7, 4):
        ranges.launched(info)
    ranges.settled(info._replace(steady=True))
    assert received.sent == [
        ("push", "measure", None),
        ("push", "model", 7),
        ("mark", "decode bs=4", 7),
        ("pop",),
        ("pop",),
        ("mark", "settled decode steady", 7),
    ]


def test_without_a_tool_no_range_is_sent(monkeypatch):
    received, module = old()
    monkeypatch.setattr(nvtx_ranges, "nvtx", module)
    monkeypatch.delenv(INJECTED, raising=False)
    assert not listening()
    with measuring():
        pass
    assert received.sent == []
    monkeypatch.setattr(nvtx_ranges, "nvtx", SimpleNamespace(get_domain=lambda name: DummyDomain()))  # noqa: ARG005
    assert not listening()
    monkeypatch.setattr(nvtx_ranges, "nvtx", None)  # as on macOS
    assert not listening()

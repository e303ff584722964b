"""What a tool hears of a run: ranges and marks with their steps, from whichever nvtx there is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from schedbench.profiles.cuda import nvtx_ranges
from schedbench.profiles.cuda.nvtx_ranges import INJECTED, NvtxRanges, listening, measuring
from schedbench.sched.observe import StepInfo


class Heard:
    """What arrived, in order."""

    def __init__(self) -> None:
        self.said: list[tuple] = []


class DummyDomain:
    """Of a process to which nobody listens."""


class Domain(Heard):
    """nvtx since 0.2.12."""

    def get_event_attributes(self, **attributes):
        return SimpleNamespace(**attributes)

    def push_range(self, attributes):
        self.said.append(("push", attributes.message, getattr(attributes, "payload", None)))

    def pop_range(self):
        self.said.append(("pop",))

    def mark(self, attributes):
        self.said.append(("mark", attributes.message, attributes.payload))


class Old(Heard):
    """nvtx 0.2.11: domains without verbs, functions beside them."""

    def get_domain(self, name):
        return SimpleNamespace(name=name)

    def push_range(self, *, message, domain, category=None, payload=None):  # noqa: ARG002
        self.said.append(("push", message, payload))
        assert domain == "schedbench"

    def pop_range(self, *, domain):
        self.said.append(("pop",))
        assert domain == "schedbench"

    def mark(self, *, message, domain, payload):
        self.said.append(("mark", message, payload))
        assert domain == "schedbench"


def new() -> tuple[Heard, object]:
    domain = Domain()
    return domain, SimpleNamespace(get_domain=lambda name: domain)  # noqa: ARG005


def old() -> tuple[Heard, object]:
    module = Old()
    return module, module


@pytest.mark.parametrize("version", [new, old])
def test_ranges_and_marks_carry_their_steps(monkeypatch, version):
    heard, module = version()
    monkeypatch.setattr(nvtx_ranges, "nvtx", module)
    monkeypatch.setenv(INJECTED, "/some/tool.so")
    ranges = NvtxRanges()
    info = StepInfo(7, "decode", 4, 4, False)
    with measuring(), ranges.range("model", 7, 4):
        ranges.launched(info)
    ranges.settled(info._replace(steady=True))
    assert heard.said == [
        ("push", "measure", None),
        ("push", "model", 7),
        ("mark", "decode bs=4", 7),
        ("pop",),
        ("pop",),
        ("mark", "settled decode steady", 7),
    ]


def test_where_nobody_listens_nothing_is_said(monkeypatch):
    heard, module = old()
    monkeypatch.setattr(nvtx_ranges, "nvtx", module)
    monkeypatch.delenv(INJECTED, raising=False)
    assert not listening()
    with measuring():
        pass
    assert heard.said == []
    monkeypatch.setattr(nvtx_ranges, "nvtx", SimpleNamespace(get_domain=lambda name: DummyDomain()))  # noqa: ARG005
    assert not listening()

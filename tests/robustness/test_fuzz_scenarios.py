"""Scenarios, overrides and hardware profiles: any bytes are refused with a message, or are valid."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from schedbench.profiles.platform import capacity, hardware
from schedbench.profiles.platform.machine import MachineError
from schedbench.profiles.platform.resolve import Resolved, resolve
from schedbench.scenarios import shipped
from schedbench.scenarios.loader import load, loads
from schedbench.scenarios.overrides import keys
from schedbench.scenarios.problems import ScenarioError
from schedbench.scenarios.records import TraceError
from schedbench.scenarios.workload import build
from tests.robustness.hostile import VALUES, as_json, mutated, refuses_cleanly, rounds, spliced, time_limit

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("little_memory")]

NAMES = (*shipped.names(), *shipped.case_names())
SHIPPED = {name: yaml.safe_load(shipped.content(name)) for name in NAMES}
PROFILE = resources.files("schedbench.profiles.hardware").joinpath("h200.yaml").read_bytes()
LAUGHS = b"a: &a [x, x]\n" + b"".join(
    b"%c: &%c [*%c, *%c]\n" % (98 + i, 98 + i, 97 + i, 97 + i) for i in range(24)
)
SYNTAX = (
    "a",
    ":",
    " ",
    "\n",
    "- ",
    "? ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "&x ",
    "*x",
    "!!set ",
    "|",
    ">",
    "'",
    '"',
    "%",
    "---",
    "#",
)
LARGE = 100_000  # requests that are not drawn here

FULL_KEYS = [".".join(path) for path in keys()]


def assert_resolves_or_refuses(content: bytes, *overrides: str) -> None:
    """Resolves the scenario as a run does before its first step."""
    with refuses_cleanly(ScenarioError, MachineError, TraceError):
        resolved = resolve(loads(content, overrides=overrides))
        capacity.check(resolved)
        _drawn(resolved)


def _drawn(resolved: Resolved) -> None:
    """Draws a workload of limited size and its first prompt."""
    scenario, model = resolved.scenario, resolved.model
    if (scenario.workload.requests or 0) <= LARGE:
        workload = build(scenario, vocab_size=model.vocab_size, context_len=model.max_positions, seed=0)
        next(workload.upcoming())


@rounds(40)
@given(st.sampled_from(NAMES).flatmap(lambda name: mutated(SHIPPED[name])))
def test_mutated_scenarios(document: Any) -> None:
    assert_resolves_or_refuses(as_json(document).encode())


@rounds(40)
@given(st.sampled_from(NAMES).flatmap(lambda name: spliced(shipped.content(name))))
@example(LAUGHS)
@example(b"name: x\nname: x\n" * 1000)
@example(b"a: &x {b: *x}")
@example(b"[" * 60_000)
@example(b"{a: " * 15_000)
@example(b"? " * 30_000)
@example(b"a:\n" + b" a:\n" * 15_000)
@example("name: \ufeff\ufeff".encode("utf-16"))
@example(b"\xef\xbb\xbfname: x")
@example(b"a: " + b"9" * 60_000)
@example(b"a: 1e" + b"9" * 60_000)
@example(b"'" * 60_000)
def test_scenarios_with_spliced_bytes(content: bytes) -> None:
    assert_resolves_or_refuses(content)


@rounds(40)
@given(st.lists(st.sampled_from(SYNTAX), max_size=40).map("".join))
def test_texts_like_yaml(text: str) -> None:
    assert_resolves_or_refuses(text.encode())


@rounds(40)
@given(st.lists(st.tuples(st.sampled_from(FULL_KEYS) | st.text(max_size=8), VALUES), min_size=1, max_size=3))
@example([("workload.abort", {"fraction": 1.0}), ("workload.requests", 10_000_000)])
@example([("workload.abort.requests", ["r٣", "r" + "9" * 5000])])
@example([("workload.prompt_tokens", {"dist": "lognormal", "mean": 1e-6, "std": 2.0**24})])
@example([("measure.warmup_requests", 10**12)])
@example([("engine.page_size", 2**40)])
@example([("device.hardware", "a" * 5000)])
def test_overrides(changes: list[tuple[str, Any]]) -> None:
    assert_resolves_or_refuses(
        shipped.content("mixed"), *(f"{key}={as_json(value)}" for key, value in changes)
    )


@rounds(40)
@given(st.text(max_size=40))
def test_overrides_of_any_text(text: str) -> None:
    assert_resolves_or_refuses(shipped.content("mixed"), text)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hardware") / "mine.yaml"


@rounds(40)
@given(
    content=mutated(yaml.safe_load(PROFILE)).map(lambda document: as_json(document).encode())
    | spliced(PROFILE)
)
@example(content=LAUGHS)
@example(content=b"a: &x {b: *x}")
@example(content=b"[" * 60_000)
def test_hardware_profiles(profile: Path, content: bytes) -> None:
    profile.write_bytes(content)
    with refuses_cleanly(hardware.HardwareError):
        hardware.load(profile)


@pytest.mark.parametrize("reader", [load, hardware.load])
@pytest.mark.parametrize(
    "name",
    [
        "folder",
        "nowhere.yaml",
        "loop.yaml",
        "/dev/zero",
        "/dev/full",
        "a" * 5000,
        "a/" * 3000,
        "",
        "\0",
        "\ud800",
    ],
)
def test_paths_other_than_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Any, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises((ScenarioError, hardware.HardwareError)), refuses_cleanly():
        reader(name)


def test_a_pipe_may_be_a_scenario(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=(shipped.content("mixed"),))
    writer.start()
    with time_limit():
        assert load(str(pipe)).name == "mixed"
    writer.join()

"""The cost of instruments, from runs with and without them, on torch's CPU in place of CUDA."""

from __future__ import annotations

import json

import pytest
import torch

from schedbench.profiles.judge.statistics import abba
from schedbench.profiles.lab import single_run
from schedbench.profiles.platform.resolve import resolve
from schedbench.scenarios.loader import load
from schedbench.sched.observe import Observer
from tests.profiles.cuda.cpu_machine import cpu_bench

SMALL = [
    "workload.arrival=burst",
    "workload.requests=2",
    "workload.prompt_tokens=8",
    "workload.output_tokens=6",
    "workload.shared_prefix=null",
]


@pytest.fixture
def bench():
    with cpu_bench(resolve(load("mixed", SMALL))) as bench:
        yield bench


class ReplacementObserver(Observer):
    """Records whether torch's functions were replaced during the run."""

    def __init__(self):
        self.item = None

    def settled(self, info):  # noqa: ARG002
        self.item = torch.Tensor.item


def test_without_the_watcher_torch_is_not_replaced(bench):
    replaced = torch.Tensor.item
    with bench.machine.unwatched():
        own = torch.Tensor.item
        assert own is not replaced
    assert torch.Tensor.item is not own
    observer = ReplacementObserver()
    bench.clocked(observer)
    assert observer.item is not own


def test_a_bare_run_has_no_observer(bench):
    observer = ReplacementObserver()
    assert bench.clocked(observer, watched=False) > 0
    assert observer.item is None
    assert len(bench.sink.collector.periods.periods) == 0
    assert bench.clocked() > 0
    assert len(bench.sink.collector.periods.periods) >= 5


def test_every_run_does_the_same_work(bench):
    """The cache keeps no prompt from the previous run."""
    steps = []
    for _ in range(2):
        bench.clocked()
        steps.append(bench.sink.collector.waiting.requests)
    assert steps[0] == steps[1] and steps[0]["prefill"] + steps[0]["mixed"] > 0


def test_two_sides_run_alternately(bench, monkeypatch):
    turns = []
    sides = {name: lambda b, name=name: turns.append(name) or b.clocked() for name in ("bare", "timed")}
    monkeypatch.setattr(single_run, "SIDES", sides)
    found = single_run.compared(bench, ("bare", "timed"), 2)
    assert turns == ["bare", "timed", *("bare", "timed", "timed", "bare")]
    assert found["steps"] >= 6 and found["step_ms"] > 0
    assert [len(values) for values in found["seconds"].values()] == [2, 2]


@pytest.mark.parametrize(("factor", "met"), [(1.002, True), (1.05, False)])
def test_a_known_cost_is_found_and_judged(factor, met):
    sides = ("bare", "timed")
    blocks = [factor if side == "b" else 1.0 for side in abba(10)]
    found = single_run.overhead(sides, blocks, steps=1000)
    assert found["percent"] == pytest.approx(100 * (factor - 1))
    assert found["us_per_step"] == pytest.approx(1e3 * (factor - 1))
    assert found["met"] is met


def test_a_noisy_comparison_has_no_verdict():
    blocks = [1.0, 1.2, 0.8, 1.0, 1.0, 0.9, 1.15, 1.0]
    found = single_run.overhead(("bare", "timed"), blocks, steps=0)
    assert (found["met"], found["us_per_step"]) == (None, None)


def overhead_of(tmp_path, *sides):
    small = [word for setting in SMALL for word in ("--set", setting)]
    output = tmp_path / "overhead.json"
    words = ["mixed", "--device", "vgpu", "--sides", *sides, "--pairs", "2", *small, "--output", str(output)]
    assert single_run.main(words) == 0
    return json.loads(output.read_text())


def test_the_document_names_device_and_limit(tmp_path):
    found = overhead_of(tmp_path, "bare", "timed")
    assert found["sides"] == ["bare", "timed"]
    assert (found["device"], found["emulated"], found["bar_percent"]) == ("h200", True, 1.0)


def test_nvtx_ranges_without_a_tool_are_not_measured(tmp_path, monkeypatch):
    assert overhead_of(tmp_path, "timed", "nvtx") == {
        "sides": ["timed", "nvtx"],
        "abstained": single_run.NO_TOOL,
    }
    pushed = []

    class Ranges(Observer):
        def settled(self, info):
            pushed.append(info.step)

    monkeypatch.setattr(single_run, "NvtxRanges", Ranges)
    monkeypatch.setattr(single_run, "listening", lambda: True)
    assert overhead_of(tmp_path, "timed", "nvtx")["bar_percent"] == 2.0
    assert pushed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--counted",), "need --output"),
        (
            ("--sides", "timed", "timed", "--output", "x"),
            "--sides: the second is one of timed, nvtx, and the first",
        ),
    ],
)
def test_words_that_leave_nothing_to_write_are_refused(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        single_run.parse(["mixed", "--device", "vgpu", *words])
    assert says in capsys.readouterr().err

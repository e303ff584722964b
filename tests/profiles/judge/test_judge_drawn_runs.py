"""A verdict whose sign depends on one constant of the hardware is inconclusive and names the constant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import psutil
import pytest

from schedbench.profiles.judge.compare import Comparison, VerdictRules, judge
from schedbench.profiles.judge.draws import Firmness
from schedbench.profiles.judge.local import ranges, run_each
from schedbench.profiles.judge.reasons import Reason
from schedbench.profiles.judge.sides import opened, parse
from schedbench.profiles.judge.trials import Question, TrialPlan, TrialRequest, conduct, conduct_draws
from schedbench.profiles.platform import pool
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Metric
from tests.profiles.long_prompts import long_prompts

T = TypeVar("T")
R = TypeVar("R")
DRAWS = 8


def compared(folder: Path, slope: tuple[float, float]) -> Comparison:
    scenario = long_prompts(folder, slope=slope)
    a, b = parse("flatten=numpy"), parse("flatten=list")
    plan = TrialPlan(varied=a.varied | b.varied, draws=DRAWS)
    with opened(Question.of(str(scenario)), a, b, TrialRequest(device="vgpu")) as sides:
        trials = conduct(*sides, plan, lambda *_: None)
        drawn = conduct_draws(*sides, trials, plan)
    return judge(trials, VerdictRules(headline=("input_throughput",)), drawn)


@pytest.mark.parametrize(
    ("slope", "verdict"), [((0.0, 60.0), "inconclusive"), ((60.0, 100.0), "worse"), ((0.0, 10.0), "better")]
)
def test_a_verdict_needs_one_sign_over_the_constants_range(
    tmp_path: Path, slope: tuple[float, float], verdict: str
) -> None:
    found = compared(tmp_path, slope)
    firmness = found.metrics["input_throughput"].firmness
    assert isinstance(firmness, Firmness) and firmness.draws == DRAWS
    assert found.verdict == verdict
    assert (Reason.CONSTANTS in found.reasons) == (verdict == "inconclusive") == firmness.flips
    if firmness.flips:
        assert firmness.constant == "phases.flatten.b" and firmness.correlation < -0.9
    else:
        assert firmness.holding == DRAWS


def test_the_range_of_a_figure_names_its_constant(tmp_path: Path) -> None:
    scenario = long_prompts(tmp_path, slope=(100.0, 500.0))
    question = ask(str(scenario), ("engine.relay.flatten=list",))
    result = execute(question, Options(device="vgpu"))
    found = ranges(question, result, DRAWS).metrics["ttft_ms"]
    metric = result.metrics["ttft_ms"]
    assert isinstance(metric, Metric) and found.low < metric.values[0] < found.high
    assert found.follows == "phases.flatten.b" and found.correlation > 0.9


@pytest.mark.parametrize(
    ("scenario", "known_tokens", "values"),
    [("mixed", 2, "none"), ("mixed", 3, "real"), ("spec_v2", 2, "real")],
    ids=["equal times", "other times", "acceptance is measured"],
)
def test_values_are_computed_only_where_times_depend_on_them(
    scenario: str, known_tokens: int, values: str
) -> None:
    asked, other = (
        ask(scenario, ("workload.requests=1", "workload.prompt_tokens=8", f"workload.output_tokens={tokens}"))
        for tokens in (2, known_tokens)
    )
    known = execute(other, Options(device="vgpu"))
    seen: list[object] = []

    def each(function: Callable[[T], R], questions: Iterable[T], /) -> Iterable[R]:  # noqa: ARG001
        seen.extend(questions)
        return ()

    run_each(each, asked, known, [asked.hardware])
    assert isinstance(seen[0], Resolved) and seen[0].scenario.device.values == values


@pytest.mark.parametrize(
    ("tasks", "wall_s", "import_s", "processes", "fitting", "saves"),
    [
        (16, 3.0, 10.0, 4, 9, True),
        (16, 3.0, 10.0, 4, 1, False),
        (16, 3.0, 40.0, 4, 9, False),
        (16, 1.0, 10.0, 2, 9, False),
        (16, 3.0, None, 1, 9, False),
        (1, 90.0, None, 4, 9, False),
    ],
)
def test_a_pool_is_used_where_it_saves_time(
    monkeypatch: pytest.MonkeyPatch,
    tasks: int,
    wall_s: float,
    import_s: float | None,
    processes: int,
    fitting: int,
    saves: bool,
) -> None:
    """``fitting``: how many processes of the size of this one the free memory has room for."""
    free = fitting * psutil.Process().memory_info().rss * 1.5  # this process may grow meanwhile
    monkeypatch.setattr(pool, "processors", lambda: processes)
    monkeypatch.setattr(pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=int(free)))
    assert pool.saves_time(tasks, wall_s, import_s) == saves

"""Seeds and sides of a comparison in processes side by side: the same document, and never where times are measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from schedbench.cli.arguments import use_workers
from schedbench.cli.errors import USAGE, exit_code
from schedbench.profiles.judge import trials
from schedbench.profiles.judge.compare import VerdictRules, judge
from schedbench.profiles.judge.document import document
from schedbench.profiles.judge.sides import opened, parse
from schedbench.profiles.judge.trials import Question, Sample, TrialPlan, TrialRequest, Trials, conduct
from schedbench.profiles.platform import pool
from schedbench.profiles.platform.pool import MeasuredAloneError
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.ranks.execute import Options
from schedbench.profiles.sweeps.ladder import climb
from tests.profiles.judge.conftest import OTHER_TOKENS, seeded

SMALL = ("workload.requests=4", "workload.output_tokens={dist: fixed, value: 6}", "device.values=none")
SIDES = parse("overlap=false"), parse("overlap=true")


@pytest.fixture(autouse=True)
def own_workers() -> Iterator[None]:
    yield
    use_workers(None, None)


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tasks that were spread."""
    found: list[int] = []

    @contextmanager
    def spread(tasks: int, seconds: float, import_s: float | None) -> Iterator[object]:  # noqa: ARG001
        found.append(tasks)
        yield map

    monkeypatch.setattr(trials, "spread", spread)
    return found


def test_both_sides_of_the_seeds_after_the_second_are_spread(result, side, spread):
    a, b = (side(name, seeded(result, range(5)), spreads=True) for name in "ab")
    log: list[str] = []
    found = conduct(a, b, TrialPlan(seeds=5), lambda name, sample: log.append(f"{name}{sample.seed}"))
    assert spread == [6] and len(found.a) == len(found.b) == 5
    assert log == [f"{name}{seed}" for seed in range(5) for name in "ab"]


def test_no_seed_runs_after_one_whose_tokens_differ(result, side, spread):
    others = seeded(result, range(5))
    others[2] = Sample(result(OTHER_TOKENS, seed=2))
    a, b = side("a", seeded(result, range(5)), spreads=True), side("b", others, spreads=True)
    found = conduct(a, b, TrialPlan(seeds=5), lambda *_: None)
    assert (spread, len(found.a), found.tokens, b.asked) == ([6], 3, "different", [0, 1, 2])


def test_a_side_that_is_a_process_already_is_not_spread(result, side, spread):
    a, b = side("a", seeded(result, range(5)), spreads=True), side("b", seeded(result, range(5)))
    assert len(conduct(a, b, TrialPlan(seeds=5), lambda *_: None).a) == 5
    assert spread == []


@pytest.mark.parametrize("workers", [(2, None), (None, "dask:tcp://127.0.0.1:1")])
def test_measured_sides_refuse_workers(workers: tuple[int | None, str | None]) -> None:
    question = Question.of("mixed", [*SMALL[:2], "device.host=measured"])
    use_workers(*workers)
    reason = r"shares no machine .*measures the host's times"
    order = TrialRequest(device="vgpu")
    with pytest.raises(MeasuredAloneError, match=reason) as refused, opened(question, *SIDES, order):
        raise AssertionError
    assert exit_code(refused.value) == USAGE
    use_workers(1, None)
    with opened(question, *SIDES, order) as sides:
        assert len(sides) == 2


def test_a_measured_ladder_refuses_workers() -> None:
    use_workers(2, None)
    with pytest.raises(MeasuredAloneError, match="--jobs 2: a measured run"):
        climb(ask("ladder", ["device.host=measured"]), Options(device="vgpu"))


def judged(jobs: int) -> object:
    use_workers(jobs, None)
    question = Question.of("mixed", SMALL)
    with opened(question, *SIDES, TrialRequest(device="vgpu")) as (a, b):
        found: Trials = conduct(a, b, TrialPlan(seeds=4), lambda *_: None)
    content = document(judge(found, VerdictRules()), a="a", b="b", run={})
    for run in (run for side in ("baseline", "candidate") for run in content["comparison"][side]["runs"]):
        assert run.pop("id")  # which is random
    return content


@pytest.mark.processes
@pytest.mark.wide
def test_one_process_and_two_give_the_same_document(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = judged(1)
    monkeypatch.setattr(pool, "_START_S", -1.0)
    assert judged(2) == alone

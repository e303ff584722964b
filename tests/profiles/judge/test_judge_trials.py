"""Which runs a comparison makes, in which order, and when it stops."""

from __future__ import annotations

import pytest

from schedbench.profiles.judge.likeness import LikenessError
from schedbench.profiles.judge.trials import Sample, TrialPlan, WorkloadError, conduct
from schedbench.profiles.judge.worker import CrashError
from tests.profiles.judge.conftest import MEASURED, OTHER_TOKENS, rows, seeded


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def notice(log):
    return lambda name, _: log.append(name)


def test_exact_sides_run_the_same_seeds(result, side, notice, log):
    a, b = side("a", seeded(result, range(3, 8))), side("b", seeded(result, range(3, 8)))
    trials = conduct(a, b, TrialPlan(seeds=5, first_seed=3), notice)
    assert a.asked == b.asked == [3, 4, 5, 6, 7]
    assert (trials.design, trials.tokens, "".join(log)) == ("seeds", "equal", "ab" * 5)


def test_a_second_seed_that_gives_the_same_run_ends_the_seeds(result, side, notice, log):
    """The documents are compared without tokens and the keys that name the run."""
    same = [
        Sample(result({"outputs.digest": str(seed) * 64, "run.id": f"r{seed}"}, seed=seed)) for seed in (0, 1)
    ]
    trials = conduct(side("a", same), side("b", same), TrialPlan(seeds=5), notice)
    assert (trials.one_run, len(trials.a), "".join(log)) == (True, 1, "abab")
    other = [same[0], Sample(result({"per_step.decode.steps": 77}, seed=1))]
    trials = conduct(side("a", same), side("b", other), TrialPlan(seeds=2, allow_divergence=True), notice)
    assert (trials.one_run, len(trials.a)) == (False, 2)


def test_measured_sides_run_in_abba_blocks_after_a_warm_up(result, side, notice, log):
    sample = Sample(result(MEASURED))
    a, b = side("a", [sample]), side("b", [sample])
    trials = conduct(a, b, TrialPlan(pairs=4, first_seed=3), notice)
    assert "".join(log) == "ab" + "abbabaab"
    assert a.asked == b.asked == [3, 3, 3, 4, 4]
    assert (trials.design, len(trials.a), len(trials.b)) == ("blocks", 4, 4)
    assert trials.blocks([1, 4, 6, 7], [2, 3, 5, 8]) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_stored_sides_are_compared_at_their_common_seeds(result, side, notice):
    a = side("a", seeded(result, (1, 2)), seeds=(0, 1, 2))
    b = side("b", seeded(result, (1, 2)), seeds=(1, 2, 3))
    conduct(a, b, TrialPlan(), notice)
    assert a.asked == [1, 2]


def test_stored_sides_without_a_common_seed_are_unlike(side, notice):
    with pytest.raises(LikenessError, match=r"measure\.seed: \[0\] against \[1\]"):
        conduct(side("a", [], seeds=[0]), side("b", [], seeds=[1]), TrialPlan(), notice)


def test_stored_measurements_are_used_without_pairing(result, side, notice):
    samples = [Sample(result(MEASURED)) for _ in range(8)]
    trials = conduct(side("a", samples, seeds=[0]), side("b", samples[:6], seeds=[0]), TrialPlan(), notice)
    assert (trials.design, len(trials.a), len(trials.b)) == ("stored", 8, 6)


def test_stored_measurements_of_several_seeds_are_as_many_of_each(result, side, notice):
    a, b = ([Sample(result(MEASURED, seed=seed)) for seed in seeds] for seeds in ([0, 0, 0, 1], [0, 1, 1, 2]))
    trials = conduct(side("a", a, seeds=[0, 1]), side("b", b, seeds=[0, 1, 2]), TrialPlan(), notice)
    assert [[run.seed for run in runs] for runs in (trials.a, trials.b)] == [[0, 1], [0, 1]]


def test_other_tokens_end_the_comparison(result, side, notice, log):
    a = side("a", [Sample(result({"requests": rows(r0=[5, 6])}))])
    b = side("b", [Sample(result(OTHER_TOKENS | {"requests": rows(r0=[5, 7])}))])
    trials = conduct(a, b, TrialPlan(), notice)
    assert "".join(log) == "ab"
    assert trials.tokens == "different"
    where = trials.divergence
    assert (where.request, where.position, where.token_a, where.token_b) == ("r0", 1, 6, 7)
    assert (where.margin_a, where.margin_b) == (0.1, 0.1)


def test_divergence_may_be_allowed(result, side, notice, log):
    a = side("a", seeded(result, range(5)))
    b = side("b", [Sample(result(OTHER_TOKENS, seed=seed)) for seed in range(5)])
    trials = conduct(a, b, TrialPlan(allow_divergence=True), notice)
    assert ("".join(log), trials.tokens) == ("ab" * 5, "different")


def test_unlike_sides_are_refused_after_one_run_each(result, side, notice, log):
    a, b = side("a", [Sample(result())]), side("b", [Sample(result({"hardware.name": "a100"}))])
    with pytest.raises(LikenessError, match=r"hardware\.name: 'h200' against 'a100'"):
        conduct(a, b, TrialPlan(), notice)
    assert "".join(log) == "ab"


def test_a_run_of_a_is_reported_before_b_crashes(result, side, notice, log):
    a, b = side("a", [Sample(result())]), side("b", [CrashError("b", "Traceback: boom")])
    with pytest.raises(CrashError, match="boom"):
        conduct(a, b, TrialPlan(), notice)
    assert log == ["a"]


def test_a_run_without_finished_requests_is_refused(result, side, notice):
    failed = [{**rows(r0=[])[0], "status": "failed", "reason": "out of memory", "finish": None}]
    a = side("a", [Sample(result({"requests": failed}))])
    with pytest.raises(WorkloadError, match="a: no request finished; the reason of the first: out of memory"):
        conduct(a, a, TrialPlan(), notice)


def test_an_interrupted_run_ends_the_comparison_and_is_reported(result, side, notice, log):
    a = side("a", [Sample(result({"run.cancelled": True}))])
    with pytest.raises(KeyboardInterrupt):
        conduct(a, a, TrialPlan(), notice)
    assert log == ["a"]

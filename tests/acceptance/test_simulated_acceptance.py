"""Simulated acceptance: both workers do the same work, tokens are not compared, and contradictory settings are
refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from schedbench.profiles.record.result import Abstained
from schedbench.sched.observe import Observer
from schedbench.sched.request import Request
from tests.acceptance.runs import executed, prepared_run, resolved, result_of, statuses, value
from tests.scenarios.refusals import refused

pytestmark = pytest.mark.wide

SMALL = (
    "workload.requests=12",
    "workload.output_tokens={dist: uniform, min: 40, max: 90}",
)
NONE = ("device.values=none", "model={preset: llama-3-8b, dtype: bfloat16}")
WORKERS = {"v1": ("engine.overlap=false",), "v2": ("engine.overlap=true",)}


def simulated(mode: str, *overrides: str, mean: float = 2.5, more: str = "") -> tuple[str, ...]:
    acceptance = f"{{mean: {mean}{more}}}"
    speculative = f"engine.speculative={{algorithm: eagle, mode: {mode}, acceptance: {acceptance}}}"
    return (*SMALL, *WORKERS[mode], speculative, *overrides)


class AcceptedLengths(Observer):
    """Records the accepted lengths of each request's verifies, in order."""

    def __init__(self) -> None:
        self.of: dict[str, list[int]] = {}

    def verified(self, request: Request, accepted: int) -> None:
        self.of.setdefault(request.id, []).append(accepted)


def lengths(*overrides: str) -> dict[str, list[int]]:
    observed = AcceptedLengths()
    with prepared_run(resolved("spec_v2", *overrides)) as (_, composed):
        composed.measure(lambda *_: nullcontext(observed))
    return observed.of


def test_both_workers_do_the_same_work() -> None:
    """A request's lengths are its own, so this also holds where steps have other requests."""
    v2 = lengths(*simulated("v2"))
    assert lengths(*simulated("v1")) == v2
    assert lengths(*simulated("v2", "engine.max_running_requests=3", "engine.relay=pr25774")) == v2
    assert lengths(*simulated("v2", "measure.seed=1")) != v2
    assert len({tuple(own) for own in v2.values()}) > 6


def test_a_retracted_request_continues_its_sequence_of_lengths() -> None:
    tight = ("engine.kv_tokens=640", "engine.schedule_conservativeness=0.01", "workload.arrival=burst")
    short = ("workload.prompt_tokens=24", "workload.output_tokens=90")
    retracted = lengths(*simulated("v1", *short, *tight))
    plain = lengths(*simulated("v1", *short))
    assert value(result_of("spec_v2", *simulated("v1", *short, *tight)), "retractions") > 0
    assert all(own == plain[name][: len(own)] for name, own in retracted.items())


@pytest.mark.parametrize("values", [(), NONE], ids=["real", "none"])
@pytest.mark.parametrize("mode", WORKERS)
def test_tokens_abstain_and_the_result_is_labelled(mode: str, values: tuple[str, ...]) -> None:
    result = result_of("spec_v2", *simulated(mode), *values)
    assert result.outputs == Abstained(
        abstained="the acceptance of drafts was simulated, the tokens mean nothing"
    )
    assert result.labels.acceptance == "simulated"
    assert result.document()["labels"]["acceptance"] == "simulated"
    assert statuses(result) == {"finished"}
    assert value(result, "accept_length") == pytest.approx(2.5, abs=0.1)


def test_measured_acceptance_is_labelled() -> None:
    assert result_of("spec_v2", *SMALL).labels.acceptance == "measured"
    plain = result_of("decode_heavy", "workload.requests=4", "workload.output_tokens=8")
    assert "acceptance" not in plain.document()["labels"]
    assert not [name for name in plain.metrics if "accept" in name]


@pytest.mark.parametrize("method", ["match-expected", "multinomial"])
@pytest.mark.parametrize("per", ["request", "batch"])
def test_every_method_of_drawing_has_the_given_mean(method: str, per: str) -> None:
    result = result_of(
        "spec_v2", *simulated("v2", *NONE, more=f", method: {method}, per: {per}"), "workload.requests=24"
    )
    few = 0.3 if per == "batch" else 0.12  # one draw for each step, not for each request
    assert value(result, "accept_length") == pytest.approx(2.5, abs=few)
    shares = [value(result, f"position_acceptance.{k}") for k in (1, 2, 3)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(value(result, "accept_length") - 1)
    assert (shares[2] > 0) == (method == "multinomial")


def test_drawing_per_batch_gives_all_its_requests_the_same_length() -> None:
    together = lengths(
        *simulated("v1", "workload.arrival=burst", "workload.prompt_tokens=20", more=", per: batch"),
        "workload.requests=4",
    )
    shortest = min(map(len, together.values()))
    assert len({tuple(own[:shortest]) for own in together.values()}) == 1


@pytest.mark.parametrize("mean", [1.0, 4.0])
def test_smallest_and_largest_mean_are_exact(mean: float) -> None:
    assert value(result_of("spec_v2", *simulated("v2", *NONE, mean=mean)), "accept_length") == mean


def test_prefills_verify_nothing() -> None:
    """Every token but a request's first comes from a verify, because the mean is 1."""
    result = result_of("spec_v2", *simulated("v2", *NONE, mean=1.0))
    tokens = sum(request.output_tokens for request in result.requests)
    verifies = sum(len(own) for own in lengths(*simulated("v2", *NONE, mean=1.0)).values())
    assert verifies == tokens - len(result.requests)


REFUSED = {
    "with values none acceptance cannot be measured: expected {mean: ...}": NONE,
    "a chain of 5 steps has 6, got 4": ("engine.speculative={algorithm: eagle, steps: 5, draft_tokens: 4}",),
    "expected at most steps + 1 = 4, got 4.5": simulated("v2", mean=4.5),
    "means something only with an algorithm": ("engine.speculative={algorithm: none, steps: 5}",),
    "expected 2 to 7, all that the tree has, got 9": (
        "engine.speculative={algorithm: eagle, mode: v1, steps: 2, topk: 2, draft_tokens: 9}",
        "engine.overlap=false",
    ),
    "seq_lens_cpu=bound: until #26020": ("engine.relay={state: pr25944, seq_lens_cpu: bound}",),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_contradictory_settings_are_refused(reason: str) -> None:
    assert reason in "\n".join(refused(resolved, "spec_v2", *REFUSED[reason]))


def test_trees_that_only_engines_may_run_are_refused_of_our_own_scheduler() -> None:
    question = resolved("spec_v2", "engine.speculative={algorithm: eagle, topk: 2}")
    [problem] = refused(executed, question)
    assert "draft trees cannot be combined with speculation v2" in problem

"""One digest for the whole ladder, and the advantages of ``latest``."""

from __future__ import annotations

import pytest

from schedbench.profiles.record.result import Result
from schedbench.sched.relay.states import states
from tests.acceptance.runs import SMALL, TIGHT, digest_of, known_result, result_of, value

wide = pytest.mark.wide

# Retracted requests are prefilled again in chunks, mixed with decodes.
CHUNKED = (*TIGHT, "engine.chunked_prefill_size=64")
# With each way to publish lengths and to hand on tokens.
SOME = ("pr25774-before", "pr25944", "pr25945", "latest")
EXPOSED = ("exposed_stall_us_per_step", "exposed_host_us_per_step")


def digest(state: str, *overrides: str) -> str:
    result = known_result("mixed", *SMALL, *overrides, f"engine.relay={state}")
    assert TIGHT[0] not in overrides or value(result, "retractions") > 0
    return digest_of(result)


@pytest.mark.parametrize("values", ["none", pytest.param("real", marks=wide)])
def test_all_states_have_one_digest(values: str) -> None:
    mode = f"device.values={values}"
    digests = {state: digest(state, *CHUNKED, mode) for state in states()}
    assert digests == dict.fromkeys(states(), digest("latest", mode))


FEW = ("workload.requests=4", "workload.output_tokens.max=16")


def test_all_states_have_one_digest_where_grammars_delay_the_samples() -> None:
    results = {state: result_of("grammar", *FEW, f"engine.relay={state}") for state in SOME}
    assert len({digest_of(result) for result in results.values()}) == 1


LOOPS = ("engine.overlap=true", "engine.overlap=false")


@pytest.mark.wide
def test_exact_penalties_are_equal_in_all_states_and_loops() -> None:
    digests = {
        digest_of(result_of("penalties", *FEW, f"engine.relay={{state: {state}, penalties: exact}}", loop))
        for state in SOME
        for loop in LOOPS
    }
    assert len(digests) == 1


@wide
def test_penalties_with_grammars_are_equal_in_all_states() -> None:
    spelled = {digest_of(result_of("grammar", *FEW, f"engine.relay={state}")) for state in states()}
    assert len(spelled) == 1
    named = [state for state in states() if state != "latest"]
    for loop in LOOPS:
        penalised = {
            digest_of(result_of("penalties", *FEW, loop, f"engine.relay={state}")) for state in named
        }
        assert len(penalised) == 1


def before_and_after(scenario: str, *overrides: str) -> list[Result]:
    """Runs under #25945 and under ``latest``."""
    return [known_result(scenario, *overrides, f"engine.relay={state}") for state in ("pr25945", "latest")]


# Times do not depend on values.
NONE = "device.values=none"
DECODES = ("overlap_on", "workload.requests=8", "workload.output_tokens=12")
PREFILLS = ("prefill_heavy", "workload.requests=4", "workload.output_tokens=8")


class TestLatest:
    """Never slower than #25945, and faster wherever #25945 exposes host time. Times are emulated under the h200
    profile."""

    @pytest.mark.wide
    @pytest.mark.parametrize(
        "question",
        [
            ("mixed", "workload.requests=8", NONE),
            DECODES,
            ("overlap_off", "workload.requests=6", "workload.output_tokens=8"),
            PREFILLS,
            ("shared_prefix", "workload.requests=8", NONE),
            ("penalties", "workload.requests=6", "workload.output_tokens.max=24"),
            (
                "retraction",
                "workload.requests=12",
                "workload.output_tokens={dist: uniform, min: 60, max: 100}",
                "engine.kv_tokens=960",
                NONE,
            ),
        ],
        ids=lambda question: question[0],
    )
    def test_throughput_and_exposed_time(self, question: tuple[str, ...]) -> None:
        before, after = before_and_after(*question)
        exposed = [sum(value(result, name) for name in EXPOSED) for result in (before, after)]
        assert exposed[1] <= exposed[0]
        assert value(after, "output_throughput") >= value(before, "output_throughput")
        if exposed[0] > 1:
            assert exposed[1] < 0.95 * exposed[0]
            assert value(after, "output_throughput") > value(before, "output_throughput")

    def test_schedule_kernels_of_a_decode_overlap_the_forward(self) -> None:
        idle = [value(result, "forward_idle_us_per_step") for result in before_and_after(*DECODES)]
        assert idle[1] < idle[0] / 2

    def test_a_prefill_waits_only_for_its_tokens(self) -> None:
        after = result_of(*PREFILLS, "engine.relay=latest")
        assert {row.site.function for row in after.syncs if row.sync and row.site} == {"_host_tokens"}
        assert not any(row.blocking for row in after.copies)

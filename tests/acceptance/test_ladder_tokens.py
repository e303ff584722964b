"""One digest for the whole ladder, and what the best rung is better at."""

from __future__ import annotations

from functools import cache

import pytest

from schedbench.profiles.record.result import Result
from schedbench.sched.relay.states import states
from tests.acceptance.runs import SMALL, digest_of, result_of, value

pytestmark = pytest.mark.wide

# Requests that lose their KV and come back, in chunks, behind whom others decode.
TIGHT = (
    "engine.kv_tokens=1920",
    "engine.schedule_conservativeness=0.01",
    "engine.chunked_prefill_size=64",
)
EXPOSED = ("exposed_stall_us_per_step", "exposed_host_us_per_step")


@cache
def digest(state: str, *overrides: str) -> str:
    result = result_of("mixed", *SMALL, *overrides, f"engine.relay={state}")
    assert TIGHT[0] not in overrides or value(result, "retractions") > 0
    return digest_of(result)


@pytest.mark.parametrize("state", states())
@pytest.mark.parametrize("values", ["real", "none"])
def test_no_state_changes_a_token(state: str, values: str) -> None:
    assert digest(state, *TIGHT, f"device.values={values}") == digest("latest", f"device.values={values}")


@pytest.mark.parametrize("state", states())
def test_nor_where_grammars_delay_the_samples(state: str) -> None:
    few = ("workload.requests=6", "workload.output_tokens.max=24")
    results = (result_of("grammar", *few, f"engine.relay={name}") for name in (state, "latest"))
    assert len({digest_of(result) for result in results}) == 1


class TestPenalties:
    """Upstream's rule promises equality within one loop, the exact one everywhere."""

    few = ("workload.requests=16",)

    @pytest.mark.parametrize("overlap", ["true", "false"])
    def test_upstreams_are_the_same_in_every_state(self, overlap: str) -> None:
        named = [name for name in states() if name != "latest"]
        results = [
            result_of("penalties", *self.few, f"engine.relay={name}", f"engine.overlap={overlap}")
            for name in named
        ]
        assert len({digest_of(result) for result in results}) == 1

    def test_exact_ones_are_the_same_in_every_state_and_loop(self) -> None:
        results = [
            result_of(
                "penalties",
                *self.few,
                f"engine.relay={{state: {name}, penalties: exact}}",
                f"engine.overlap={overlap}",
            )
            for name in ("pr25774-before", "pr25944", "pr25945", "latest")
            for overlap in ("true", "false")
        ]
        assert len({digest_of(result) for result in results}) == 1


class TestLatest:
    """Never behind #25945, and ahead wherever that one exposes host time. Emulated, under the h200 profile."""

    @staticmethod
    def both(scenario: str, *overrides: str) -> tuple[Result, Result]:
        before, after = (
            result_of(scenario, *overrides, f"engine.relay={state}") for state in ("pr25945", "latest")
        )
        return before, after

    @pytest.mark.parametrize(
        ("scenario", "overrides"),
        [
            ("mixed", ("workload.requests=24",)),
            ("overlap_on", ("workload.requests=12", "workload.output_tokens=24")),
            ("overlap_off", ("workload.requests=12", "workload.output_tokens=24")),
            ("prefill_heavy", ("workload.requests=8",)),
            ("shared_prefix", ("workload.requests=24",)),
            ("penalties", ("workload.requests=16",)),
            ("retraction", ("workload.requests=24",)),
        ],
    )
    def test_throughput_and_exposed_time(self, scenario: str, overrides: tuple[str, ...]) -> None:
        before, after = self.both(scenario, *overrides)
        exposed = [sum(value(result, name) for name in EXPOSED) for result in (before, after)]
        assert exposed[1] <= exposed[0]
        assert value(after, "output_throughput") >= value(before, "output_throughput")
        if exposed[0] > 1:
            assert exposed[1] < 0.95 * exposed[0]
            assert value(after, "output_throughput") > value(before, "output_throughput")

    def test_the_schedules_kernels_of_a_decode_run_beside_the_forward(self) -> None:
        before, after = self.both("overlap_on", "workload.requests=12", "workload.output_tokens=24")
        idle = [value(result, "forward_idle_us_per_step") for result in (before, after)]
        assert idle[1] < idle[0] / 2

    def test_no_call_of_a_prefill_waits_but_for_the_tokens(self) -> None:
        _, after = self.both("prefill_heavy", "workload.requests=8")
        assert {row.site.function for row in after.syncs if row.sync and row.site} == {"_host_tokens"}
        assert not any(row.blocking for row in after.copies)

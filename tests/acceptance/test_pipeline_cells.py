"""What a pipeline's step copies, sends and waits for, on every stage and in every state."""

from __future__ import annotations

from functools import cache

import pytest

from schedbench.profiles.ranks.join import APART
from schedbench.profiles.record.result import Abstained, Metric, RankPart, Result
from schedbench.sched.relay.states import states
from tests.acceptance.cells import Copy, copies, steps, waits
from tests.acceptance.runs import result_of

STAGES = 3
SCENARIO = (
    "faults/staging",
    "model.preset=tiny-deep",
    f"engine.pipeline.stages={STAGES}",
    "engine.chunked_prefill_size=none",
    "engine.mixed_chunk=false",
)
READ = Copy("_host_tokens", "schedule", "d2h", "pageable B")
PROMPT_NOW = Copy("upload_now", "schedule", "h2d", "pinned nb")
PROMPT_LATE = Copy("resolve_late", "forward", "h2d", "pinned nb")


OWN = ("step_ms", "forward_ms", "forward_occupancy", "gpu_busy", "host_stall_us_per_step")


BY_STATE = pytest.mark.parametrize("state", states())


@cache
def run(state: str) -> Result:
    return result_of(*SCENARIO, f"engine.relay={state}")


def tallies(rank: RankPart, kind: str, stream: str) -> dict[str, set[float]]:
    """The least known of a counter, median and maximum: one number where every step has as many."""
    found = rank.per_step[kind].streams.get(stream, {})
    return {name: {tally.median, tally.max} for name, tally in found.items()}


@BY_STATE
def test_the_prompt_goes_up_on_every_stage(state: str) -> None:
    """Before #25945 on the schedule stream; from it on, on the forward stream, but for latest, which packs it."""
    late = state == "pr25945"
    counts = copies(run(state), "prefill")
    prefills = run(state).steps()["prefill"]
    assert counts.get(PROMPT_LATE, 0) == (prefills if late else 0)
    assert counts.get(PROMPT_NOW, 0) == (0 if late else prefills)
    first, *others = run(state).ranks
    for rank in others:  # the others need no more of it than its length
        for stream in ("schedule", "forward"):
            up = {name: n for name, n in tallies(rank, "prefill", stream).items() if name.startswith("h2d")}
            mine = tallies(first, "prefill", stream).items()
            assert up == {name: n for name, n in mine if name.startswith("h2d")}


@BY_STATE
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_tokens_come_round_and_are_read_once(state: str, kind: str) -> None:
    """Per step: a blocking read by the schedule, behind a wait for the copy stream, on which nothing went down."""
    result = run(state)
    count = result.steps()[kind]
    assert copies(result, kind)[READ] == count
    assert waits(result, kind)["host_waits", "copy", "cudaEventSynchronize"] == count
    for rank in result.ranks:
        copying = tallies(rank, kind, "copy")
        assert not any(name.startswith(("h2d", "d2h")) for name in copying)
        steady = "decode.steady" if kind == "decode" else kind  # who leaves is told otherwise before #25944
        assert tallies(rank, steady, "schedule")["d2h_blocking"] == {1}


@BY_STATE
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_what_travels(state: str, kind: str) -> None:
    """Proxies go down the line; tokens go from the last stage to the first, and on but for the one before the last."""
    sends = [tallies(rank, kind, "link")["send"] for rank in run(state).ranks]
    proxies_and_tokens = [
        2,
        1,
        1,
    ]  # first: both; middle: proxies, and has tokens from the first; last: tokens
    assert sends == [{count} for count in proxies_and_tokens]


def test_tokens_are_stored_where_mixed_steps_need_them() -> None:
    """#25945 stores them on the copy stream of every stage, before it on none."""
    for state, kernels in (("pr25945", 1), ("pr26425", 0)):
        for rank in run(state).ranks:
            assert tallies(rank, "decode", "copy").get("kernel", {0}) == {kernels}


def test_a_lone_chunk_sends_no_token_round() -> None:
    """A prompt of three chunks of 16: with the switch only the last one's token travels."""
    asked = (*SCENARIO, "engine.chunked_prefill_size=16", "workload.requests=1", "workload.prompt_tokens=40")
    plain, skipping = (
        result_of(*asked, f"engine.pipeline.skip_chunk_outputs={switch}") for switch in ("false", "true")
    )
    assert plain.outputs == skipping.outputs
    sends = [result.ranks[-1].per_step["prefill"].streams["link"]["send"] for result in (plain, skipping)]
    assert [steps(result, "prefill") for result in (plain, skipping)] == [3, 3]
    assert [tally.steps_with for tally in sends] == [3, 1]


def test_what_is_a_devices_or_a_loops_is_told_by_each_stage() -> None:
    result = run("latest")
    for name in OWN:
        assert result.metrics[name] == Abstained(abstained=APART)
        assert all(isinstance(rank.metrics[name], Metric) for rank in result.ranks)
    assert result.idle == Abstained(abstained=APART)
    assert all(
        isinstance(result.metrics[name], Metric) for name in ("ttft_ms", "bubble_pct", "peak_kv_tokens")
    )

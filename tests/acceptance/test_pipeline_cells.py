"""What a pipeline's step copies, sends and waits for, on every stage and in every state."""

from __future__ import annotations

import pytest

from schedbench.profiles.ranks.join import APART
from schedbench.profiles.record.result import Abstained, IdlePart, Metric, RankPart, Result
from schedbench.sched.relay.states import states
from tests.acceptance.cells import PROMPT_LATE, PROMPT_NOW, READ, copies, steps, waits
from tests.acceptance.runs import known_result, result_of

STAGES = 3
SCENARIO = (
    "faults/staging",
    "model.preset=tiny-deep",
    f"engine.pipeline.stages={STAGES}",
    "engine.chunked_prefill_size=none",
    "engine.mixed_chunk=false",
    "workload.requests=5",
    "workload.output_tokens={dist: uniform, min: 2, max: 8}",
)


OWN = ("step_ms", "forward_ms", "forward_occupancy", "gpu_busy", "host_stall_us_per_step")


BY_STATE = pytest.mark.parametrize("state", states())


def run(state: str) -> Result:
    return known_result(*SCENARIO, f"engine.relay={state}")


def tallies(rank: RankPart, kind: str, stream: str) -> dict[str, set[float]]:
    """Returns the median and the maximum of every counter: one number where every step has the same."""
    found = rank.per_step[kind].streams.get(stream, {})
    return {name: {tally.median, tally.max} for name, tally in found.items()}


@BY_STATE
def test_the_prompt_is_uploaded_on_every_stage(state: str) -> None:
    """#25945 moves it from the schedule stream to the forward stream; latest packs it with other uploads."""
    late = state == "pr25945"
    counts = copies(run(state), "prefill")
    prefills = run(state).steps()["prefill"]
    assert counts.get(PROMPT_LATE, 0) == (prefills if late else 0)
    assert counts.get(PROMPT_NOW, 0) == (0 if late else prefills)
    first, *others = run(state).ranks
    for rank in others:  # the others need only its length
        for stream in ("schedule", "forward"):
            up = {name: n for name, n in tallies(rank, "prefill", stream).items() if name.startswith("h2d")}
            mine = tallies(first, "prefill", stream).items()
            assert up == {name: n for name, n in mine if name.startswith("h2d")}


@BY_STATE
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_tokens_reach_every_stage_and_are_read_once(state: str, kind: str) -> None:
    """Per step the schedule makes a blocking read, after a wait for the copy stream, which made no download."""
    result = run(state)
    count = result.steps()[kind]
    assert copies(result, kind)[READ] == count
    assert waits(result, kind)["host_waits", "copy", "cudaEventSynchronize"] == count
    for rank in result.ranks:
        copying = tallies(rank, kind, "copy")
        assert not any(name.startswith(("h2d", "d2h")) for name in copying)
        steady = "decode.steady" if kind == "decode" else kind  # filtering copies differently before #25944
        assert tallies(rank, steady, "schedule")["d2h_blocking"] == {1}


@BY_STATE
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_proxies_and_tokens_sent_by_every_stage(state: str, kind: str) -> None:
    """Each stage sends proxies to the next one; tokens go from the last stage to the first, and on to all but the one
    before the last."""
    sends = [tallies(rank, kind, "link")["send"] for rank in run(state).ranks]
    # The first sends both; the middle one proxies, and it receives tokens from the first; the last one tokens.
    assert sends == [{2}, {1}, {1}]


def test_25945_stores_tokens_on_every_stage() -> None:
    """It stores them on the copy stream, for mixed steps; earlier states store them on no stage."""
    for state, kernels in (("pr25945", 1), ("pr26425", 0)):
        for rank in run(state).ranks:
            assert tallies(rank, "decode", "copy").get("kernel", {0}) == {kernels}


def test_skip_chunk_outputs_sends_only_the_last_chunks_token() -> None:
    """The prompt has three chunks of 16 tokens."""
    asked = (*SCENARIO, "engine.chunked_prefill_size=16", "workload.requests=1", "workload.prompt_tokens=40")
    plain, skipping = (
        result_of(*asked, f"engine.pipeline.skip_chunk_outputs={switch}") for switch in ("false", "true")
    )
    assert plain.outputs == skipping.outputs
    sends = [result.ranks[-1].per_step["prefill"].streams["link"]["send"] for result in (plain, skipping)]
    assert [steps(result, "prefill") for result in (plain, skipping)] == [3, 3]
    assert [tally.steps_with for tally in sends] == [3, 1]


def test_metrics_of_a_device_or_loop_are_those_of_each_stage() -> None:
    result = run("latest")
    for name in OWN:
        assert result.metrics[name] == Abstained(abstained=APART)
        assert all(isinstance(rank.metrics[name], Metric) for rank in result.ranks)
    assert result.idle == Abstained(abstained=APART)
    assert all(
        isinstance(result.metrics[name], Metric) for name in ("ttft_ms", "bubble_pct", "peak_kv_tokens")
    )


def test_all_stages_sleep_while_no_request_arrives() -> None:
    """Longer than a rank waits for a message: the first stage sleeps, and the others wait for no device."""
    gap = ("workload.requests=2", "workload.arrival={process: constant, rate: 0.001}")
    result = result_of(*SCENARIO, *gap, "engine.relay=latest", "measure.warmup_requests=0")
    assert result.run.failure is None
    for rank in result.ranks:
        step, idle = rank.metrics["step_ms"], rank.idle
        assert isinstance(step, Metric) and isinstance(idle, IdlePart)
        assert step.value < 10 and idle.host_late_us < 1e5 and idle.no_work_us > 9.99e8

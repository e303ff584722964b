"""Results that are read after the next launch, on a device without any of CUDA's mechanisms."""

from __future__ import annotations

from functools import partial

import pytest

from schedbench.sched.observe import StepInfo
from schedbench.sched.relay.states import states
from tests.acceptance.cells import READ, SCHEDULE, THREE, Copy, copies, steps
from tests.acceptance.runs import InFlight, digest_observed, known_result, resolved, result_of, value

FEW = ("device.values=none", "workload.requests=8", "measure.warmup_requests=0")
SERIAL = ("engine.deferred=false", "engine.overlap=false", "engine.relay=latest", "device.hardware=h200")


plain = partial(known_result, "deferred", *SERIAL)


@pytest.mark.wide
@pytest.mark.parametrize("state", states())
def test_every_state_gives_the_tokens_of_the_serial_loop(state: str) -> None:
    result = result_of("deferred", *FEW, f"engine.relay={state}", hazards=True)
    assert result.outputs == plain(*FEW).outputs
    assert result.relay.loop == "deferred"


REAL = ("device.values=real", "workload.requests=4", "measure.warmup_requests=0")


@pytest.mark.wide
@pytest.mark.parametrize(
    "mode",
    [
        "workload.sampling.frequency_penalty=0.5",
        "workload.sampling.grammar={regex: '[0-9]{1,8}'}",
        "workload.sampling.logprobs=true",
        "workload.sampling.temperature=0.8",
        "engine.mixed_chunk=true",
        "engine.page_size=16",
        "device.hardware=h200",
        "workload.controls=[{action: pause_and_retract, at: 5, ms: 1}]",
    ],
)
def test_no_mode_changes_a_token(mode: str) -> None:
    alone = tuple(part for part in (mode,) if "hardware" not in part)
    assert result_of("deferred", *REAL, mode).outputs == plain(*REAL, *alone).outputs


def test_a_retraction_changes_no_token() -> None:
    tight = ("engine.kv_tokens=640", "engine.schedule_conservativeness=0.01")
    long = ("workload.prompt_tokens=40", "workload.output_tokens={dist: uniform, min: 60, max: 90}")
    result = result_of("deferred", *FEW, *long, *tight, "workload.arrival=burst")
    assert value(result, "retractions") > 0
    assert result.outputs == plain(*FEW, *long).outputs


class AfterDecodes(InFlight):
    """Records how many results were unsettled after each launch of a decode."""

    def __init__(self) -> None:
        self.after_decodes: list[int] = []

    def launched(self, info: StepInfo) -> None:
        super().launched(info)
        if info.kind == "decode":
            self.after_decodes.append(self.unsettled)


def test_a_decode_is_launched_before_the_previous_one_is_read() -> None:
    seen = AfterDecodes()
    digest_observed(resolved("deferred", *FEW), lambda *_: seen)
    assert set(seen.after_decodes) == {1, 2}
    assert seen.after_decodes.count(2) > seen.after_decodes.count(1)


def test_no_cuda_mechanism_is_used() -> None:
    result = result_of("deferred", *FEW)
    assert {stream for counts in result.per_step.values() for stream in counts.streams} == {SCHEDULE}
    assert all(row.host_memory != "pinned" for row in result.copies)
    assert {row.call for row in result.syncs if row.sync} == {"cudaStreamSynchronize"}


LENGTHS = (
    "workload.arrival=burst",
    f"workload.requests={len(THREE)}",
    "workload.prompt_tokens=40",
    "workload.output_tokens=6",
    "workload.shared_prefix=null",
)
PROMPT = {True: Copy("resolve_late", SCHEDULE, "h2d", "pageable nb"),
          False: Copy("upload_now", SCHEDULE, "h2d", "pageable nb")}  # fmt: skip


@pytest.mark.parametrize("state", ["pr25774-before", "pr25774", "pr25945-before", "pr25945"])
def test_copies_of_a_step_in_the_states_around_each_pull_request(state: str) -> None:
    """#25774 moves a cast of the tokens and no copy. #25945 moves the prompt's copy into the forward."""
    result = result_of("deferred", *FEW, *LENGTHS, f"engine.relay={state}", hazards=True)
    assert copies(result, "decode") == {READ: steps(result, "decode")}
    prompts = {copy: count for copy, count in copies(result, "prefill").items() if copy in PROMPT.values()}
    assert prompts == {PROMPT[state == "pr25945"]: steps(result, "prefill")}

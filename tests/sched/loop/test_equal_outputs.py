"""The output is the same however the engine is set up, with the real tiny model in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from schedbench.sched.config import SamplingParams
from schedbench.sched.request import Request, Status
from tests.sched.loop.cpu_engine import GREEDY, LOOPS, EngineRun, RunRecorder, config, outputs, requests

DRAWN = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02)
PENALISED = SamplingParams(
    temperature=0.7,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    repetition_penalty=1.2,
    min_new_tokens=5,
)
# Tokens repeat, so penalties that count one late or not at all change the output.
REWARDED = SamplingParams(frequency_penalty=-2.0)
SPELLED = SamplingParams(temperature=1.0, grammar=("regex", ("[a-f]{3,9}(, [0-9]+)*",)))
CHOSEN = SamplingParams(grammar=("choice", ("perhaps", "per se", "no")))

WORKLOADS: dict[str, tuple[SamplingParams, ...]] = {
    "greedy": (GREEDY,),
    "drawn": (DRAWN, GREEDY, replace(DRAWN, top_k=0, temperature=2.0), replace(DRAWN, top_p=1.0, min_p=0.0)),
    "penalised": (PENALISED, GREEDY, REWARDED, replace(PENALISED, min_new_tokens=0), REWARDED),
    "grammar": (SPELLED, CHOSEN),
    "motley": (GREEDY, DRAWN, PENALISED, REWARDED, SPELLED, replace(CHOSEN, repetition_penalty=1.2)),
}

SETUPS: dict[str, dict[str, Any]] = {
    "as is": {},
    "mixed": {"mixed_chunk": True},
    "chunks of 256": {"chunked_prefill_size": 256},
    "no chunks": {"chunked_prefill_size": None},
    "chunks of 19, mixed": {"chunked_prefill_size": 19, "mixed_chunk": True},
    "pages of 16": {"page_size": 16},
    "no radix cache": {"radix_cache": False},
    "two at a time": {"max_running_requests": 2},
    "sixteen at a time": {"max_running_requests": 16},
    "lpm": {"policy": "lpm"},
    "lof": {"policy": "lof"},
    "random": {"policy": "random"},
}
# The pool cannot hold half of what is admitted, because little growth is expected.
CROWDED: dict[str, Any] = {
    "kv_tokens": 160,
    "schedule_conservativeness": 0.02,
    "max_running_requests": 16,
    "chunked_prefill_size": 16,
}
CROWDED_SETUPS: dict[str, dict[str, Any]] = {
    "as is": {},
    "mixed": {"mixed_chunk": True},
    "pages of 4, mixed": {"page_size": 4, "mixed_chunk": True},
    "no radix cache": {"radix_cache": False},
    "no radix cache, pages of 4, mixed": {"radix_cache": False, "page_size": 4, "mixed_chunk": True},
    "lof, pages of 16": {"policy": "lof", "page_size": 16},
}


def setups_of(overlap: bool, setups: dict[str, dict[str, Any]] = SETUPS) -> list[object]:
    """The setups of one loop; ``make wide`` runs those of the serial loop."""
    return [
        pytest.param(
            setup,
            overlap,
            id=f"{'overlapped' if overlap else 'serial'}-{name}",
            marks=[] if overlap else [pytest.mark.wide],
        )
        for name, setup in setups.items()
    ]


# Two of ten requests of "motley" are greedy, too.
ALL_GREEDY = pytest.param("greedy", marks=pytest.mark.wide)


def workload(name: str, *, crowd: bool = False) -> list[Request]:
    """Prompts that share heads; a crowd's are short and its outputs long."""
    kinds = WORKLOADS[name]
    made = (
        requests(10, prompt=(4, 20), output=(24, 40), shared=8, seed=3)
        if crowd
        else requests(8, prompt=(4, 110), output=(4, 20), seed=3)
    )
    for number, req in enumerate(made):
        limit = req.sampling.max_new_tokens
        req.sampling = replace(kinds[number % len(kinds)], max_new_tokens=limit)
    return made


Outputs = dict[str, list[int]]


def run(
    name: str, *, crowd: bool = False, state: str = "latest", **setup: Any
) -> tuple[Outputs, RunRecorder]:
    recorder = RunRecorder()
    done = EngineRun(config(**setup), state=state, observer=recorder).run(workload(name, crowd=crowd))
    assert {req.status for req in done} == {Status.FINISHED}
    assert len(recorder.settled_steps) == len(recorder.launches)
    return outputs(done), recorder


@cache
def expected(name: str, *, crowd: bool = False) -> Outputs:
    """The output of the simplest engine: one request at a time, nothing shared, chunked or overlapped."""
    plain = {"overlap": False, "chunked_prefill_size": None, "radix_cache": False, "max_running_requests": 1}
    output, recorder = run(name, crowd=crowd, **plain)
    assert recorder.kinds == {"prefill", "decode"} and not recorder.retractions
    return output


@pytest.mark.parametrize(("setup", "overlap"), [*setups_of(True), *setups_of(False)])
@pytest.mark.parametrize("name", [ALL_GREEDY, "motley"])
def test_latest_has_one_output_in_every_setup(name: str, setup: dict[str, Any], overlap: bool) -> None:
    output, recorder = run(name, overlap=overlap, **setup)
    assert ("mixed" in recorder.kinds) == setup.get("mixed_chunk", False)
    assert output == expected(name)


@pytest.mark.wide
@LOOPS
@pytest.mark.parametrize("name", ["drawn", "penalised", "grammar"])
def test_every_way_of_sampling_has_one_output(name: str, overlap: bool) -> None:
    output, _ = run(name, overlap=overlap, mixed_chunk=True, chunked_prefill_size=48, page_size=16)
    assert output == expected(name)
    assert output != expected("greedy")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("setup", "overlap"), [*setups_of(True, CROWDED_SETUPS), *setups_of(False, CROWDED_SETUPS)]
)
@pytest.mark.parametrize("name", [ALL_GREEDY, "motley"])
def test_retraction_changes_no_output(name: str, setup: dict[str, Any], overlap: bool) -> None:
    output, recorder = run(name, crowd=True, overlap=overlap, **CROWDED, **setup)
    assert recorder.retractions > 0
    assert output == expected(name, crowd=True)


@pytest.mark.wide
@LOOPS
@pytest.mark.parametrize("name", ["greedy", "drawn"])
def test_pr25945_without_penalties_has_the_same_output(name: str, overlap: bool) -> None:
    for setup in ({}, SETUPS["chunks of 19, mixed"], SETUPS["pages of 16"], SETUPS["two at a time"]):
        assert run(name, state="pr25945", overlap=overlap, **setup)[0] == expected(name)


@pytest.mark.wide
@pytest.mark.parametrize(("setup", "overlap"), setups_of(False))
def test_pr25945_with_penalties_has_one_output_in_the_serial_loop(
    setup: dict[str, Any], overlap: bool
) -> None:
    output, _ = run("penalised", state="pr25945", overlap=overlap, **setup)
    assert output == expected("penalised")


@pytest.mark.wide
@pytest.mark.parametrize("setup", [{}, {"page_size": 16}, {"policy": "lof"}], ids=str)
def test_pr25945_overlapped_penalties_repeat_while_the_steps_do(setup: dict[str, Any]) -> None:
    """They lag one token behind the exact penalties, so they depend on the order of steps."""
    burst = {"chunked_prefill_size": None, "max_running_requests": 16, "radix_cache": False}
    output, _ = run("penalised", state="pr25945", **burst, **setup)
    assert output == run("penalised", state="pr25945", **burst)[0]
    assert output != expected("penalised")


def test_a_seed_is_part_of_the_output_and_a_policy_is_not() -> None:
    assert run("drawn", seed=1)[0] != expected("drawn")
    assert run("drawn", seed=1)[0] == run("drawn", seed=1, policy="random")[0]

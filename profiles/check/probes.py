"""Where each fault shows: a small scenario, with the settings that lead a run through the broken part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...sched.relay.faults import Fault, faults
from ..platform.resolve import Resolved, ask
from .faults import broken

MIXING = "faults/mixing"
JOINING = "faults/joining"
HOSTING = "faults/hosting"
PARTING = "faults/parting"
STAGING = "faults/staging"
IDLING = "faults/idling"


@dataclass(frozen=True, slots=True)
class Probe:
    """``overrides`` say nothing of the fault but its state and loop."""

    fault: Fault
    scenario: str
    overrides: tuple[str, ...]

    def sound(self) -> Resolved:
        """The question with the fault off."""
        return ask(self.scenario, self.overrides)

    def broken(self) -> Resolved:
        return broken(self.sound(), [self.fault.name])


_PENALISED = ("workload.sampling.presence_penalty=0.5",)
_SPELLED = ("workload.sampling.grammar={regex: '[0-9]{1,8}'}", "workload.sampling.ignore_eos=false")
_TWO_AT_A_TIME = (
    "engine.max_running_requests=2",
    "engine.chunked_prefill_size=8",
    "workload.requests=4",
)

_CROWDED = ("engine.radix_cache=false", "engine.kv_tokens=256", "workload.requests=12")

_RETRACTED = (
    "engine.page_size=1",
    "engine.kv_tokens=320",
    "engine.disaggregation.reserved_decode_tokens=2",
    "workload.output_tokens={dist: uniform, min: 30, max: 60}",
)

# Scenario and further overrides, where it is not a plain ``mixing``.
_WHERE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "one-sided-merge": (JOINING, ()),
    "penalties-from-input": (MIXING, _PENALISED),
    "small-ring": (JOINING, _TWO_AT_A_TIME),
    "hot-buffer-by-sentinel": (HOSTING, ()),
    "rejoin-without-mirror": (HOSTING, ()),
    "prebuilt-unpublished": (PARTING, ()),
    "publish-ready-overwritten": (PARTING, ()),
    "pd-freed-block-race": (PARTING, _CROWDED),
    "pd-overwritten-page": (PARTING, _RETRACTED),
    "emptied-batch-merged": (JOINING, ()),
    "stash-before-sampling": (MIXING, _SPELLED),
    "stage-without-stash": (STAGING, ()),
    "stage-tokens-unawaited": (STAGING, ()),
    "idle-rows-stashed": (IDLING, ()),
}


def probes() -> Mapping[str, Probe]:
    """By the name of the fault: for each one there is."""
    return {fault.name: probe(fault) for fault in faults().values()}


def probe(fault: Fault, *, state: str | None = None, loop: str | None = None) -> Probe:
    """In the state and loop where upstream had it, or another one of the fault's."""
    scenario, overrides = _WHERE.get(fault.name, (MIXING, ()))
    relay = f"engine.relay={state or fault.states[0]}"
    overlap = f"engine.overlap={str((loop or fault.loops[0]) == 'overlapped').lower()}"
    return Probe(fault, scenario, (relay, overlap, *_speculating(fault), *overrides))


def _speculating(fault: Fault) -> tuple[str, ...]:
    if fault.speculation is None:
        return ()
    return (
        "model.preset=tiny-llama-eagle",
        "engine.mixed_chunk=false",
        f"engine.speculative={{algorithm: eagle, mode: {fault.speculation}}}",
    )

"""Faults by name: a question with faults, and for each fault a scenario that shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...scenarios.combinations import MODES
from ...sched.relay.choice import RelayChoice, RelayError
from ...sched.relay.faults import FEATURES, Fault, awaited_faults, faults
from ..platform.names import FaultError, require_faults
from ..platform.resolve import Resolved, RowMode, ask, row_mode


def with_faults(resolved: Resolved, names: Sequence[str], *, onebatch: bool = False) -> Resolved:
    """The question with these faults in every relay. ``onebatch``: it is about a static batch. Raises FaultError, and
    RelayError for a fault that one of the relays cannot have."""
    wanted = [_fault(name) for name in dict.fromkeys(names)]
    for fault in wanted:
        if fault.feature is not None and not MODES[fault.feature].on(resolved.scenario):
            raise FaultError(f"fault {fault.name} needs {FEATURES[fault.feature]}")
    mode = row_mode(resolved.scenario)
    relays = (_faulty(relay, wanted, mode, onebatch=onebatch) for relay in resolved.relays)
    return replace(resolved, relays=tuple(relays))


def _faulty(relay: RelayChoice, wanted: Sequence[Fault], mode: RowMode, *, onebatch: bool) -> RelayChoice:
    for fault in wanted:
        try:
            relay = relay.broken_by(fault, **mode, onebatch=onebatch)
        except RelayError as error:
            if relay.state.name in fault.states:
                raise
            raise RelayError(f"{error}: --relay {fault.states[0]} has it") from None
    return relay


def _fault(name: str) -> Fault:
    require_faults([name])
    if (awaited := awaited_faults().get(name)) is not None:
        raise FaultError(f"fault {name} waits for {awaited.waits_for}, which this version does not have")
    return faults()[name]


MIXING = "faults/mixing"
JOINING = "faults/joining"
HOSTING = "faults/hosting"
PARTING = "faults/parting"
STAGING = "faults/staging"


class FaultScenario(NamedTuple):
    """A scenario that goes through the code of a fault. ``overrides`` set the fault's state and loop, and not the
    fault, whose name is empty in the same scenario without it. ``onebatch``: the fault shows in a static batch."""

    fault: str
    scenario: str
    overrides: tuple[str, ...]
    onebatch: bool = False

    def sound(self) -> FaultScenario:
        return self._replace(fault="")

    def question(self) -> Resolved:
        found = ask(self.scenario, self.overrides)
        return with_faults(found, [self.fault], onebatch=self.onebatch) if self.fault else found


_PENALISED = ("workload.sampling.presence_penalty=0.5",)
_GRAMMAR = ("workload.sampling.grammar={regex: '[0-9]{1,8}'}", "workload.sampling.ignore_eos=false")
_TWO_AT_A_TIME = ("engine.max_running_requests=2", "engine.chunked_prefill_size=8", "workload.requests=4")

_SMALL_POOL = ("engine.radix_cache=false", "engine.kv_tokens=256", "workload.requests=12")

_RETRACTED = (
    "engine.page_size=1",
    "engine.kv_tokens=320",
    "engine.disaggregation.reserved_decode_tokens=2",
    "workload.output_tokens={dist: uniform, min: 30, max: 60}",
)

_STATIC = ("workload.requests=3", "workload.prompt_tokens=20", "workload.output_tokens=12")

# Scenario and further overrides of the faults that ``mixing`` as it is does not show.
_SCENARIOS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "one-sided-merge": (JOINING, ()),
    "deferred-never-resolves": ("deferred", ("workload.requests=4",)),
    "embedding-never-resolves": ("embedding", ()),
    "onebatch-never-resolves": (MIXING, _STATIC),
    "onebatch-penalises-the-prompt": (MIXING, (*_STATIC, *_PENALISED)),
    "list-for-the-bridge": ("block_diffusion", ()),
    "encoder-rebuilt-on-device": ("encoder_decoder", ()),
    "penalties-from-input": (MIXING, _PENALISED),
    "small-ring": (JOINING, _TWO_AT_A_TIME),
    "hot-buffer-by-sentinel": (HOSTING, ()),
    "rejoin-without-mirror": (HOSTING, ()),
    "prebuilt-unpublished": (PARTING, ()),
    "publish-ready-overwritten": (PARTING, ()),
    "pd-freed-block-race": (PARTING, _SMALL_POOL),
    "pd-overwritten-page": (PARTING, _RETRACTED),
    "emptied-batch-merged": (JOINING, ()),
    "stash-before-sampling": (MIXING, _GRAMMAR),
    "stage-without-stash": (STAGING, ()),
    "stage-tokens-unawaited": (STAGING, ()),
}


def fault_scenarios() -> Mapping[str, FaultScenario]:
    """The scenarios of all faults by the fault's name."""
    return {fault.name: fault_scenario(fault) for fault in faults().values()}


def fault_scenario(fault: Fault, *, state: str | None = None, loop: str | None = None) -> FaultScenario:
    """By default in the state and loop in which upstream had the fault."""
    scenario, overrides = _SCENARIOS.get(fault.name, (MIXING, ()))
    relay = f"engine.relay={state or fault.states[0]}"
    overlap = f"engine.overlap={str((loop or fault.loops[0]) == 'overlapped').lower()}"
    settings = (relay, overlap, *_speculating(fault), *overrides)
    return FaultScenario(fault.name, scenario, settings, fault.loops == ("onebatch",))


def _speculating(fault: Fault) -> tuple[str, ...]:
    if fault.speculation is None:
        return ()
    return (
        "model.preset=tiny-llama-eagle",
        "engine.mixed_chunk=false",
        f"engine.speculative={{algorithm: eagle, mode: {fault.speculation}}}",
    )

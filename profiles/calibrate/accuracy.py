"""The accuracy of fitted host times, without a GPU: runs with declared host times beside runs with measured ones.

Both run on the same virtual device, so that all differences are the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from ..judge.prediction import Pair, prediction
from ..platform.hardware import HardwareProfile, parse
from ..platform.resolve import ask
from ..ranks.execute import Options, execute
from ..record.result import Result
from .profile import to_yaml


class AccuracyCase(NamedTuple):
    """A scenario under each of some states of the relay; ``name`` is shown."""

    name: str
    scenario: str
    overrides: tuple[str, ...]
    states: tuple[str, ...]


# The device is so fast that the host is the bottleneck, and computes nothing, which would disturb the host's caches.
# All requests arrive at once and none ends early, so that the schedule depends on no times.
_BURST: Final = (
    "model.preset=tiny-llama",
    "device.values=none",
    "workload.arrival=burst",
    "workload.sampling.ignore_eos=true",
    "workload.sampling.min_new_tokens=0",
    "measure.warmup_requests=4",
)
_LADDER: Final = ("pr25774-before", "pr25945", "latest")


def _even(name: str, scenario: str, requests: int) -> AccuracyCase:
    sizes = (f"workload.requests={requests}", f"engine.max_running_requests={requests}")
    lengths = (
        "workload.prompt_tokens={dist: fixed, value: 128}",
        "workload.output_tokens={dist: fixed, value: 48}",
    )
    return AccuracyCase(f"{name}, {requests}", scenario, (*_BURST, *sizes, *lengths), ("latest",))


CASES: Final = (
    *(_even("serial", "overlap_off", requests) for requests in (8, 32, 64)),
    *(_even("overlapped", "overlap_on", requests) for requests in (8, 32, 64)),
    AccuracyCase("mixed", "mixed", (*_BURST, "workload.requests=32"), _LADDER),
    AccuracyCase("penalties", "penalties", (*_BURST, "workload.requests=24"), _LADDER),
)


def machine_profile(document: Mapping[str, Any], through_torch: float) -> HardwareProfile:
    """The profile of ``document``, with torch's own time of a call on this machine, which measured runs contain."""
    hardware = parse(to_yaml(document).encode(), "here.yaml")
    timed = {"value": through_torch, "origin": "torch's own part of a device call, timed on this machine"}
    host = hardware.host.model_copy(update={"torch_call": hardware.host.torch_call.model_copy(update=timed)})
    return hardware.model_copy(update={"host": host})


def host_accuracy(
    hardware: HardwareProfile, cases: Iterable[AccuracyCase], *, notify: Callable[[str], object]
) -> dict[str, Any]:
    """Run every case with modelled and with measured host times, and compare them."""
    return prediction(
        Pair(case.name, state, *(_run(hardware, case, state, host) for host in ("modelled", "measured")))
        for case in cases
        for state in case.states
        if notify(f"{case.name} {state}") is None
    )


def _run(hardware: HardwareProfile, case: AccuracyCase, state: str, host: str) -> Result:
    question = ask(case.scenario, [*case.overrides, f"engine.relay={state}", f"device.host={host}"])
    question = replace(question, hardware=hardware)
    result = execute(question, question.relays[0], Options(device="vgpu")).result
    if result.run.cancelled:
        raise KeyboardInterrupt
    return result

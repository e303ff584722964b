"""How good a host's lines are, without a GPU: runs with declared host times beside runs whose host is measured.

Both are on the same virtual device, so that whatever differs is the host's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..judge.prediction import Pair, Prediction, prediction
from ..platform.hardware import HardwareProfile, load
from ..platform.resolve import ask
from ..ranks.execute import Options, execute
from ..record.result import Result
from .profile import to_yaml


class Asked(NamedTuple):
    """``name`` of what is asked, under each of these states of the relay."""

    name: str
    scenario: str
    overrides: tuple[str, ...]
    states: tuple[str, ...]


# A device so fast that the host is what counts, without arithmetic, which would be the tool's and leave the caches to
# nobody else. All requests at once, none ends early: what is scheduled then depends on no time.
_BURST: Final = (
    "model.preset=tiny-llama",
    "device.values=none",
    "workload.arrival=burst",
    "workload.sampling.ignore_eos=true",
    "workload.sampling.min_new_tokens=0",
    "measure.warmup_requests=4",
)
_LADDER: Final = ("pr25774-before", "pr25945", "latest")


def _even(name: str, scenario: str, requests: int) -> Asked:
    sizes = (f"workload.requests={requests}", f"engine.max_running_requests={requests}")
    lengths = (
        "workload.prompt_tokens={dist: fixed, value: 128}",
        "workload.output_tokens={dist: fixed, value: 48}",
    )
    return Asked(f"{name}, {requests}", scenario, (*_BURST, *sizes, *lengths), ("latest",))


ASKED: Final = (
    *(_even("serial", "overlap_off", requests) for requests in (8, 32, 64)),
    *(_even("overlapped", "overlap_on", requests) for requests in (8, 32, 64)),
    Asked("mixed", "mixed", (*_BURST, "workload.requests=32"), _LADDER),
    Asked("penalties", "penalties", (*_BURST, "workload.requests=24"), _LADDER),
)


def of_this_machine(document: Mapping[str, Any], through_torch: float) -> HardwareProfile:
    """The profile of that document, with what torch itself takes of a call here: measured runs have that in them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "here.yaml"
        path.write_text(to_yaml(document), encoding="utf-8")
        hardware = load(path)
    timed = {"value": through_torch, "origin": "torch's own way to a device, timed on this machine"}
    host = hardware.host.model_copy(update={"torch_call": hardware.host.torch_call.model_copy(update=timed)})
    return hardware.model_copy(update={"host": host})


def judged(hardware: HardwareProfile, asked: Iterable[Asked], *, tell: Callable[[str], object]) -> Prediction:
    """Every question both ways."""
    return prediction(
        Pair(one.name, state, _run(hardware, one, state, "modelled"), _run(hardware, one, state, "measured"))
        for one in asked
        for state in one.states
        if tell(f"{one.name} {state}") is None
    )


def _run(hardware: HardwareProfile, asked: Asked, state: str, host: str) -> Result:
    question = ask(asked.scenario, [*asked.overrides, f"engine.relay={state}", f"device.host={host}"])
    question = replace(question, hardware=hardware)
    result = execute(question, question.relays[0], Options(device="vgpu")).result
    if result.run.cancelled:
        raise KeyboardInterrupt
    return result

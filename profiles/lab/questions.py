"""What is asked of a GPU and of its emulation alike: each shipped scenario of one device, with fewer requests.

A scenario that needs somebody's file is not asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from ...scenarios.loader import load
from ...sched.relay.states import states
from ..platform.resolve import Resolved, resolve

Device = Literal["cuda", "vgpu"]


class PredictionQuestion(NamedTuple):
    """Written ``scenario:state``."""

    scenario: str
    state: str

    def __str__(self) -> str:
        return f"{self.scenario}:{self.state}"

    @classmethod
    def of(cls, text: str) -> PredictionQuestion:
        scenario, _, state = text.partition(":")
        return cls(scenario, state)


# A laptop's models: a second each on a GPU. Most worth knowing first.
TINY: Final[Mapping[str, Sequence[str]]] = {
    "mixed": ("workload.requests=24",),
    "penalties": ("workload.requests=16",),
    "retraction": (),
    "shared_prefix": ("workload.requests=32",),
    "spec_v2": ("workload.requests=12",),
    "spec_v1": ("workload.requests=12",),
    "hisparse": ("workload.requests=16",),
    "grammar": ("workload.requests=16",),
    "spec_grammar": ("workload.requests=8",),
}
_CLOSED: Final = (
    "workload.requests=48",
    "workload.arrival.concurrency=24",
    "workload.output_tokens={dist: uniform, min: 32, max: 96}",
    "engine.kv_tokens=65536",
)
# Shapes of billions: some seconds each, most of them for weights and graphs.
LARGE: Final[Mapping[str, Sequence[str]]] = {
    "overlap_on": _CLOSED,
    "overlap_off": _CLOSED,
    "ladder": (),
    "throughput": (
        "workload.requests=64",
        "workload.output_tokens={dist: uniform, min: 64, max: 192}",
        "engine.kv_tokens=131072",
    ),
    "decode_heavy": (
        "workload.requests=64",
        "workload.arrival.concurrency=32",
        "workload.output_tokens={dist: uniform, min: 64, max: 128}",
        "engine.kv_tokens=65536",
    ),
    "prompt_staging": (),
    "prefill_heavy": ("workload.requests=12", "workload.arrival.rate=12", "engine.kv_tokens=131072"),
}


def ladder(*scenarios: str) -> list[PredictionQuestion]:
    """Each under every state of the relay, in the ladder's order."""
    return [PredictionQuestion(scenario, state) for scenario in scenarios for state in states()]


def asked(question: PredictionQuestion, device: Device, settings: Sequence[str] = ()) -> Resolved:
    """``settings`` come on top of the question's own. On CUDA values are real, of random weights where a scenario skips
    them. Raises ScenarioError."""
    fewer = {**TINY, **LARGE}[question.scenario]
    computed = ("device.values=real",) if device == "cuda" else ()
    return resolve(load(question.scenario, [*fewer, *computed, f"engine.relay={question.state}", *settings]))

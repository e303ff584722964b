"""How a scenario speculates."""

from __future__ import annotations

from typing import Literal

from ...scenarios.schema import AcceptanceSection, Scenario, Speculative
from ...sched.config import SimulatedAcceptance, SpeculativeConfig


def speculation(scenario: Scenario) -> Literal["v1", "v2"] | None:
    """The speculative worker of a scenario; None without speculation."""
    spec = scenario.engine.speculative
    return None if spec.algorithm == "none" else spec.mode


def speculation_depth(scenario: Scenario) -> int:
    """Draft steps after each token; 0 without speculation."""
    return scenario.engine.speculative.steps if speculation(scenario) else 0


def speculative_config(spec: Speculative) -> SpeculativeConfig | None:
    if spec.algorithm == "none":
        return None
    simulated = None
    if isinstance(spec.acceptance, AcceptanceSection):
        simulated = SimulatedAcceptance(spec.acceptance.mean, spec.acceptance.method, spec.acceptance.per)
    return SpeculativeConfig(
        mode=spec.mode,
        steps=spec.steps,
        topk=spec.topk,
        draft_tokens=spec.draft_tokens or spec.steps + 1,
        acceptance=simulated,
    )

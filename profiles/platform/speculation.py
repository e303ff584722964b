"""The parts of an engine that speculates, from a scenario."""

from __future__ import annotations

from typing import Literal

from ...scenarios.schema import AcceptanceSection as Lots
from ...scenarios.schema import Scenario, Speculative
from ...sched.config import SimulatedAcceptance, SpeculativeConfig


def speculation(scenario: Scenario) -> Literal["v1", "v2"] | None:
    """The worker that a scenario asks for."""
    spec = scenario.engine.speculative
    return None if spec.algorithm == "none" else spec.mode


def speculation_depth(scenario: Scenario) -> int:
    """Drafts behind each token; 0 without speculation."""
    return scenario.engine.speculative.steps if speculation(scenario) else 0


def speculative_config(spec: Speculative) -> SpeculativeConfig | None:
    if spec.algorithm == "none":
        return None
    lots = spec.acceptance if isinstance(spec.acceptance, Lots) else None
    return SpeculativeConfig(
        mode=spec.mode,
        steps=spec.steps,
        topk=spec.topk,
        draft_tokens=spec.draft_tokens or spec.steps + 1,
        acceptance=None if lots is None else SimulatedAcceptance(lots.mean, lots.method, lots.per),
    )

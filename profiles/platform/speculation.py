"""The parts of an engine that speculates, from a scenario."""

from __future__ import annotations

from typing import Literal

import torch

from ...scenarios.schema import AcceptanceSection as Lots
from ...scenarios.schema import Scenario, Speculative
from ...sched.config import EngineConfig, SimulatedAcceptance, SpeculativeConfig
from ...sched.loop.engine import TokenSampler
from ...sched.memory.cache import PrefixCache
from ...sched.memory.kv import KVPool
from ...sched.model.config import ModelConfig
from ...sched.model.decoder import Model
from ...sched.model.draft import (
    DraftWeights,
    EagleDraft,
    derived_weights,
    empty_draft_weights,
    load_draft_weights,
)
from ...sched.model.replay import GraphInput
from ...sched.model.weights import Weights
from ...sched.observe import Observer
from ...sched.speculate.acceptance import acceptance
from ...sched.speculate.drafter import Drafter
from ...sched.speculate.verifier import Verifier
from ...sched.speculate.worker import Worker
from .resolve import Resolved


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


def kv_pool(model: ModelConfig, config: EngineConfig) -> KVPool:
    return KVPool(
        num_layers=model.num_layers,
        tokens=config.kv_tokens,
        page_size=config.page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        device=config.device,
    )


def draft_worker(
    resolved: Resolved,
    config: EngineConfig,
    target: Model,
    weights: Weights,
    *,
    sampler: TokenSampler,
    cache: PrefixCache,
    observer: Observer,
    pages: torch.Tensor,
) -> Worker | None:
    """None for a scenario that does not speculate. Captures graphs on the current stream. Raises CheckpointError when
    the draft's checkpoint cannot be read."""
    if config.speculative is None or resolved.draft is None:
        return None
    kv = kv_pool(resolved.draft, config)
    draft = EagleDraft(resolved.draft, _weights(resolved, resolved.draft, weights), kv=kv, req_to_token=pages)
    hidden = GraphInput((resolved.model.hidden_size,), resolved.model.dtype)
    return Worker(
        spec=config.speculative,
        drafter=Drafter(draft, config, pages=pages, hidden=hidden),
        verifier=Verifier(target, sampler, config, pages=pages),
        acceptance=acceptance(config),
        cache=cache,
        observer=observer,
        kv=kv,
    )


def _weights(resolved: Resolved, draft: ModelConfig, target: Weights) -> DraftWeights:
    if resolved.scenario.device.values == "none":
        return empty_draft_weights(draft, target)
    if resolved.draft_checkpoint is None:
        return derived_weights(draft, target)
    return load_draft_weights(resolved.draft_checkpoint, draft, target)

"""What a run needs of this machine, which is memory, since the virtual GPU's memory is the host's; and of the emulated
hardware: the link between ranks."""

from __future__ import annotations

import os

from ...scenarios.combinations import routed
from .hardware import LinkName, LinkProfile
from .machine import MachineError
from .resolve import Resolved

_INT16, _INT32, _INT64 = 2, 4, 8
_ROTARY_COPIES = 3  # angles, their two halves and the table, while it is made
_USABLE_SHARE = 0.9  # of the machine's memory, for one run


def check(resolved: Resolved, *, ranks: int = 1) -> None:
    """Raises MachineError when the tensors of the run, on ``ranks`` devices alike, cannot fit into this machine's
    memory."""
    needed = ranks * needed_bytes(resolved)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > _USABLE_SHARE * there:
        raise MachineError(
            f"this run needs {needed / 2**30:,.1f} GiB of memory and the machine has {there / 2**30:,.1f}: "
            f"fewer {'ranks, ' if ranks > 1 else ''}engine.kv_tokens or engine.max_running_requests, or "
            "device.values: none, need less"
        )


def check_world(resolved: Resolved) -> None:
    """``check`` for all ranks of the scenario on this machine. Pipeline stages share the layers of one model."""
    engine = resolved.scenario.engine
    check(resolved, ranks=1 if engine.pipeline.stages > 1 else engine.ranks)


def needed_bytes(resolved: Resolved) -> int:
    """Page table, KV bookkeeping, and what real values add: weights, rotary angles and KV."""
    engine, model = resolved.scenario.engine, resolved.model
    rows = engine.max_running_requests + 1
    slots = engine.kv_tokens + engine.page_size  # one page is padding
    needed = rows * model.max_positions * _INT32 + slots * 3 * _INT64
    hosted = int(slots * engine.hisparse.host_ratio) if engine.hisparse.enabled else 0
    if hosted:  # its slots there, and each layer's hot buffer with its order
        buffer = 0 if model.indexer is None else engine.hisparse.buffer_size(model.indexer.top_k)
        row = model.max_positions * _INT64 + buffer * (_INT64 + model.num_layers * (_INT32 + _INT16))
        needed += rows * row + hosted * 4 * _INT64
    if resolved.scenario.device.values == "none":
        return needed
    models = [model] if resolved.draft is None else [model, resolved.draft]
    kv = sum(2 * m.num_layers * m.num_kv_heads * m.head_dim * (slots + hosted) for m in models)
    index = model.num_layers * model.indexer.head_dim * max(slots, hosted) if model.indexer else 0
    rotary = model.max_positions * model.head_dim * _INT64 * _ROTARY_COPIES
    return needed + rotary + model.dtype.itemsize * (kv + index + model.num_parameters)


def link_profile(resolved: Resolved) -> LinkProfile:
    """Raises MachineError where the emulated hardware has no such link."""
    scenario, hardware = resolved.scenario, resolved.hardware
    far = routed(scenario) and scenario.engine.disaggregation.transfer == "distributed"
    name: LinkName = "rdma" if far else "nvlink"
    if name not in hardware.links:
        raise MachineError(f"device.hardware: {hardware.name} has no link '{name}' to join ranks by")
    return hardware.links[name]

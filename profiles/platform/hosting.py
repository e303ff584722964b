"""What keeping KV on the host asks of model, hardware and page size."""

from __future__ import annotations

from collections.abc import Iterator

from ...scenarios.combinations import Finding
from ...scenarios.schema import HiSparse, Scenario
from ...sched.hisparse.pools import LONGEST
from ...sched.model.config import ModelConfig
from .hardware import HardwareProfile


def unhosted(
    scenario: Scenario, model: ModelConfig | None, hardware: HardwareProfile | None
) -> Iterator[Finding]:
    """The key to blame, and why; nothing for a scenario without hisparse. What could not be found is not judged."""
    wanted = scenario.engine.hisparse
    if not wanted.enabled:
        return
    if hardware is not None:
        yield from _lacking(hardware)
    if model is not None and model.indexer is None:
        yield (
            ("engine", "hisparse", "enabled"),
            f"{model.name} attends to all tokens: it chooses none to be fetched from the host",
        )
    elif model is not None and model.indexer is not None:
        yield from _sizes(wanted, model.indexer.top_k, scenario.engine.page_size)


def _lacking(hardware: HardwareProfile) -> Iterator[Finding]:
    there = hardware.available
    lacks = {
        "pinned memory": there.pinned_memory,
        "side streams": there.side_streams,
        "events": there.events,
    }
    missing = [what for what, has in lacks.items() if not has]
    if missing:
        yield ("engine", "hisparse", "enabled"), f"{hardware.name} has no {', no '.join(missing)}"


def _sizes(wanted: HiSparse, top_k: int, page_size: int) -> Iterator[Finding]:
    if wanted.top_k not in ("auto", top_k):
        yield ("engine", "hisparse", "top_k"), f"expected {top_k}, the model's own, got {wanted.top_k}"
    size, key = wanted.buffer_size(top_k), ("engine", "hisparse", "device_buffer_size")
    if size < top_k:
        yield key, f"expected at least the {top_k} tokens that the model attends to, got {size}"
    if size >= LONGEST:
        yield key, f"expected less than {LONGEST}, got {size}"
    if size % page_size:
        yield key, f"expected whole pages of {page_size}, got {size}"

"""Probes: small measurements of a machine with a GPU, each run in a process of its own.

A probe is a module with ``probe() -> dict``, which returns what was measured and draws no conclusions.
``schedbench calibrate`` fits a hardware profile to ``copies``, ``costs`` and ``kernels``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Modules by name, in the order in which they run.
PROBES: Mapping[str, str] = MappingProxyType(
    {name: f"{__name__}.{name}" for name in ("environment", "copies", "costs", "kernels")}
)

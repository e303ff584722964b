"""Questions to a machine, each answered by a small experiment in a process of its own.

A probe reports what it found and judges nothing. Each is a module with ``probe() -> dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# In the order in which they are run: what everything else rests on comes first.
PROBES: Mapping[str, str] = MappingProxyType(
    {
        name: f"{__name__}.{name.replace('-', '_')}"
        for name in (
            "environment",
            "permission",
            "kineto-rows",
            "copies",
            "costs",
            "kernels",
            "expressions",
            "counters",
            "host-memory",
            "host-reads",
            "sanitizer",
            "nsys",
        )
    }
)

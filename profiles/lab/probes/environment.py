"""The machine, its GPU, and the versions of packages."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import torch

from ...cuda.machine import facts
from ...record.environment import environment

_PACKAGES = ("triton", "nvtx", "llguidance", "pydantic", "safetensors", "typer", "pytest", "hypothesis")


def probe() -> dict[str, Any]:  # cuda-only
    return {
        **environment(),
        **facts(torch.device("cuda", 0)),
        "devices": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "packages": {name: version(name) for name in _PACKAGES},
    }


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

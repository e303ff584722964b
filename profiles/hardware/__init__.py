"""Hardware profiles: what a device and its host cost, each number with its origin.

A profile is a YAML file of this folder or of the user's. It knows nothing of the virtual GPU that reads it.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from ...sched.config import Capabilities


class HardwareError(ValueError):
    """A profile that does not exist or does not say what it must."""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Quantity(Model):
    """A constant of the machine. ``origin`` says where it comes from: measured, datasheet or estimate, and how."""

    value: float = Field(ge=0)
    origin: str = Field(min_length=1)


class Nanoseconds(Quantity):
    unit: Literal["ns"]


class Bytes(Quantity):
    unit: Literal["B"]


class BytesPerSecond(Quantity):
    value: float = Field(gt=0)
    unit: Literal["B/s"]


class FlopsPerSecond(Quantity):
    value: float = Field(gt=0)
    unit: Literal["FLOP/s"]


class Ratio(Quantity):
    value: float = Field(gt=0, le=1)
    unit: Literal["1"]


class GemmRates(Model):
    """Peak rate by element type."""

    bfloat16: FlopsPerSecond
    float16: FlopsPerSecond
    float32: FlopsPerSecond
    float64: FlopsPerSecond


class Efficiency(Model):
    """Share of a peak that a kernel of each unit reaches: of the bandwidth for memory, else of the rate."""

    memory: Ratio
    gemm: Ratio
    attention: Ratio


class Kernels(Model):
    memory_bandwidth: BytesPerSecond
    gemm_rates: GemmRates
    efficiency: Efficiency
    fixed: Nanoseconds  # what the shortest kernel takes
    gap: Nanoseconds  # between two kernels of one stream, the queue being full
    graph_gap: Nanoseconds  # the same inside a graph


class Copies(Model):
    h2d_pinned: BytesPerSecond
    d2h_pinned: BytesPerSecond
    h2d_pageable: BytesPerSecond
    d2h_pageable: BytesPerSecond
    host_memcpy: BytesPerSecond
    fixed: Nanoseconds
    pageable_inline: Bytes  # a pageable source up to this size is taken inside the call


class HostCalls(Model):
    """Host time of one call, whatever it waits for excluded."""

    torch_call: Nanoseconds
    launch: Nanoseconds
    event_record: Nanoseconds
    event_wait: Nanoseconds
    copy_call: Nanoseconds
    sync_return: Nanoseconds
    graph_launch: Nanoseconds
    pin_memory: Nanoseconds


class Phase(Model):
    """Host time of a phase of the scheduler: a + b * n, device calls excluded."""

    a: Nanoseconds
    b: Nanoseconds


class Available(Model):
    pinned_memory: bool
    side_streams: bool
    events: bool
    graphs: bool


class HardwareProfile(Model):
    name: str
    about: str
    kernels: Kernels
    copies: Copies
    host: HostCalls
    phases: dict[str, Phase]
    available: Available
    sha256: str

    @property
    def capabilities(self) -> Capabilities:
        from ...sched.config import Capabilities  # here, so that listing profiles does not import torch

        return Capabilities(**self.available.model_dump())


def names() -> Sequence[str]:
    """The shipped profiles, in alphabetical order."""
    return sorted(p.name.removesuffix(".yaml") for p in _folder().iterdir() if p.name.endswith(".yaml"))


def load(name_or_path: str | Path) -> HardwareProfile:
    """The profile shipped under that name, or the one in that file.

    Raises HardwareError when there is none, or with every fault of the file at once.
    """
    raw = _read(name_or_path)
    try:
        document = yaml.safe_load(raw)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HardwareError(f"{name_or_path}: not YAML: {error}") from error
    if not isinstance(document, dict):
        raise HardwareError(f"{name_or_path}: expected a mapping, got {type(document).__name__}")
    return _validated(document, source=str(name_or_path), sha256=hashlib.sha256(raw).hexdigest())


def _folder() -> Any:
    return resources.files(__package__)


def _read(name_or_path: str | Path) -> bytes:
    if str(name_or_path) in names():
        shipped: bytes = (_folder() / f"{name_or_path}.yaml").read_bytes()
        return shipped
    path = Path(name_or_path)
    if path.is_file():
        return path.read_bytes()
    near = difflib.get_close_matches(str(name_or_path), names(), n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise HardwareError(f"no hardware profile {str(name_or_path)!r}{hint} (available: {', '.join(names())})")


def _validated(document: dict[str, Any], *, source: str, sha256: str) -> HardwareProfile:
    try:
        return HardwareProfile(**_as_floats(document), sha256=sha256)
    except (ValidationError, TypeError) as error:
        raise HardwareError(f"{source}: {_faults(error)}") from error


def _as_floats(node: Any) -> Any:
    """YAML writes 65536 for a float; strict validation takes both, but a constant's type should not vary."""
    if isinstance(node, dict):
        return {str(k): _as_floats(v) for k, v in node.items()}
    if isinstance(node, int) and not isinstance(node, bool):
        return float(node)
    return node


def _faults(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return str(error)
    return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())

"""Hardware profiles: what a device and its host cost, each number with its range and its origin.

A profile is a YAML file of ``profiles/hardware`` or of the user's.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar

from pydantic import (
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from ...scenarios.fields import Section
from ...scenarios.yaml_files import YamlFiles
from ...sched.config import Capabilities
from ...sched.observe import RANGES, StepKind

# The bounds of a constant, by its unit.
BOUNDS: Final = {"ns": (0, 1e9), "B": (0, 2**40), "B/s": (1e6, 1e18), "FLOP/s": (1e9, 1e24), "1": (1e-3, 1)}
_Ns = Annotated[float, Field(ge=BOUNDS["ns"][0], le=BOUNDS["ns"][1])]
_B = Annotated[float, Field(ge=BOUNDS["B"][0], le=BOUNDS["B"][1])]
_Bandwidth = Annotated[float, Field(ge=BOUNDS["B/s"][0], le=BOUNDS["B/s"][1])]
_Rate = Annotated[float, Field(ge=BOUNDS["FLOP/s"][0], le=BOUNDS["FLOP/s"][1])]
_Share = Annotated[float, Field(ge=BOUNDS["1"][0], le=BOUNDS["1"][1])]
Bounded = TypeVar("Bounded", bound=float)


class HardwareError(ValueError):
    """A profile does not exist, or is invalid."""


class Quantity(Section, Generic[Bounded]):
    """A constant of the machine. Its true value is taken to lie between ``low`` and ``high``; ``origin`` is its
    source: measured, published, datasheet or estimate, and how. Verdicts on emulated times are asked again under
    draws from these ranges.

    Each unit's bounds are far from any machine's and keep a run's instants within 64-bit integers of ns.
    """

    value: Bounded
    low: Bounded
    high: Bounded
    origin: str = Field(min_length=1)

    @model_validator(mode="after")
    def _within_its_range(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(
                f"expected low <= value <= high, got {self.low:g}, {self.value:g}, {self.high:g}"
            )
        return self


class Nanoseconds(Quantity[_Ns]):
    unit: Literal["ns"]


class Bytes(Quantity[_B]):
    unit: Literal["B"]


class BytesPerSecond(Quantity[_Bandwidth]):
    unit: Literal["B/s"]


class FlopsPerSecond(Quantity[_Rate]):
    unit: Literal["FLOP/s"]


class Ratio(Quantity[_Share]):
    unit: Literal["1"]


class GemmRates(Section):
    """Peak rate by element type."""

    bfloat16: FlopsPerSecond
    float16: FlopsPerSecond
    float32: FlopsPerSecond
    float64: FlopsPerSecond


class Efficiency(Section):
    """Share of a peak that a kernel of each unit reaches: of the bandwidth for memory, else of the rate."""

    memory: Ratio
    gemm: Ratio
    attention: Ratio


class Kernels(Section):
    memory_bandwidth: BytesPerSecond
    gemm_rates: GemmRates
    efficiency: Efficiency
    fixed: Nanoseconds  # what the shortest kernel takes
    gap: Nanoseconds  # between two kernels of one stream, the queue being full
    graph_gap: Nanoseconds  # the same inside a graph


class CopyRates(Section):
    h2d_pinned: BytesPerSecond
    d2h_pinned: BytesPerSecond
    h2d_pageable: BytesPerSecond
    d2h_pageable: BytesPerSecond
    host_memcpy: BytesPerSecond
    fixed: Nanoseconds
    pageable_inline: Bytes  # a pageable source up to this size is taken inside the call


class LinkProfile(Section):
    """A connection between two ranks. The host's messages take a way of their own."""

    bandwidth: BytesPerSecond  # of one rank's sends
    latency: Nanoseconds  # from the last byte's leaving to its landing
    call: Nanoseconds  # the host's part of one send
    host_latency: Nanoseconds  # of a message between hosts


LinkName = Literal["nvlink", "pcie", "rdma"]


class HostCalls(Section):
    """Host time of one call, whatever it waits for excluded."""

    torch_call: Nanoseconds
    launch: Nanoseconds
    event_record: Nanoseconds
    event_wait: Nanoseconds
    copy_call: Nanoseconds
    sync_return: Nanoseconds
    graph_launch: Nanoseconds
    pin_memory: Nanoseconds
    kernel_call: Nanoseconds | None = None  # of a Triton kernel, in place of ``torch_call``; absent: as that


class PhaseLine(Section):
    """a + b * n, device calls excluded."""

    a: Nanoseconds
    b: Nanoseconds


class Phase(PhaseLine):
    """Host time of a phase of the scheduler. ``kinds``: of steps of a kind for which it is another; the kind is known
    from a step's preparation on."""

    kinds: dict[StepKind, PhaseLine] = Field(default_factory=dict)


def _of_every_phase(source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
    """The schema of a mapping that has every phase and no other key. Its order is kept, by which draws are made."""
    phase = core_schema.typed_dict_field(handler.generate_schema(Phase))
    exact = core_schema.typed_dict_schema(dict.fromkeys(RANGES, phase), extra_behavior="forbid")

    def complete(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        validate(value)
        return value

    whole = core_schema.no_info_wrap_validator_function(complete, exact)
    return core_schema.chain_schema([whole, handler(source)])


class GpuFacts(Section):
    """What programs query of the GPU, as torch prints it; by default an H100's."""

    memory_mib: Annotated[int, Field(ge=1)] = 81089
    major: int = 9
    minor: int = 0
    multiprocessors: Annotated[int, Field(ge=1)] = 132
    l2_cache_mib: int = 50
    shared_memory_kib: int = 228  # of a multiprocessor; one block may use 1 KiB less


class Available(Section):
    pinned_memory: bool
    side_streams: bool
    events: bool
    graphs: bool


class _Written(Section):
    """A profile as it stands in its file."""

    name: str
    about: str
    kernels: Kernels
    copies: CopyRates
    host: HostCalls
    phases: Annotated[dict[str, Phase], GetPydanticSchema(_of_every_phase)]
    available: Available
    gpu: GpuFacts = GpuFacts()
    links: dict[LinkName, LinkProfile] = Field(default_factory=dict)  # where several ranks are to be joined


class HardwareProfile(_Written):
    sha256: str

    def as_file(self) -> str:
        """The profile in the form of a file that ``load`` reads: JSON, which is YAML."""
        return self.model_dump_json(exclude={"sha256"}, exclude_defaults=True)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(**self.available.model_dump(), first_run=False)


FILES: Final = YamlFiles("schedbench.profiles.hardware", "hardware profile", _Written, HardwareError)
names = FILES.names


def load(name_or_path: str | Path) -> HardwareProfile:
    """The profile shipped under that name, or the one in that file.

    Raises HardwareError when there is none, or with every fault of the file at once.
    """
    return _parsed(FILES.content(name_or_path), str(name_or_path))


@lru_cache(maxsize=8)  # a process mostly reads the same few profiles
def _parsed(content: bytes, file: str) -> HardwareProfile:
    profile = FILES.parse(content, file)
    return HardwareProfile(**dict(profile), sha256=hashlib.sha256(content).hexdigest())

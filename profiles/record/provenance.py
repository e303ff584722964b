"""Where a result comes from: the tool, the run, the scenario with its inputs, the relay state and the hardware; and
what all parts of a result document are made of: immutable models, and numbers that a file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from operator import not_
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(ge=-1e150, le=1e150)]  # can be squared
Instant = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # ns


class ResultModel(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def omitted(default: Any = None) -> Any:
    """A field that a document does not have where it is None, 0 or empty."""
    return Field(default=default, exclude_if=not_)


class Tool(ResultModel):
    """``changed``: the files of the checkout that differ from its commit, if any, and the digest of their contents."""

    name: str = "schedbench"
    version: str
    git_sha: str | None = None
    dirty: bool | None = None
    changed: tuple[str, ...] = omitted(())
    changed_sha256: str | None = omitted()


class RunPart(ResultModel):
    id: str
    command: str
    started: str  # ISO 8601, UTC
    wall_s: Number
    emulation_speed: Number | None = None  # virtual seconds per second of wall time
    cancelled: bool = False
    further_cancelled: bool = omitted(False)  # the run is whole; the runs for --ranges or --worth are not
    failure: str | None = (
        omitted()
    )  # ranks that were lost, and what became of the others; how a program failed
    missed: tuple[str, ...] = omitted(())  # scripted faults and controls that did not occur
    leak: str | None = omitted()  # memory that an engine holds after all requests have ended
    hazards_s: Number | None = None  # of wall_s, what watching for hazards took
    import_s: Number | None = omitted()  # before wall_s, what importing another project's engine took


class EdgePart(ResultModel):
    """Between an engine of another project and the virtual GPU: packages that were absent, and stand as empty modules,
    and queries that were answered by a constant. ``without_effect``: functions of such packages that the run called;
    ``autotuned``: Triton kernels of which the first configuration was taken. ``uncounted``: kinds of steps whose counts
    are left out, with the reason."""

    hollow: tuple[str, ...] = ()
    answered_by_default: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()
    autotuned: tuple[str, ...] = ()
    uncounted: Mapping[str, str] = {}


class EnginePart(ResultModel):
    """An engine of another project. ``ref`` is the branch, or what was asked for; ``sha256`` is of its Python files.
    ``version``, ``commit`` and ``dirty`` are None where they are unknown."""

    name: str
    version: str | None = None
    ref: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    sha256: str
    edge: EdgePart = EdgePart()


class Labels(ResultModel):
    emulated: bool
    profiled: bool = False
    acceptance: Literal["measured", "simulated"] | None = None  # of drafts, where the run speculates
    host: Literal["modelled", "measured"]
    capture: Literal["nsys", "torch", "vgpu"] | None = None  # what recorded a program that was not ours
    world: Literal["virtual", "distributed"] | None = None  # of several ranks; None: one, or an old document
    engine: EnginePart | None = None  # whose scheduler ran; None: our own

    @property
    def exact(self) -> bool:
        """Whether times repeat exactly."""
        return self.emulated and self.host == "modelled"


class InputPart(ResultModel):
    """A file that the run read: the key of the scenario that names it, its name as written there, and the digest of its
    content."""

    key: str
    file: str
    sha256: str


class ScenarioPart(ResultModel):
    """``sha256`` is that of ``expanded``, which has the names of files; ``inputs`` has their contents."""

    expanded: dict[str, JsonValue] = Field(min_length=1)
    sha256: str
    inputs: tuple[InputPart, ...] = omitted(())

    @property
    def seed(self) -> int | None:
        """Of the workload; None where the scenario leaves it open. Raises ValueError, but not once it is validated."""
        measure = self.expanded.get("measure", {})
        seed = measure.get("seed") if isinstance(measure, dict) else measure
        if isinstance(seed, bool) or not isinstance(seed, int | None):
            raise ValueError("measure.seed: expected a whole number")
        return seed

    @model_validator(mode="after")
    def _has_a_valid_seed(self) -> Self:
        _ = self.seed
        return self


NO_RELAY: Final = "none"  # the state of an engine of another project


LoopName = Literal["overlapped", "serial", "deferred", "multiplexed", "pipelined"]


class RelayPart(ResultModel):
    """``loop`` is the one that ran: where the scenario says ``overlap: auto``, what that chose."""

    state: str
    loop: LoopName | None = None  # None: in documents of older versions
    policies: Mapping[str, str] = {}
    switches: Mapping[str, JsonValue] = {}
    faults: tuple[str, ...] = ()  # what was broken on purpose


class HardwarePart(ResultModel):
    name: str
    sha256: str | None = None

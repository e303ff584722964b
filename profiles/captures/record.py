"""From a scenario to a capture of Nsight Systems, and to its document."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..record.result import Result, RunPart
from . import maps
from .measure import result
from .nsys.capture import open_export
from .nsys.export import exported
from .nsys.find import Nsys
from .nsys.record import RecordingRequest, check, record
from .nsys.scrub import scrub

MAP = "schedbench"


def recorded(
    nsys: Nsys, order: RecordingRequest, folder: Path, surroundings: Mapping[str, str]
) -> tuple[Result, Path]:
    """The capture's document, and the report that lies in ``folder``, beside a scrubbed export of it.

    Raises RecordingError, CaptureError, and MachineError where the tool wrote nothing or heard nothing of us."""
    report = record(nsys, order, folder, surroundings)
    shared = report.with_suffix(".sqlite")
    with exported(nsys, report) as found:
        scrub(found, shared)
    with open_export(shared) as capture:
        check(capture, nsys)
        name = Path(order.arguments[0]).stem
        run = RunPart(id="", command="", started="", wall_s=0.0)
        return result(capture, maps.load(MAP), name=name, run=run), report

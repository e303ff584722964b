"""One run that is counted from inside the process: ``python -m schedbench.profiles.lab.counted_run SCENARIO ...``.

As ``one``, with the same options; what is written are counts by source line, and nothing of times or tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from ... import sched
from ..cuda.dispatch_counts import Announced
from ..measure.steps import OUTSIDE
from ..platform.resolve import Resolved
from ..record.files import write_whole
from ..record.timeline import NO_SITE, Site
from ..run.machines import chosen, open_machine
from ..run.runner import GatedSink, PreparedRun
from ..vgpu.sites import Sites
from .compare_counts import CountedLine
from .single_run import parse, resolved

_NOWHERE = Site("", "", 0, "")
_STREAMS = ("schedule", "forward", "copy")


def counted(question: Resolved, device: str) -> dict[str, Any]:
    """The document: rows of counts and bytes, and how many steps of each kind there were."""
    gate = GatedSink()
    kind = chosen("cuda" if device == "cuda" else "vgpu", question.scenario)
    with open_machine(kind, question, gate) as machine:
        bench = PreparedRun(question, machine, question.relays[0], gate)
        bench.warm_up()
        module: Any = torch.get_device_module(machine.device)
        sites = Sites([Path(folder) for folder in sched.__path__])
        inline = round(question.hardware.copies.pageable_inline.value)
        announced = Announced(module, machine.device.type, sites, inline=inline)
        with announced.installed():
            bench.measure(lambda *_: nullcontext(announced))
        streams = bench.scheduler.engine.streams
        names = {int(getattr(streams, name).stream_id): name for name in reversed(_STREAMS)}
    return document(announced, names)


def document(announced: Announced, streams: dict[int, str]) -> dict[str, Any]:
    """Plain dicts and lists; what belongs to no step is left out."""
    rows: dict[CountedLine, list[int]] = {}
    sites = announced.sites
    for one, count in announced.counts.items():
        kind = announced.kinds.get(one.step, OUTSIDE)
        if kind == OUTSIDE:
            continue
        site = _NOWHERE if one.site == NO_SITE else sites[one.site]
        stream = streams.get(one.stream, "default")
        line = CountedLine(kind, stream, one.range, site.file, site.function, site.statement, one.what)
        row = rows.setdefault(line, [0, 0])
        row[0] += count
        row[1] += announced.bytes[one]
    steps: dict[str, int] = {}
    for kind in announced.kinds.values():
        steps[kind] = steps.get(kind, 0) + 1
    return {
        "steps": dict(sorted(steps.items())),
        "rows": [{**line._asdict(), "count": rows[line][0], "bytes": rows[line][1]} for line in sorted(rows)],
    }


def main(arguments: Sequence[str]) -> int:
    given = parse(arguments)
    found = counted(resolved(given), given.device)
    write_whole(given.output, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One run that is counted from inside the process: ``python -m schedrun.profiles.lab.counted_run SCENARIO ...``.

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
from ..cuda.dispatch_counts import DispatchCounter
from ..measure.steps import OUTSIDE
from ..platform.resolve import Resolved
from ..record.files import write_whole
from ..record.timeline import NO_SITE, Site
from ..run.machines import device_kind, open_machine
from ..run.runner import GatedSink, PreparedRun
from ..vgpu.sites import Sites
from .compare_counts import CountedLine
from .single_run import parse, resolved

_NOWHERE = Site("", "", 0, "")
_STREAMS = ("schedule", "forward", "copy")


def counted(question: Resolved, device: str) -> dict[str, Any]:
    """A document with rows of counts and bytes, and the number of steps of each kind."""
    sink = GatedSink()
    kind = device_kind("cuda" if device == "cuda" else "vgpu", question.scenario)
    with open_machine(kind, question, sink) as machine:
        run = PreparedRun(question, machine, question.relays[0], sink)
        run.warm_up()
        module: Any = torch.get_device_module(machine.device)
        sites = Sites([Path(folder) for folder in sched.__path__])
        inline = round(question.hardware.copies.pageable_inline.value)
        counter = DispatchCounter(module, machine.device.type, sites, inline=inline)
        with counter.installed():
            run.measure(lambda *_: nullcontext(counter))
        streams = run.scheduler.engine.streams
        names = {int(getattr(streams, name).stream_id): name for name in reversed(_STREAMS)}
    return document(counter, names)


def document(counter: DispatchCounter, streams: dict[int, str]) -> dict[str, Any]:
    """Plain dicts and lists. Calls that belong to no step are left out."""
    rows: dict[CountedLine, list[int]] = {}
    sites = counter.sites
    for key, count in counter.counts.items():
        kind = counter.kinds.get(key.step, OUTSIDE)
        if kind == OUTSIDE:
            continue
        site = _NOWHERE if key.site == NO_SITE else sites[key.site]
        stream = streams.get(key.stream, "default")
        line = CountedLine(kind, stream, key.range, site.file, site.function, site.statement, key.what)
        row = rows.setdefault(line, [0, 0])
        row[0] += count
        row[1] += counter.bytes[key]
    steps: dict[str, int] = {}
    for kind in counter.kinds.values():
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

"""Draw docs/releases.md: what each release of SGLang copies and waits for, by its own source on the virtual GPU.

    python tests/documents/releases.py --wheels DIR --python FILE
    python tests/documents/releases.py --wheels DIR --python FILE --host 0.5.4,0.5.9,0.5.23

``DIR`` has the wheels that ``pip download --no-deps sglang==VERSION`` fetches; ``FILE`` is an interpreter with what
SGLang needs. Half a minute for each release. With ``--host`` only the host times are drawn, of the releases that it
names: these stay imported, at 600 MiB of memory each, and run in turns. Nothing else should run beside that.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from packaging.version import Version

from schedbench.profiles.calibrate.host import own_times
from schedbench.profiles.engines.client import EngineFailedError, EngineProcess
from schedbench.profiles.engines.names import EngineError
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.record.recording import FILE, RecordedTimeline, read_recording
from schedbench.profiles.record.result import CopyRow, Hazards, Outputs, Result, SitePart
from schedbench.profiles.run.machines import Options
from schedbench.profiles.run.rank_context import ALONE

ROOT: Final = Path(__file__).resolve().parents[2]
SCENARIO: Final = ("mixed", ("workload.requests=16", "engine.model_runner=own"))
HOST: Final = (
    "overlap_on",
    (
        "device.host=measured",
        "engine.max_running_requests=32",
        "workload.requests=32",
        "workload.arrival=burst",
        "workload.prompt_tokens=64",
        "workload.output_tokens=96",
    ),
)
ROUNDS: Final = 11
# Phases of a step and their ranges. "receive" is schedbench's own, and "model" its decoder.
_PHASES: Final = {
    "plan": ("plan", "admit"),
    "prepare": ("prepare",),
    "launch": ("publish", "sample"),
    "settle": ("settle",),
}
_SOURCES: Final = "python/sglang/srt/"
_NOT_THEIRS: Final = ("receive", "model")
_WHEEL: Final = re.compile(r"sglang-(\d+(?:\.\d+)+(?:\.post\d+)?)-")
_COLUMNS: Final = ("h2d", "d2h", "d2d", "schedule's kernels", "forward's kernels", "waits")
_PAGE: Final = ROOT / "docs/releases.md"
_KINDS: Final = ("prefill", "decode.steady")
# What a step is the better for having less of.
_UPLOADS, _PAGEABLE, _BLOCKING = (
    "uploads",
    "pageable uploads that are not waited for",
    "uploads that are waited for",
)
_D2D, _WAITS = "copies on the device", "waits"
_KERNELS: Final = {stream: f"kernels on the {stream} stream" for stream in ("schedule", "forward")}
_CHARTS: Final = {
    "prefill": (_WAITS, "Waits of the host per prefill"),
    "decode.steady": (_KERNELS["schedule"], "Kernels on the schedule stream per steady decode"),
}
_HEAD: Final = """# SGLang's releases

What one step of each release's scheduler copies and waits for, read from its own source on the virtual GPU:
`{scenario}`, emulated, medians per step over all streams.
`python tests/documents/releases.py` draws this page ([engines.md](engines.md) says what runs, and what the model is).
The counts are exact. They include those of SGLang's own `ModelRunner`: the metadata of its attention backend (Triton)
and the inputs of its CUDA graphs. The model is schedbench's decoder, whose kernels are the same for all releases.

"h2d" is pinned / pageable, not waited for / waited for; "waits" are the host's; "hazards" are listed below. Releases of
the same letter gave the same tokens. Below the table are the releases in which a count rose or fell, with the lines of
`python/sglang/srt` that did: how many a step has of each, on average over the steps.

"""


_HOST_HEAD: Final = """## Host time

Microseconds of the host per steady decode step of 32 requests, from
`{scenario}`:
the time that the release's own Python and torch took on the machine that drew this page, without device calls, the
forward and what schedbench does. The releases ran in {rounds} rounds, one after the other in each. A cell is the least
of the rounds' medians over steps, since other work of the machine only adds. The last column is the change of the sum
from the release before, in the same round: the median, and in how many rounds it has that sign; where not nearly all
agree, no change was found. "launch" is `run_batch` with the sampler and no forward, and "plan"
is `get_next_batch_to_run` without the preparation.

"""


class Drawn(NamedTuple):
    """What is said of a release that runs."""

    version: str
    result: Result
    lines: Mapping[tuple[str, str], Mapping[str, tuple[float, str]]]  # see ``lines_of``


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--host", metavar="RELEASES", default="")
    given = parser.parse_args(arguments)

    def opened(version: str) -> EngineProcess:
        print(version, file=sys.stderr)
        return EngineProcess(EngineChoice(f"sglang=={version}", given.python, given.wheels))

    old = _PAGE.read_text(encoding="utf-8")
    start, end = old.index("## Host time"), old.index("## Which release")
    if given.host:
        text = old[:start] + host_section(given.host.split(","), opened) + old[end:]
    else:
        before, after = counted(versions(given.wheels), opened)
        text = before + old[start:end] + after
    _PAGE.write_text(text, encoding="utf-8")
    return 0


def counted(names: Sequence[str], opened: Callable[[str], EngineProcess]) -> tuple[str, str]:
    """What the page says before and after the host times."""
    rows, runs, digests = list[str](), list[Drawn](), list[str]()
    for version in names:
        engine = opened(version)
        try:
            engine.start()
            runs.append(drawn(version, engine))
            rows.append(row(version, runs[-1].result, digests))
        except (EngineError, EngineFailedError) as error:
            rows.append(line([version, f"does not run: {str(error).splitlines()[0]}", *[""] * 13]))
        finally:
            engine.close()
    columns = [f"{kind} {column}" for kind in ("prefill", "decode") for column in _COLUMNS]
    head = ["release", "tokens", *columns, "hazards"]
    table = [*map(line, [head, ["---"] * len(head)]), *rows]
    charts = [chart(title, runs, kind, what) for kind, (what, title) in _CHARTS.items()]
    before = "\n\n".join([_HEAD.format(scenario=named(SCENARIO)) + "\n".join(table), *charts])
    worse, better = changes(runs)
    notes = [note for run in runs for note in hazards(run.version, run.result)]
    titled = (
        ("Which release made it worse, and by which line", worse),
        ("Which release made it better", better),
        ("Hazards", notes),
    )
    after = [f"## {title}\n\n" + ("\n".join(lines) or "None.") for title, lines in titled]
    return f"{before}\n\n", "\n\n".join(after) + "\n"


def drawn(version: str, engine: EngineProcess) -> Drawn:
    """Raises EngineError, EngineFailedError."""
    with TemporaryDirectory() as folder:
        result = run(engine, SCENARIO, Options(device="vgpu", hazards=True, record=Path(folder)))
        return Drawn(version, result, lines_of(result, read_recording(Path(folder, FILE))))


def lines_of(
    result: Result, timeline: RecordedTimeline
) -> Mapping[tuple[str, str], Mapping[str, tuple[float, str]]]:
    """By the kind of step and what is counted: how many a step has on average of each statement, and its line."""
    kinds = {
        info.step: "decode.steady" if info.steady else info.kind
        for window in timeline.windows
        for info in window.settled
    }
    recorded = Counter(kinds.values())  # with those of the warm-up
    found = Counter[tuple[str, str, SitePart | None]]()
    for window in timeline.windows:
        for op in window.ops:
            what = _KERNELS.get(timeline.streams.get(op.stream, ""))
            if op.kind == "kernel" and what and op.site >= 0:
                site = SitePart(**timeline.sites[op.site]._asdict())
                found[kinds.get(op.step, ""), what, site] += 1
    for copy in result.copies:
        for what in _counted_as(copy):
            found["prefill", what, copy.site] += copy.count * (copy.kind == "prefill")
            found["decode.steady", what, copy.site] += copy.steady
    for sync in result.syncs:
        found["prefill", _WAITS, sync.site] += sync.count * (sync.kind == "prefill" and sync.sync)
        found["decode.steady", _WAITS, sync.site] += sync.steady * sync.sync
    lines: dict[tuple[str, str], dict[str, tuple[float, str]]] = {}
    for (kind, what, place), count in found.items():
        if place is not None and kind in _KINDS and count:
            per_step = count / (recorded[kind] if what in _KERNELS.values() else result.per_step[kind].steps)
            here = lines.setdefault((kind, what), {})
            earlier = here.get(place.statement, (0.0, ""))[0]
            here[place.statement] = earlier + per_step, f"{place.file.removeprefix(_SOURCES)}:{place.line}"
    return lines


def _counted_as(copy: CopyRow) -> Iterator[str]:
    if copy.direction == "d2d":
        yield _D2D
    if copy.direction == "h2d":
        yield _UPLOADS
        if copy.blocking:
            yield _BLOCKING
        elif copy.host_memory != "pinned":
            yield _PAGEABLE


def totals(result: Result, kind: str) -> dict[str, float]:
    """The medians over steps of what ``changes`` compares."""
    pageable, blocking = total(result, kind, "h2d_pageable"), total(result, kind, "h2d_blocking")
    return {
        _UPLOADS: total(result, kind, "h2d_pinned") + pageable,
        _PAGEABLE: pageable - blocking,
        _BLOCKING: blocking,
        _D2D: total(result, kind, "d2d"),
        **{what: total(result, kind, "kernel", [stream]) for stream, what in _KERNELS.items()},
        _WAITS: total(result, kind, "sync"),
    }


def total(result: Result, kind: str, name: str, streams: Sequence[str] = ()) -> float:
    """The medians over steps of one count, over the streams of that name or all."""
    of = result.per_step[kind].streams
    return sum(of[stream][name].median for stream in streams or of if name in of.get(stream, {}))


def changes(runs: Sequence[Drawn]) -> tuple[list[str], list[str]]:
    """Counts that rose from one release to the next, and those that fell, with the lines that did."""
    worse, better = list[str](), list[str]()
    for before, after in pairwise(runs):
        for kind in _KINDS:
            new = totals(after.result, kind)
            for what, old in totals(before.result, kind).items():
                if new[what] == old:
                    continue
                lines = (dict(run.lines.get((kind, what), {})) for run in (before, after))
                moved = "; ".join(moved_lines(*lines))
                text = f"- {after.version}, {kind}: {what} {number(old)} → {number(new[what])}: {moved}"
                (worse if new[what] > old else better).append(text)
    return worse, better


def moved_lines(
    before: Mapping[str, tuple[float, str]], after: Mapping[str, tuple[float, str]]
) -> Iterator[str]:
    """The statements that a step has more of or fewer of, by at least a half."""
    none = 0.0, ""
    for statement in {**before, **after}:
        (old, was), (new, where) = before.get(statement, none), after.get(statement, none)
        if round(abs(new - old) * 2) >= 1:
            yield f"`{where or was}` {number(round(old, 1))} → {number(round(new, 1))}"


def chart(title: str, runs: Sequence[Drawn], kind: str, what: str) -> str:
    values = {run.version: number(totals(run.result, kind)[what]) for run in runs}
    return bars(title, values, "per step")


def bars(title: str, values: Mapping[str, str], unit: str) -> str:
    labels = ", ".join(f'"{version}"' for version in values)
    lines = [
        "```mermaid",
        "xychart-beta",
        f'    title "{title}"',
        f"    x-axis [{labels}]",
        f'    y-axis "{unit}"',
        f"    bar [{', '.join(values.values())}]",
        "```",
    ]
    return "\n".join(lines)


def host_section(names: Sequence[str], opened: Callable[[str], EngineProcess]) -> str:
    """Raises EngineError, EngineFailedError."""
    with ExitStack() as stack:
        engines = dict[str, EngineProcess]()
        for version in names:
            engines[version] = engine = opened(version)
            stack.callback(engine.close)
            engine.start()
        times = [host_times(engines, number_of_round) for number_of_round in range(ROUNDS)]
    return _HOST_HEAD.format(scenario=named(HOST), rounds=ROUNDS) + host_page(times) + "\n\n"


def versions(wheels: Path) -> list[str]:
    found = {match.group(1) for path in wheels.glob("*.whl") if (match := _WHEEL.match(path.name))}
    return sorted(found, key=Version)


def named(scenario: tuple[str, Sequence[str]]) -> str:
    return " ".join((scenario[0], *scenario[1]))


def run(engine: EngineProcess, scenario: tuple[str, Sequence[str]], options: Options) -> Result:
    question = ask(*scenario)
    return engine.run(question, question.relays[0], options, [ALONE])[0].result


def host_times(engines: Mapping[str, EngineProcess], number_of_round: int) -> dict[str, dict[str, float]]:
    """us of each phase, by release. The order turns from round to round."""
    print(f"round {number_of_round + 1} of {ROUNDS}", file=sys.stderr)
    order = list(engines)[:: -1 if number_of_round % 2 else 1]
    times = {version: phases_of(engines[version]) for version in order}
    return {version: times[version] for version in engines}


def phases_of(engine: EngineProcess) -> dict[str, float]:
    """us per steady decode, by phase."""
    with TemporaryDirectory() as folder:
        run(engine, HOST, Options(device="vgpu", record=Path(folder)))
        windows = read_recording(Path(folder, FILE)).windows
    steady = {info.step for window in windows for info in window.settled if info.steady}
    own = own_times(
        [span for window in windows for span in window.ranges],
        [call for window in windows for call in window.calls],
        phases={*_NOT_THEIRS, *(name for names in _PHASES.values() for name in names)},
        through_torch=0.0,
        kind_of=lambda span: "decode" if span.step in steady else None,
    ).kinds
    return {
        phase: sum(median(sample.ns for sample in own[name, "decode"]) for name in names) / 1e3
        for phase, names in _PHASES.items()
    }


def host_page(times: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    """A table by phase, and a chart of the sums. ``times``: one entry for each round."""
    rows, sums = [line(["release", *_PHASES, "sum", "against the one before"]), line(["---"] * 7)], []
    before = ""
    for version in times[0]:
        least = [min(of[version][phase] for of in times) for phase in _PHASES]
        totals = [sum(of[version].values()) for of in times]
        sums.append(number_of(min(totals)))
        against = ""
        if before:
            changes = [total / sum(of[before].values()) - 1 for total, of in zip(totals, times, strict=True)]
            middle = median(changes)
            agreeing = sum(change * middle > 0 for change in changes)
            against = f"{round(100 * middle):+d} %, {agreeing} of {ROUNDS}"
        rows.append(line([version, *map(number_of, least), sums[-1], against]))
        before = version
    sums_of = dict(zip(times[0], sums, strict=True))
    return "\n".join([*rows, "", bars("Host time per steady decode of 32 requests", sums_of, "µs")])


def number_of(us: float) -> str:
    return f"{us:.0f}"


def row(version: str, result: Result, digests: list[str]) -> str:
    """``digests`` are those of the releases before; equal ones have the same letter."""
    digest = result.outputs.digest if isinstance(result.outputs, Outputs) else ""
    if digest not in digests:
        digests.append(digest)
    cells = [version, chr(ord("A") + digests.index(digest))]
    for kind in _KINDS:
        has = totals(result, kind)
        uploads = total(result, kind, "h2d_pinned"), has[_PAGEABLE], has[_BLOCKING]
        downloads = total(result, kind, "d2h")
        cells.append(" / ".join(map(number, uploads)))
        cells += map(number, (downloads, has[_D2D], *(has[what] for what in _KERNELS.values()), has[_WAITS]))
    found = result.hazards
    cells.append(str(len(places(found))) if isinstance(found, Hazards) else "not watched")
    return line(cells)


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    return f"{value:g}"


def places(found: Hazards) -> dict[tuple[str, str], str]:
    """Returns the hazards by resource and the line of the second access."""
    lines = {}
    for finding in found.findings:
        access = finding.second or finding.first
        where = f"{access.site.file}:{access.site.line}" if access.site else "unknown"
        lines[finding.resource, where] = finding.missing
    return lines


def hazards(version: str, result: Result) -> list[str]:
    if not isinstance(result.hazards, Hazards):
        return []
    return [f"- {version}, `{name}`: {what}" for (name, _), what in places(result.hazards).items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

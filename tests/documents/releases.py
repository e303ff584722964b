"""Draw docs/releases.md: what each release of SGLang copies and waits for, by its own source on the virtual GPU.

    python tests/documents/releases.py --wheels DIR --python FILE

``DIR`` has the wheels that ``pip download --no-deps sglang==VERSION`` fetches; ``FILE`` is an interpreter with what
SGLang needs. Two minutes and 600 MiB of memory for each release: all stay imported, and run for their host times in
turns. Nothing else should run beside it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from schedbench.profiles.calibrate.own_time import own_times
from schedbench.profiles.engines.client import EngineFailedError, EngineProcess
from schedbench.profiles.engines.names import EngineError
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.record.recording import FILE, read_recording
from schedbench.profiles.record.result import Hazards, Outputs, Result
from schedbench.profiles.run.rank_context import ALONE
from schedbench.profiles.run.task import Options

ROOT: Final = Path(__file__).resolve().parents[2]
SCENARIO: Final = ("mixed", ("workload.requests=16",))
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
_NOT_THEIRS: Final = ("receive", "model")
_WHEEL: Final = re.compile(r"sglang-(\d+(?:\.\d+)+)-")
_COLUMNS: Final = ("h2d", "d2h", "d2d", "schedule's kernels", "waits")
_HEAD: Final = """# SGLang's releases

What one step of each release's scheduler copies and waits for, read from its own source on the virtual GPU:
`{scenario}`, emulated, medians per step over all streams.
`python tests/documents/releases.py` draws this page ([engines.md](engines.md) says what runs, and what the model is).
The counts are exact; they leave out the attention backend's metadata and the input copies of SGLang's own CUDA graphs,
for the model is schedbench's decoder.

"h2d" is pinned / pageable, not waited for / waited for; "waits" are the host's; "hazards" are listed below. Releases of
the same letter gave the same tokens.

"""


_HOST_HEAD: Final = """

## Host time

Microseconds of the host per steady decode step of 32 requests, from
`{scenario}`:
the time that the release's own Python and torch took on the machine that drew this page, without device calls, the
forward and what schedbench does. The releases ran in {rounds} rounds, one after the other in each. A cell is the least
of the rounds' medians over steps, since other work of the machine only adds. The last column is the change of the sum
from the release before, in the same round: the median, and in how many rounds it has that sign; where not nearly all
agree, no change was found. "launch" is `run_batch` with the sampler and no forward, and "plan"
is `get_next_batch_to_run` without the preparation.

"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args(arguments)
    rows, notes, changes, digests = [], [], list[str](), list[str]()
    before: Result | None = None
    with ExitStack() as stack:
        engines = dict[str, EngineProcess]()
        for version in versions(given.wheels):
            print(version, file=sys.stderr)
            engine = EngineProcess(EngineChoice(f"sglang=={version}", given.python, given.wheels))
            stack.callback(engine.close)
            try:
                engine.start()
                result = run(engine, SCENARIO, Options(device="vgpu", hazards=True))
            except (EngineError, EngineFailedError) as error:
                rows.append(line([version, f"does not run: {str(error).splitlines()[0]}", *[""] * 11]))
                continue
            engines[version] = engine
            rows.append(row(version, result, digests))
            notes += hazards(version, result)
            if before is not None:
                changes += changed(version, uploading(before), uploading(result))
            before = result
        times = [host_times(engines, number_of_round) for number_of_round in range(ROUNDS)]
    names = [
        "release",
        "tokens",
        *(f"{kind} {column}" for kind in ("prefill", "decode") for column in _COLUMNS),
    ]
    table = [*map(line, [[*names, "hazards"], ["---"] * (len(names) + 1)]), *rows]
    text = _HEAD.format(scenario=named(SCENARIO)) + "\n".join(table)
    text += _HOST_HEAD.format(scenario=named(HOST), rounds=ROUNDS) + host_page(times)
    for title, lines in (("Lines that began or ceased to copy", changes), ("Hazards", notes)):
        text += f"\n\n## {title}\n\n" + ("\n".join(lines) or "None.")
    (ROOT / "docs/releases.md").write_text(f"{text}\n", encoding="utf-8")
    return 0


def versions(wheels: Path) -> list[str]:
    found = {match.group(1) for path in wheels.glob("*.whl") if (match := _WHEEL.match(path.name))}
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def named(scenario: tuple[str, Sequence[str]]) -> str:
    return " ".join((scenario[0], *scenario[1]))


def run(engine: EngineProcess, scenario: tuple[str, Sequence[str]], options: Options) -> Result:
    question = ask(*scenario)
    return engine.run(question, question.relays[0], options, [ALONE])[0]


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
    labels = ", ".join(f'"{version}"' for version in times[0])
    chart = [
        "```mermaid",
        "xychart-beta",
        '    title "Host time per steady decode of 32 requests"',
        f"    x-axis [{labels}]",
        '    y-axis "µs"',
        f"    bar [{', '.join(sums)}]",
        "```",
    ]
    return "\n".join([*rows, "", *chart])


def number_of(us: float) -> str:
    return f"{us:.0f}"


def uploading(result: Result) -> dict[tuple[str, str], str]:
    """The lines that copy between host and device in a prefill or a decode, and how; a line that moves is the same."""
    found = {}
    for copy in result.copies:
        if copy.site is not None and copy.kind in ("prefill", "decode") and copy.direction in ("h2d", "d2h"):
            waits = ", waited for" if copy.blocking else ""
            how = (
                f"{copy.kind} {copy.direction} {copy.host_memory}{waits}, `{copy.site.file}:{copy.site.line}`"
            )
            found[f"{copy.kind} {copy.direction}{waits}", copy.site.statement] = how
    return found


def changed(version: str, before: Mapping[Any, str], after: Mapping[Any, str]) -> list[str]:
    began = [f"- {version} began: {how}" for key, how in after.items() if key not in before]
    return began + [f"- {version} ceased: {how}" for key, how in before.items() if key not in after]


def row(version: str, result: Result, digests: list[str]) -> str:
    """``digests`` are those of the releases before; equal ones have the same letter."""
    digest = result.outputs.digest if isinstance(result.outputs, Outputs) else ""
    if digest not in digests:
        digests.append(digest)
    cells = [version, chr(ord("A") + digests.index(digest))]
    for kind in ("prefill", "decode.steady"):
        counts = {
            name: {c: x.median for c, x in of.items()} for name, of in result.per_step[kind].streams.items()
        }
        cells += [uploads(counts), total(counts, "d2h"), total(counts, "d2d")]
        cells += [number(counts.get("schedule", {}).get("kernel", 0)), total(counts, "sync")]
    found = result.hazards
    cells.append(str(len(places(found))) if isinstance(found, Hazards) else "not watched")
    return line(cells)


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def uploads(counts: Mapping[str, Mapping[str, float]]) -> str:
    pinned, pageable, blocking = (
        sum(of.get(f"h2d_{name}", 0) for of in counts.values()) for name in ("pinned", "pageable", "blocking")
    )
    return f"{number(pinned)} / {number(pageable - blocking)} / {number(blocking)}"


def total(counts: Mapping[str, Mapping[str, float]], what: str) -> str:
    return number(sum(of.get(what, 0) for of in counts.values()))


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

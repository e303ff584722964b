"""Draw docs/releases.md: what each release of SGLang copies and waits for, by its own source on the virtual GPU.

    python tests/documents/releases.py --wheels DIR --python FILE

``DIR`` has the wheels that ``pip download --no-deps sglang==VERSION`` fetches; ``FILE`` is an interpreter with what
SGLang needs. Minutes: every release is imported and runs the scenario once.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from schedbench.profiles.engines.client import EngineFailedError, end_engines
from schedbench.profiles.engines.names import EngineError
from schedbench.profiles.platform.resolve import EngineChoice, ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Hazards, Outputs, Result

ROOT: Final = Path(__file__).resolve().parents[2]
SCENARIO: Final = ("mixed", ("workload.requests=16",))
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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args(arguments)
    rows, notes, changes, digests = [], [], list[str](), list[str]()
    before: Result | None = None
    for version in versions(given.wheels):
        print(version, file=sys.stderr)
        try:
            result = run(EngineChoice(f"sglang=={version}", given.python, given.wheels))
        except (EngineError, EngineFailedError) as error:
            rows.append(line([version, f"does not run: {str(error).splitlines()[0]}", *[""] * 11]))
            continue
        finally:
            end_engines()
        rows.append(row(version, result, digests))
        notes += hazards(version, result)
        if before is not None:
            changes += changed(version, uploading(before), uploading(result))
        before = result
    names = [
        "release",
        "tokens",
        *(f"{kind} {column}" for kind in ("prefill", "decode") for column in _COLUMNS),
    ]
    table = [*map(line, [[*names, "hazards"], ["---"] * (len(names) + 1)]), *rows]
    text = _HEAD.format(scenario=f"{SCENARIO[0]} {' '.join(SCENARIO[1])}") + "\n".join(table)
    for title, lines in (("Lines that began or ceased to copy", changes), ("Hazards", notes)):
        text += f"\n\n## {title}\n\n" + ("\n".join(lines) or "None.")
    (ROOT / "docs/releases.md").write_text(f"{text}\n", encoding="utf-8")
    return 0


def versions(wheels: Path) -> list[str]:
    found = {match.group(1) for path in wheels.glob("*.whl") if (match := _WHEEL.match(path.name))}
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def run(choice: EngineChoice) -> Result:
    name, overrides = SCENARIO
    question = replace(ask(name, overrides), engine=choice)
    return execute(question, question.relays[0], Options(device="vgpu", hazards=True)).result


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
    """The hazards by resource and the line of the second access."""
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

"""Which hazards the checker finds on the virtual GPU and on CUDA.

``python -m schedbench.profiles.lab.hazard_table vgpu|cuda FOLDER`` writes ``hazards-vgpu.json`` or
``hazards-cuda.json``. With the former in the folder, the latter run also writes ``hazards.json``, which compares them.
The two devices need a process each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast

from ..check.faults import fault_scenarios
from ..check.runs import attempt
from ..platform.resolve import Resolved, ask
from ..ranks.execute import Options
from ..record.files import write_whole
from ..record.result import Abstained, HazardFinding
from ..run.crash import Crash

# Faults that the checker finds on one device.
FAULTS: Final = (
    "no-barrier",
    "nothing-kept-alive",
    "one-launch-kept-alive",
    "staging-refilled",
    "advance-in-place",
    "dead-publish",
)
_SOUND: Final = (("faults/mixing", "latest"), ("faults/mixing", "pr25774-before"))

Document = dict[str, Any]
Device = Literal["vgpu", "cuda"]


def cases() -> Mapping[str, Resolved]:
    """What is run on both devices, by name."""
    sound = {f"{name} {state}": ask(name, [f"engine.relay={state}"]) for name, state in _SOUND}
    return sound | {fault: fault_scenarios()[fault].broken() for fault in FAULTS}


def watched(question: Resolved, device: Device) -> Document:
    """The checker's findings in a run."""
    outcome = attempt(question, question.relays[0], Options(device=device, hazards=True))
    if isinstance(outcome, Crash):
        return {"broke_down": str(outcome)}
    if outcome.result.run.cancelled:
        raise KeyboardInterrupt
    hazards = outcome.result.hazards
    if isinstance(hazards, Abstained):
        return {"broke_down": hazards.abstained}
    return {
        "known": list(hazards.known),
        "findings": sorted({_sites(finding) for finding in hazards.findings}),
        "says": [f"{finding.resource}: {finding.missing}" for finding in hazards.findings],
    }


def _sites(finding: HazardFinding) -> str:
    """Both accesses' lines with their streams, which are the same on every device."""
    return " / ".join(
        f"{access.stream} {f'{access.site.file}:{access.site.line}' if access.site else 'nowhere'}"
        for access in (finding.first, finding.second)
        if access is not None
    )


def joined(emulated: Mapping[str, Document], real: Mapping[str, Document]) -> Document:
    """``agrees``: whether the checker found the same on both devices in all cases that ran on both; None without any. A
    case that broke down on either does not agree."""
    rows = {name: {**emulated[name], **row} for name, row in real.items() if name in emulated}
    return {"agrees": all(map(_same, rows.values())) if rows else None, "rows": rows}


def _same(row: Document) -> bool:
    found = [row.get(device, {}) for device in ("vgpu", "cuda")]
    a, b = ((each["known"], each["findings"]) if "findings" in each else None for each in found)
    return a is not None and a == b


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a case broke down, or if the devices do not agree on every case."""
    device, folder = cast(Device, arguments[0]), Path(arguments[1])
    emulated, found, asked = folder / "hazards-vgpu.json", dict[str, Document](), cases()
    table: Document = {"rows": {}}
    for name, question in asked.items():
        found[name] = {device: watched(question, device)}
        _write(folder / f"hazards-{device}.json", found)  # after each run: the stage may be interrupted
        if device == "cuda" and emulated.exists():
            table = joined(json.loads(emulated.read_text(encoding="utf-8")), found)
            _write(folder / "hazards.json", table)
    wrong = [f"{name}: broke down" for name, row in found.items() if "broke_down" in row[device]]
    wrong += [f"{name}: the devices disagree" for name, row in table["rows"].items() if not _same(row)]
    if device == "cuda" and not emulated.exists():
        wrong.append("no results of the virtual GPU to compare with")
    print("; ".join(wrong) or f"{len(asked)} cases {'agree' if device == 'cuda' else 'ran'}")
    return 1 if wrong else 0


def _write(path: Path, content: Document) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

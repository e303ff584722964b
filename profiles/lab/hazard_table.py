"""Which hazards are found by the checker on the virtual GPU, by the checker on CUDA, and by torch's own sanitizer.

``python -m schedbench.profiles.lab.hazard_table vgpu|cuda FOLDER`` writes ``hazards-vgpu.json`` or
``hazards-cuda.json``. With the former in the folder, the latter run also writes ``hazards.json`` and ``hazards.md``.
The two devices need a process each.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ..check.faults import fault_scenarios
from ..check.runs import attempt
from ..platform.resolve import Resolved, ask
from ..ranks.execute import Options
from ..record.files import write_whole
from ..record.result import Abstained, HazardAccess, HazardFinding
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
Detector = Callable[[Resolved], Document]


class DetectionCase(NamedTuple):
    name: str
    question: Resolved


def cases() -> Iterator[DetectionCase]:
    for scenario, state in _SOUND:
        yield DetectionCase(f"{scenario} {state}", ask(scenario, [f"engine.relay={state}"]))
    for fault in FAULTS:
        yield DetectionCase(fault, fault_scenarios()[fault].broken())


def watched(question: Resolved, *, device: Literal["vgpu", "cuda"]) -> Document:
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
    return " / ".join(_site(access) for access in (finding.first, finding.second) if access is not None)


def _site(access: HazardAccess) -> str:
    where = f"{access.site.file}:{access.site.line}" if access.site else "nowhere"
    return f"{access.stream} {where}"


def sanitized(question: Resolved) -> Document:  # cuda-only
    """The findings of torch's sanitizer, which stops at the first race. After that its callbacks stay registered, and
    report nothing."""
    from torch.cuda import _sanitizer  # registers callbacks with CUDA when it is imported

    printed, mode = io.StringIO(), _sanitizer.CUDASanitizerDispatchMode()
    with redirect_stderr(printed), mode:
        outcome = attempt(question, question.relays[0], Options(device="cuda", traced=False))
    crashed = isinstance(outcome, Crash)
    return sanitizer_verdict(int(crashed), f"{printed.getvalue()}{outcome if crashed else ''}")


def sanitizer_verdict(code: int, text: str) -> Document:
    """``text`` is what the sanitizer printed: it prints a race before it raises."""
    found = "CSAN" in text or "data race" in text.lower()
    return {"exit_code": code, "found": found, "text": text[-1500:] if code or found else ""}


def detections(
    asked: Sequence[DetectionCase], detectors: Mapping[str, Detector]
) -> Iterator[dict[str, Document]]:
    """The documents so far by case and detector, after each run. The detectors run one after the other: a run that
    breaks CUDA breaks all later ones of this process, and with torch's sanitizer, the last, that is most likely."""
    found: dict[str, Document] = {}
    for name, detector in detectors.items():
        for case in asked:
            found.setdefault(case.name, {})[name] = detector(case.question)
            yield found


def joined(emulated: dict[str, Document], real: dict[str, Document]) -> Document:
    """``agrees``: whether the checker found the same on both devices in all cases that ran on both. A case that broke
    down on either does not agree."""
    names = [name for name in real if name in emulated]
    rows = {name: {**emulated[name], **real[name]} for name in names}
    same = [_same(row.get("vgpu"), row.get("cuda")) for row in rows.values()]
    return {"agrees": all(same) if same else None, "rows": rows}


def _same(a: Document | None, b: Document | None) -> bool:
    if a is None or b is None or "broke_down" in a or "broke_down" in b:
        return False
    return (a["known"], a["findings"]) == (b["known"], b["findings"])


def failures(asked: Sequence[DetectionCase], found: Mapping[str, Document], detector: str) -> list[str]:
    """The cases without a result of the detector, and those that broke down under it."""
    wrong = []
    for case in asked:
        answer = found.get(case.name, {}).get(detector)
        if answer is None:
            wrong.append(f"{case.name}: not run")
        elif "broke_down" in answer:
            wrong.append(f"{case.name}: broke down")
    return wrong


def disagreements(table: Document) -> list[str]:
    """The cases in which the two devices do not agree."""
    return [
        f"{name}: the devices disagree"
        for name, row in table["rows"].items()
        if not _same(row.get("vgpu"), row.get("cuda"))
    ]


def markdown(table: Document) -> str:
    head = [
        "# Hazards found by each detector",
        "",
        f"the checker on CUDA and on the virtual GPU agree: {table['agrees']}",
        "",
        "| case | virtual GPU | checker on CUDA | torch's sanitizer |",
        "|---|---|---|---|",
    ]
    rows = [
        f"| {name} | {_words(row.get('vgpu'))} | {_words(row.get('cuda'))} | {_verdict(row.get('sanitizer'))} |"
        for name, row in table["rows"].items()
    ]
    return "\n".join([*head, *rows, ""])


def _words(found: Document | None) -> str:
    if found is None:
        return "not run"
    if "broke_down" in found:
        return "broke down"
    declared = f", {len(found['known'])} declared" if found["known"] else ""
    return f"{len(found['findings'])} found{declared}"


def _verdict(found: Document | None) -> str:
    if found is None:
        return "not run"
    return "found" if found["found"] else "broke down" if found["exit_code"] else "nothing"


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a case broke down, or if the devices do not agree on every case."""
    device, folder = arguments[0], Path(arguments[1])
    detectors: dict[str, Detector] = {"vgpu": partial(watched, device="vgpu")}
    if device == "cuda":
        detectors = {"cuda": partial(watched, device="cuda"), "sanitizer": sanitized}
    asked, found = list(cases()), {}
    for found in detections(asked, detectors):  # written after each run: the stage may be interrupted
        _write(device, folder, found)
    wrong = failures(asked, found, device)
    table = folder / "hazards.json"
    if device == "cuda":
        if table.exists():
            wrong += disagreements(json.loads(table.read_text(encoding="utf-8")))
        else:
            wrong.append("no results of the virtual GPU to compare with")
    print("; ".join(wrong) or f"{len(asked)} cases {'agree' if device == 'cuda' else 'ran'}")
    return 1 if wrong else 0


def _write(device: str, folder: Path, found: dict[str, Document]) -> None:
    _write_json(folder / f"hazards-{device}.json", found)
    emulated = folder / "hazards-vgpu.json"
    if device == "cuda" and emulated.exists():
        table = joined(json.loads(emulated.read_text(encoding="utf-8")), found)
        _write_json(folder / "hazards.json", table)
        write_whole(folder / "hazards.md", markdown(table))


def _write_json(path: Path, content: Document) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

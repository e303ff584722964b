"""Which account finds what: the virtual GPU's checker, the same one on CUDA, and torch's own sanitizer.

``python -m schedbench.profiles.lab.hazard_table vgpu|cuda FOLDER`` gives ``hazards-vgpu.json``, which needs a process
of its own, or ``hazards-cuda.json`` and, beside the former, ``hazards.json`` and ``hazards.md``.
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

from ..check.faults import probes
from ..check.runs import attempt
from ..platform.resolve import Resolved, ask
from ..ranks.execute import Options
from ..record.files import write_whole
from ..record.result import Abstained, HazardAccess, HazardFinding, Hazards
from ..run.crash import Crash

# Faults that hazards show on one device, and what is sound.
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
Answer = Callable[[Resolved], Document]


class DetectionCase(NamedTuple):
    name: str
    question: Resolved


def cases() -> Iterator[DetectionCase]:
    for scenario, state in _SOUND:
        yield DetectionCase(f"{scenario} {state}", ask(scenario, [f"engine.relay={state}"]))
    for fault in FAULTS:
        yield DetectionCase(fault, probes()[fault].broken())


def watched(question: Resolved, *, device: Literal["vgpu", "cuda"]) -> Document:
    """By the checker."""
    outcome = attempt(question, question.relays[0], Options(device=device, hazards=True))
    if isinstance(outcome, Crash):
        return {"broke_down": str(outcome)}
    if outcome.result.run.cancelled:
        raise KeyboardInterrupt  # which is no answer
    hazards = outcome.result.hazards
    if isinstance(hazards, Abstained):
        return {"broke_down": hazards.abstained}
    return _told(hazards)


def _told(hazards: Hazards) -> Document:
    return {
        "known": list(hazards.known),
        "findings": sorted({_place(finding) for finding in hazards.findings}),
        "says": [f"{finding.resource}: {finding.missing}" for finding in hazards.findings],
    }


def _place(finding: HazardFinding) -> str:
    """Both lines with their streams: what is the same on every device."""
    return " / ".join(_touch(touch) for touch in (finding.first, finding.second) if touch is not None)


def _touch(touch: HazardAccess) -> str:
    where = f"{touch.site.file}:{touch.site.line}" if touch.site else "nowhere"
    return f"{touch.stream} {where}"


def sanitized(question: Resolved) -> Document:  # cuda-only
    """By torch, which stops at the first race. A sanitizer that is over hears on, and says nothing any more."""
    from torch.cuda import _sanitizer  # which listens to CUDA from its import on

    printed, mode = io.StringIO(), _sanitizer.CUDASanitizerDispatchMode()
    with redirect_stderr(printed), mode:
        outcome = attempt(question, question.relays[0], Options(device="cuda", traced=False))
    crashed = isinstance(outcome, Crash)
    return sanitizer_verdict(int(crashed), f"{printed.getvalue()}{outcome if crashed else ''}")


def sanitizer_verdict(code: int, text: str) -> Document:
    """``text`` is what the sanitizer printed: it prints a race before it raises."""
    found = "CSAN" in text or "data race" in text.lower()
    return {"exit_code": code, "found": found, "text": text[-1500:] if code or found else ""}


def answered(
    questions: Sequence[DetectionCase], accounts: Mapping[str, Answer]
) -> Iterator[dict[str, Document]]:
    """By case and account, after each answer. One account after the other: a run that breaks CUDA in this process takes
    along what comes after it, and torch's sanitizer, which does not wait, is the likelier one to have such a run."""
    found: dict[str, Document] = {}
    for account, answer in accounts.items():
        for case in questions:
            found.setdefault(case.name, {})[account] = answer(case.question)
            yield found


def joined(emulated: dict[str, Document], real: dict[str, Document]) -> Document:
    """``agrees``: the checker says the same on both devices, wherever both were asked."""
    names = [name for name in real if name in emulated]
    rows = {name: {**emulated[name], **real[name]} for name in names}
    same = [_findings(row.get("vgpu")) == _findings(row.get("cuda")) for row in rows.values()]
    return {"agrees": all(same) if same else None, "rows": rows}


def _findings(answer: Document | None) -> object:
    return answer and (answer.get("known"), answer.get("findings"), "broke_down" in answer)


def markdown(told: Document) -> str:
    head = [
        "# Which account finds which hazard",
        "",
        f"the checker on CUDA and on the virtual GPU agree: {told['agrees']}",
        "",
        "| case | virtual GPU | checker on CUDA | torch's sanitizer |",
        "|---|---|---|---|",
    ]
    rows = [
        f"| {name} | {_words(row.get('vgpu'))} | {_words(row.get('cuda'))} | {_verdict(row.get('sanitizer'))} |"
        for name, row in told["rows"].items()
    ]
    return "\n".join([*head, *rows, ""])


def _words(answer: Document | None) -> str:
    if answer is None:
        return "not run"
    if "broke_down" in answer:
        return "broke down"
    declared = f", {len(answer['known'])} declared" if answer["known"] else ""
    return f"{len(answer['findings'])} found{declared}"


def _verdict(answer: Document | None) -> str:
    if answer is None:
        return "not run"
    return "found" if answer["found"] else "broke down" if answer["exit_code"] else "nothing"


def main(arguments: Sequence[str]) -> int:
    """What is found is no failure."""
    device, folder = arguments[0], Path(arguments[1])
    accounts: dict[str, Answer] = {"vgpu": partial(watched, device="vgpu")}
    if device == "cuda":
        accounts = {"cuda": partial(watched, device="cuda"), "sanitizer": sanitized}
    for found in answered(list(cases()), accounts):  # what is late is cut short
        _keep(device, folder, found)
    return 0


def _keep(device: str, folder: Path, found: dict[str, Document]) -> None:
    _write(folder / f"hazards-{device}.json", found)
    emulated = folder / "hazards-vgpu.json"
    if device == "cuda" and emulated.exists():
        told = joined(json.loads(emulated.read_text(encoding="utf-8")), found)
        _write(folder / "hazards.json", told)
        write_whole(folder / "hazards.md", markdown(told))


def _write(path: Path, content: Document) -> None:
    write_whole(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""First light on a machine with a GPU: ``python -m schedbench.profiles.lab.gpu --out FOLDER [--only STAGE...]``.

Under eight minutes: runs on CUDA, the virtual GPU's run of the same and their comparison, the tests that need a GPU,
how fast it is, and the probes; or those parts that are named. Everything goes into one folder, with ``summary.json``
and ``summary.md`` on top.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..record.files import write_whole
from ..run.stages import GpuStage, StageOutcome, in_process, run_all
from .plan import BUDGET, KINETO, check, plan


def summary(outcomes: Sequence[StageOutcome], folder: Path) -> dict[str, object]:
    """The stages, and what the comparisons said."""
    found, verified = _left(folder, "comparison.json"), _left(folder, "verify.json")
    predicted, hazards = _left(folder, "prediction.json"), _left(folder, "hazards.json")
    speed = _left(folder, "speed.json")
    return {
        "ok": all(outcome.status != "failed" for outcome in outcomes),
        "stages": [outcome._asdict() for outcome in outcomes],
        "counts_equal": None if found is None else found["equal"],
        "differing_lines": None if found is None else len(found["lines"]),
        "verified": None if verified is None else verified["agrees"],
        "unexplained": None if verified is None else len(verified["unexplained"]),
        "hazards_agree": None if hazards is None else hazards["agrees"],
        "median_prediction_error": None if predicted is None else predicted["median_error"],
        "speed": None
        if speed is None
        else {key: speed[key] for key in ("met", "missed", "runs", "overheads")},
        "files": sorted(entry.name for entry in folder.iterdir()),
    }


def _left(folder: Path, name: str) -> Any:
    """What a stage has written; None if it has not."""
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def markdown(told: dict[str, object], outcomes: Sequence[StageOutcome], speed: str = "") -> str:
    """``speed``: the page about it, where there is one."""
    rows = [f"| {o.name} | {o.status} | {o.seconds:.1f} | {_first_line(o.error)} |" for o in outcomes]
    head = [
        "# First light",
        "",
        f"counts equal to the virtual GPU's: {told['counts_equal']}",
        "",
        f"predicted, announced and recorded counts agree but for known differences: {told['verified']}",
        "",
        f"hazards found on CUDA are those found on the virtual GPU: {told['hazards_agree']}",
        "",
        f"median error of emulated times on this machine's own profile: {told['median_prediction_error']}",
        "",
    ]
    return "\n".join([*head, "| stage | status | s | error |", "|---|---|---|---|", *rows, "", speed])


def _first_line(text: str) -> str:
    return text.partition("\n")[0].replace("|", "\\|")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure and probe the machine's GPU.")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--only", nargs="+", default=[], metavar="STAGE", help="stages whose names begin so")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and check it; needs no GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """0 when no stage failed."""
    given = _parsed(arguments)
    stages = plan(given.out, given.only)
    if not stages:
        sys.exit(f"no stage begins with {' or '.join(given.only)}; --dry-run prints them all")
    if given.dry_run:
        return dry_run(stages)
    given.out.mkdir(parents=True, exist_ok=True)
    forget(stages, given.out)
    write_whole(given.out / "kineto.conf", KINETO)
    outcomes = []
    for outcome in run_all(stages, budget=BUDGET, run=in_process(sys.executable, given.out)):
        outcomes.append(outcome)
        print(
            f"{outcome.name:24} {outcome.status:8} {outcome.seconds:6.1f} s  {_first_line(outcome.error)}",
            flush=True,
        )
    told = summary(outcomes, given.out)
    write_whole(given.out / "summary.json", json.dumps(told, indent=1) + "\n")
    page = given.out / "speed.md"
    speed = page.read_text(encoding="utf-8") if page.exists() else ""
    write_whole(given.out / "summary.md", markdown(told, outcomes, speed))
    return 0 if told["ok"] else 1


def forget(stages: Sequence[GpuStage], folder: Path) -> None:
    """Remove what these stages left there before: old results are none of the new run."""
    for stage in stages:
        for name in stage.files:
            (folder / name).unlink(missing_ok=True)


def dry_run(stages: Sequence[GpuStage]) -> int:
    for stage in stages:
        print(f"{stage.name:24} {stage.deadline:4.0f} s  python {' '.join(stage.arguments)}")
    wrong = check(stages)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

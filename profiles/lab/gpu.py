"""All measurements of a machine with a GPU: ``python -m schedbench.profiles.lab.gpu --out FOLDER [--only STAGE...]``.

In less than eight minutes: runs on CUDA and on the virtual GPU and their comparison, the tests that need a GPU, speed,
and the probes; or only the stages that are named. All output goes into one folder, summarised in ``summary.json`` and
``summary.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..record.files import write_whole
from ..run.gpu_stages import GpuStage, StageOutcome, in_process, run_all
from .plan import BUDGET, KINETO, check, plan


def summary(outcomes: Sequence[StageOutcome], folder: Path) -> dict[str, object]:
    """The stages, and the results of the comparisons. A comparison whose difference is neither explained nor within its
    bound fails its stage, and with it the whole."""
    verified, predicted = _written(folder, "verify.json"), _written(folder, "prediction.json")
    hazards, speed = _written(folder, "hazards.json"), _written(folder, "speed.json")
    return {
        "ok": all(outcome.status != "failed" for outcome in outcomes),
        "stages": [outcome._asdict() for outcome in outcomes],
        "not_run": [outcome.name for outcome in outcomes if outcome.status == "skipped"],
        "verified": verified and verified["agrees"],
        "unexplained": verified and len(verified["unexplained"]),
        "hazards_agree": hazards and hazards["agrees"],
        "median_prediction_error": predicted and predicted["median_error"],
        "speed": speed and {key: speed[key] for key in ("met", "missed", "undecided", "runs", "overheads")},
        "files": sorted(entry.name for entry in folder.iterdir()),
    }


def _written(folder: Path, name: str) -> Any:
    """The document that a stage wrote; None if it wrote none."""
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def markdown(found: dict[str, object], outcomes: Sequence[StageOutcome], speed: str = "") -> str:
    """``speed`` is the content of speed.md, if there is one."""
    rows = [f"| {o.name} | {o.status} | {o.seconds:.1f} | {_first_line(o.error)} |" for o in outcomes]
    ran = sum(outcome.status != "skipped" for outcome in outcomes)
    head = [
        f"# make gpu · {'ok' if found['ok'] else 'FAILED'}, {len(outcomes) - ran} of {len(outcomes)} stages not run",
        "",
        f"predicted, announced and recorded counts agree but for known differences: {found['verified']}",
        "",
        f"hazards found on CUDA are those found on the virtual GPU: {found['hazards_agree']}",
        "",
        f"median error of emulated times on this machine's own profile: {found['median_prediction_error']}",
        "",
    ]
    return "\n".join([*head, "| stage | status | s | error |", "|---|---|---|---|", *rows, "", speed])


def _first_line(text: str) -> str:
    return text.partition("\n")[0].replace("|", "\\|")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure and probe the machine's GPU.")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="STAGE", help="stages whose names start with one of these"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and check it; needs no GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a stage failed; a comparison that does not hold fails its stage."""
    given = _parsed(arguments)
    stages = plan(given.out, given.only)
    if not stages:
        sys.exit(f"no stage's name starts with {' or '.join(given.only)}; --dry-run prints all names")
    if given.dry_run:
        return dry_run(stages)
    given.out.mkdir(parents=True, exist_ok=True)
    remove_results(stages, given.out)
    write_whole(given.out / "kineto.conf", KINETO)
    outcomes = []
    for outcome in run_all(stages, budget=BUDGET, run=in_process(sys.executable, given.out)):
        outcomes.append(outcome)
        print(
            f"{outcome.name:24} {outcome.status:8} {outcome.seconds:6.1f} s  {_first_line(outcome.error)}",
            flush=True,
        )
    found = summary(outcomes, given.out)
    write_whole(given.out / "summary.json", json.dumps(found, indent=1) + "\n")
    page = given.out / "speed.md"
    speed = page.read_text(encoding="utf-8") if page.exists() else ""
    write_whole(given.out / "summary.md", markdown(found, outcomes, speed))
    return 0 if found["ok"] else 1


def remove_results(stages: Sequence[GpuStage], folder: Path) -> None:
    """Remove what an earlier run of these stages wrote."""
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

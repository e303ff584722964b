"""First light on a machine with a GPU: ``python -m schedbench.profiles.cuda.gpu --out FOLDER [--dry-run]``.

Under eight minutes: runs on CUDA, the virtual GPU's run of the same and their comparison, the tests that need a
GPU, and the probes. Everything goes into one folder, with ``summary.json`` and ``summary.md`` on top.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ...sched.relay.states import states
from ..files import write_whole
from . import several
from .one import parse, question
from .probes import PROBES
from .stages import Outcome, Stage, in_process, run_all

BUDGET: Final = 460.0  # seconds
# CUPTI stops recording when Kineto's buffers are full, and a graph's kernels are each recorded.
KINETO: Final = "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=4096\n"

_PACKAGE: Final = "schedbench.profiles.cuda"
# Whose times are predicted and measured, in the ladder's order.
_FEW: Final = ("pr25774-before", "pr25945", "latest")
LADDERS: Final = {
    "mixed": tuple(states()),
    "penalties": tuple(states()),
    "shared_prefix": _FEW,
    "retraction": _FEW,
}
PREDICTED: Final = tuple((scenario, state) for scenario, ladder in LADDERS.items() for state in ladder)
# All requests at once, and no token ends one: what is scheduled depends neither on the machine's speed nor on its
# rounding, so counts can be compared.
_BURST: Final = (
    "workload.arrival=burst",
    "workload.requests=16",
    "workload.sampling.ignore_eos=true",
    "model.dtype=float32",
)
_QWEN: Final = (
    "model.preset=qwen3-0.6b",
    "model.dtype=bfloat16",
    "workload.requests=8",
)

_FLASHINFER: Final = ("model.dtype=bfloat16", "engine.attention=flashinfer", "workload.requests=16")


def plan(folder: Path) -> list[Stage]:
    """What is run, in order; the least important last."""
    comparison = (f"{folder / 'cuda.json'}", f"{folder / 'vgpu.json'}", f"{folder / 'comparison.json'}")
    compare = ("-m", f"{_PACKAGE}.compare_counts", *comparison)
    verified = [f"{folder / name}.json" for name in ("vgpu", "counted", "cuda", "verify")]
    tests = ("-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", "tests/cuda")
    return [
        _probe("environment", folder, 60),
        _run("cuda", folder, "cuda", _BURST, 120),
        _run("vgpu", folder, "vgpu", _BURST, 60),
        Stage("comparison", compare, 30, needs=("cuda", "vgpu")),
        _run("counted", folder, "cuda", _BURST, 90, module="counted"),
        Stage("verify", ("-m", f"{_PACKAGE}.verify", *verified), 30, needs=("cuda", "vgpu", "counted")),
        Stage("tests", tests, 200, packages=("pytest",)),
        *(_probe(name, folder, 45) for name in PROBES if name != "environment"),
        *_hazards(folder),
        *_predictions(folder),
        _run("cuda-mixed", folder, "cuda", (), 90),
        _run("cuda-bfloat16", folder, "cuda", ("model.dtype=bfloat16",), 90),
        _run("cuda-qwen3-0.6b", folder, "cuda", _QWEN, 120),
        replace(_run("cuda-flashinfer", folder, "cuda", _FLASHINFER, 120), packages=("flashinfer",)),
    ]


def _hazards(folder: Path) -> Iterator[Stage]:
    """The same questions to the checker on both devices, and to torch's sanitizer."""
    module = ("-m", f"{_PACKAGE}.hazards.table")
    yield Stage("hazards-vgpu", (*module, "vgpu", str(folder)), 45)
    yield Stage("hazards-cuda", (*module, "cuda", str(folder)), 90)


def _predictions(folder: Path) -> Iterator[Stage]:
    """The machine's own profile, each scenario and state on it and on the GPU, and how far they are apart."""
    profile = folder / "calibrated.yaml"
    places = ("--probes", str(folder), "--output", str(profile))
    yield Stage("calibrate", ("-m", "schedbench.profiles.calibrate.calibration", *places), 120)
    for scenario, ladder in LADDERS.items():
        yield _several(scenario, ladder, folder, "measured", "cuda")
        emulated = _several(scenario, ladder, folder, "emulated", "vgpu")
        on_profile = (*emulated.arguments, "--hardware", str(profile))
        yield replace(emulated, arguments=on_profile, needs=("calibrate",))
    names = (f"{scenario}:{state}" for scenario, state in PREDICTED)
    yield Stage("prediction", ("-m", f"{_PACKAGE}.prediction", str(folder), *names), 30)


def _several(scenario: str, ladder: Sequence[str], folder: Path, side: str, device: str) -> Stage:
    settings = [word for override in _BURST for word in ("--set", override)]
    where = ("--device", device, "--side", side, "--folder", str(folder))
    arguments = ("-m", f"{_PACKAGE}.several", scenario, *where, *settings, "--states", *ladder)
    return Stage(f"prediction-{scenario}-{side}", arguments, 90)


def _run(
    name: str,
    folder: Path,
    device: str,
    overrides: Iterable[str],
    deadline: float,
    *,
    module: str = "one",
) -> Stage:
    settings = [word for override in overrides for word in ("--set", override)]
    output = ("--output", str(folder / f"{name}.json"))
    arguments = ("-m", f"{_PACKAGE}.{module}", "mixed", "--device", device, *settings, *output)
    return Stage(name, arguments, deadline, environment={"KINETO_CONFIG": str(folder / "kineto.conf")})


def _probe(name: str, folder: Path, deadline: float) -> Stage:
    output = str(folder / f"probe-{name}.json")
    return Stage(f"probe-{name}", ("-m", f"{_PACKAGE}.probes", name, output), deadline)


def check(stages: Iterable[Stage]) -> list[str]:
    """What is wrong with a plan that can be known without a GPU: its modules import, its scenarios resolve."""
    wrong = []
    for stage in stages:
        try:
            _construct(stage)
        except Exception as error:
            wrong.append(f"{stage.name}: {type(error).__name__}: {error}")
    return wrong


def _construct(stage: Stage) -> None:
    _, module, *arguments = stage.arguments
    if module in (f"{_PACKAGE}.one", f"{_PACKAGE}.counted"):
        importlib.import_module(module)
        question(parse(arguments))
    elif module == f"{_PACKAGE}.several":
        list(several.questions(several.parse(arguments)))
    elif module == f"{_PACKAGE}.probes":
        importlib.import_module(PROBES[arguments[0]])
    else:
        importlib.import_module(module)


def summary(outcomes: Sequence[Outcome], folder: Path) -> dict[str, object]:
    """The stages, and what the comparisons said."""
    found, verified = _left(folder, "comparison.json"), _left(folder, "verify.json")
    predicted, hazards = _left(folder, "prediction.json"), _left(folder, "hazards.json")
    return {
        "ok": all(outcome.status != "failed" for outcome in outcomes),
        "stages": [outcome._asdict() for outcome in outcomes],
        "counts_equal": None if found is None else found["equal"],
        "differing_lines": None if found is None else len(found["lines"]),
        "verified": None if verified is None else verified["agrees"],
        "unexplained": None if verified is None else len(verified["unexplained"]),
        "hazards_agree": None if hazards is None else hazards["agrees"],
        "median_prediction_error": None if predicted is None else predicted["median_error"],
        "files": sorted(entry.name for entry in folder.iterdir()),
    }


def _left(folder: Path, name: str) -> Any:
    """What a stage has written; None if it has not."""
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def markdown(told: dict[str, object], outcomes: Sequence[Outcome]) -> str:
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
    return "\n".join([*head, "| stage | status | s | error |", "|---|---|---|---|", *rows, ""])


def _first_line(text: str) -> str:
    return text.partition("\n")[0].replace("|", "\\|")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure and probe the machine's GPU.")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--dry-run", action="store_true", help="print the plan and check it; needs no GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """0 when no stage failed."""
    given = _parsed(arguments)
    stages = plan(given.out)
    if given.dry_run:
        return dry_run(stages)
    given.out.mkdir(parents=True, exist_ok=True)
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
    write_whole(given.out / "summary.md", markdown(told, outcomes))
    return 0 if told["ok"] else 1


def dry_run(stages: Sequence[Stage]) -> int:
    for stage in stages:
        print(f"{stage.name:24} {stage.deadline:4.0f} s  python {' '.join(stage.arguments)}")
    wrong = check(stages)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""All measurements of a machine with a GPU: ``python -m schedbench.profiles.lab.gpu --out FOLDER [--only STAGE...]``.

In less than eight minutes: runs on CUDA and on the virtual GPU and their comparison, the tests that need a GPU, speed,
and the probes; or only the stages that are named. All output goes into one folder, summarised in ``summary.json``. The
plan has checks that need no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ..calibrate import calibration
from ..cuda.nvtx_ranges import INJECTED
from ..platform.resolve import Resolved, ask
from ..record.files import write_whole
from ..run.gpu_stages import GpuStage, StageOutcome, absent, in_process, run_all, select_stages
from . import prediction, prediction_runs, probes, single_run, speed, verification
from .prediction_runs import LARGE, SIDES, TINY, Device, ladder
from .single_run import run_stage, set_options
from .verification import ONE_SCHEDULE

BUDGET: Final = 460.0  # seconds
# CUPTI stops recording when Kineto's buffers are full, and each kernel of a graph is recorded. This is the largest
# size: Kineto of torch 2.11 counts bytes in a signed 32-bit integer, and accepts no 4096.
KINETO: Final = "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=2047\n"

# Of runs whose counts are compared.
_COMPARED: Final = (*ONE_SCHEDULE, "workload.requests=16", "model.dtype=float32")
_REAL: Final = ("device.values=real",)
# The shape that the limits of ``speed`` are for: at most 64 requests at once, with room for 64 of the longest.
_EIGHT_BILLION: Final = (
    *_REAL,
    "model.preset=llama-3-8b",
    "engine.max_running_requests=64",
    "engine.kv_tokens=131072",
    "measure.warmup_requests=64",
)
# The warm-up has as many requests as may run at once: the first product of a new shape loads its kernel.
_HALF_BILLION: Final = (*_REAL, "measure.warmup_requests=256")
# Many decodes of about a millisecond.
_DECODES: Final = (
    *_REAL,
    "workload.requests=64",
    "workload.prompt_tokens=16",
    "workload.output_tokens=192",
    "engine.max_running_requests=64",
    "engine.kv_tokens=16384",
)
_CALIBRATING: Final = ("costs", "copies", "kernels")  # probes that a hardware profile is fitted to
_WORKERS: Final = 12  # at most this many processes emulate at once


def plan(folder: Path, only: Sequence[str] = ()) -> list[GpuStage]:
    """All stages, the least important last. With ``only``: the stages whose names start with one of its entries, the
    stages that these need, and predictions of every scenario instead of one."""
    return select_stages(_stages(folder, every=True), only) if only else _stages(folder, every=False)


def _stages(folder: Path, *, every: bool) -> list[GpuStage]:
    pytest = ("-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider")
    kernels = "tests/cuda/test_triton_kernels.py"
    kineto = {"KINETO_CONFIG": str(folder / "kineto.conf")}
    counts = verification.stages("mixed", _COMPARED, folder, deadline=120)
    return [
        _probe("environment", folder),
        *(replace(stage, environment=kineto) for stage in counts),
        GpuStage("verify", (*_module(verification), str(folder)), 30, needs=verification.SOURCES),
        # In a stage of their own: later runs find the compiled kernels in Triton's cache.
        GpuStage("tests-kernels", (*pytest, kernels), 120, packages=("pytest",)),
        GpuStage("tests", (*pytest, "tests/cuda", f"--ignore={kernels}"), 210, packages=("pytest",)),
        _timed("speed-8b", folder, _EIGHT_BILLION, 150),
        _timed("speed-0.6b", folder, _HALF_BILLION, 75),
        _overhead("overhead", folder, "bare", "timed"),
        *(_probe(name, folder) for name in _CALIBRATING),
        *_predictions(folder, every=every),
        _overhead("overhead-nvtx", folder, "timed", "nvtx"),
        GpuStage(
            "speed",
            (*_module(speed), str(folder), "speed-8b", "speed-0.6b"),
            15,
            uses=("speed-8b", "speed-0.6b", "overhead", "overhead-nvtx"),
            reserved=True,
        ),
    ]


def _module(module: ModuleType) -> tuple[str, str]:
    return "-m", module.__name__


def _overhead(name: str, folder: Path, before: str, after: str) -> GpuStage:
    """CUPTI, where it is found, receives the NVTX ranges, as Nsight Systems would."""
    tool = {INJECTED: str(path)} if after == "nvtx" and (path := cupti(_libraries())) else {}
    words = ["--sides", before, after, *set_options(_DECODES)]
    return replace(run_stage(name, folder, "throughput", "cuda", words, 60), environment=tool)


def cupti(folders: Iterable[Path]) -> Path | None:
    """CUPTI's library, which receives NVTX ranges if its path is in the environment before nvtx is loaded."""
    return next((path for folder in folders for path in sorted(folder.glob("libcupti.so*"))), None)


def _libraries() -> list[Path]:
    packages = Path(sysconfig.get_paths()["platlib"])
    toolkit = Path("/usr/local/cuda")
    return [
        *sorted(packages.glob("nvidia/*/lib")),
        packages / "torch" / "lib",
        toolkit / "extras" / "CUPTI" / "lib64",
        toolkit / "lib64",
    ]


def _predictions(folder: Path, *, every: bool) -> Iterator[GpuStage]:
    """The machine's hardware profile, runs on it and on the GPU, and their differences. The emulation runs first: it
    uses many processes, which must not run beside a measurement."""
    profile = folder / "calibrated.yaml"
    places = ("--probes", str(folder), "--output", str(profile))
    probed = tuple(f"probe-{name}" for name in ("environment", *_CALIBRATING))
    fit = (*_module(calibration), *places)
    yield GpuStage("calibrate", fit, 90, uses=probed, packages=("scipy",), writes=(profile.name,))
    # In the order in which they are run.
    tiny, large = (ladder(*TINY), ladder(*LARGE)) if every else (ladder("mixed"), [])
    emulated = _prediction_runs("prediction-emulated", [*tiny, *large], folder, "vgpu", 120)
    workers = max(1, min((os.cpu_count() or 1) - 2, _WORKERS))
    on_profile = ("--hardware", str(profile), "--workers", str(workers))
    yield replace(emulated, arguments=(*emulated.arguments, *on_profile), needs=("calibrate",))
    yield _prediction_runs("prediction-measured", tiny, folder, "cuda", 150)
    if large:
        yield _prediction_runs("prediction-measured-large", large, folder, "cuda", 240)
    yield GpuStage("prediction", (*_module(prediction), str(folder), *tiny, *large), 15, reserved=True)


def _prediction_runs(
    name: str, questions: Sequence[str], folder: Path, device: Device, deadline: float
) -> GpuStage:
    files = tuple(prediction.file(question, SIDES[device]) for question in questions)
    arguments = (*_module(prediction_runs), *questions, "--device", device, "--folder", str(folder))
    return GpuStage(name, arguments, deadline, writes=files)


def _timed(name: str, folder: Path, overrides: Iterable[str], deadline: float) -> GpuStage:
    """Without a traced pass: a trace of thousands of graphs would not fit."""
    words = ["--timed", *set_options(overrides)]
    return run_stage(name, folder, "throughput", "cuda", words, deadline)


def _probe(name: str, folder: Path) -> GpuStage:
    output = str(folder / f"probe-{name}.json")
    return GpuStage(f"probe-{name}", (*_module(probes), name, output), 45)


def check(stages: Iterable[GpuStage]) -> list[str]:
    """What is wrong with a plan, as far as it shows without a GPU: a module that cannot be imported, a scenario that
    does not resolve, or a run on CUDA without values. Stages whose packages are missing are not checked."""
    wrong = []
    for stage in stages:
        if absent(stage):
            continue
        try:
            _check_stage(stage)
        except Exception as error:
            wrong.append(f"{stage.name}: {type(error).__name__}: {error}")
    return wrong


def _check_stage(stage: GpuStage) -> None:
    _, module, *arguments = stage.arguments
    importlib.import_module(module)
    if module == single_run.__name__:
        given = single_run.parse(arguments)
        _require_values(ask(given.scenario, given.set), given.device)
    elif module == prediction_runs.__name__:
        given = prediction_runs.parse(arguments)
        for question in given.questions:
            _require_values(prediction_runs.resolved(question, given.device), given.device)
    elif module == probes.__name__ and arguments[0] not in probes.PROBES:
        raise ValueError(f"no probe is called {arguments[0]}")


def _require_values(resolved: Resolved, device: str) -> None:
    if device == "cuda" and resolved.scenario.device.values == "none":
        raise ValueError("on CUDA values are real")


def summary(outcomes: Sequence[StageOutcome], folder: Path) -> dict[str, object]:
    """The stages, and the results of the comparisons. A comparison whose difference is neither explained nor within its
    bound fails its stage, and with it the whole."""
    verified, predicted = _written(folder, "verify.json"), _written(folder, "prediction.json")
    speed = _written(folder, "speed.json")
    return {
        "ok": all(outcome.status != "failed" for outcome in outcomes),
        "stages": [outcome._asdict() for outcome in outcomes],
        "not_run": [outcome.name for outcome in outcomes if outcome.status == "skipped"],
        "verified": verified and verified["agrees"],
        "unexplained": verified and len(verified["unexplained"]),
        "median_prediction_error": predicted and predicted["median_error"],
        "speed": speed and {key: speed[key] for key in ("met", "missed", "undecided", "runs", "overheads")},
        "files": sorted(entry.name for entry in folder.iterdir()),
    }


def _written(folder: Path, name: str) -> Any:
    """The document that a stage wrote; None if it wrote none."""
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a stage failed; a comparison that does not hold fails its stage."""
    parser = argparse.ArgumentParser(description="Measure and probe the machine's GPU.")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="STAGE", help="stages whose names start with one of these"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and check it; needs no GPU")
    given = parser.parse_args(arguments)
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
        why = outcome.error.partition("\n")[0]
        print(f"{outcome.name:24} {outcome.status:8} {outcome.seconds:6.1f} s  {why}", flush=True)
    found = summary(outcomes, given.out)
    write_whole(given.out / "summary.json", json.dumps(found, indent=1) + "\n")
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

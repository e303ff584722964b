"""What ``make gpu`` runs, in order, and whether it can be run: everything about it that needs no GPU."""

from __future__ import annotations

import importlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from ...scenarios.loader import load
from ..cuda.nvtx_ranges import INJECTED
from ..judge.prediction import file
from ..platform.resolve import resolve
from ..run.stages import GpuStage, absent, chosen
from . import overhead, several
from .one import parse, question
from .probes import PROBES
from .questions import LARGE, TINY, PredictionQuestion, asked, ladder

BUDGET: Final = 460.0  # seconds
# CUPTI stops recording when Kineto's buffers are full, and a graph's kernels are each recorded. The most there is: the
# Kineto of torch 2.11 counts bytes in 32 bits with a sign, and makes none of 4096.
KINETO: Final = "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB=2047\n"

_PACKAGE: Final = "schedbench.profiles.cuda"
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
_REAL: Final = ("device.values=real",)
# The bars' question: at most 64 at once, and room for as many of the longest.
_EIGHT_BILLION: Final = (
    *_REAL,
    "model.preset=llama-3-8b",
    "engine.max_running_requests=64",
    "engine.kv_tokens=131072",
    "measure.warmup_requests=64",
)
# As many as may run at once: products of a new shape load their kernels at the first one, and the device waits.
_HALF_BILLION: Final = (*_REAL, "measure.warmup_requests=256")
# Decodes of a millisecond or so, again and again.
_DECODES: Final = (
    *_REAL,
    "workload.requests=64",
    "workload.prompt_tokens=16",
    "workload.output_tokens=192",
    "engine.max_running_requests=64",
    "engine.kv_tokens=16384",
)
# What a calibration is made of.
_CALIBRATED: Final = ("costs", "copies", "kernels")
_WORKERS: Final = 12  # processes that emulate, at most


def plan(folder: Path, only: Sequence[str] = ()) -> list[GpuStage]:
    """What is run, in order; the least important last. ``only``: stages whose names begin so, with what they need, and
    predictions of every scenario instead of one."""
    return chosen(_stages(folder, every=True), only) if only else _stages(folder, every=False)


def _stages(folder: Path, *, every: bool) -> list[GpuStage]:
    return [
        _probe("environment", folder, 45),
        *_counts(folder),
        *_tests(),
        *_speed(folder),
        *_verification(folder),
        *(_probe(name, folder, 45) for name in _CALIBRATED),
        *_predictions(folder, every=every),
        *_hazards(folder),
        _overhead("overhead-nvtx", folder, "timed", "nvtx"),
        *(_probe(name, folder, 45) for name in PROBES if name not in ("environment", *_CALIBRATED)),
        _run("cuda-mixed", folder, "cuda", (), 90),
        _run("cuda-bfloat16", folder, "cuda", ("model.dtype=bfloat16",), 90),
        _run("cuda-qwen3-0.6b", folder, "cuda", _QWEN, 120),
        GpuStage(
            "speed",
            ("-m", f"{_PACKAGE}.speed", str(folder), "speed-8b", "speed-0.6b"),
            15,
            uses=("speed-8b", "speed-0.6b", "overhead", "overhead-nvtx"),
            kept=True,
        ),
    ]


def _tests() -> Iterator[GpuStage]:
    """Kernels apart: what they have compiled, runs find in Triton's cache."""
    pytest = ("-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider")
    kernels = "tests/cuda/test_triton_kernels.py"
    yield GpuStage("tests-kernels", (*pytest, kernels), 120, packages=("pytest",))
    yield GpuStage("tests", (*pytest, "tests/cuda", f"--ignore={kernels}"), 120, packages=("pytest",))


def _counts(folder: Path) -> Iterator[GpuStage]:
    """The same on both devices, line by line."""
    files = (f"{folder / 'cuda.json'}", f"{folder / 'vgpu.json'}", f"{folder / 'comparison.json'}")
    yield _run("cuda", folder, "cuda", _BURST, 120)
    yield _run("vgpu", folder, "vgpu", _BURST, 60)
    yield GpuStage("comparison", ("-m", f"{_PACKAGE}.compare_counts", *files), 30, needs=("cuda", "vgpu"))


def _verification(folder: Path) -> Iterator[GpuStage]:
    files = [f"{folder / name}.json" for name in ("vgpu", "counted", "cuda", "verify")]
    yield _run("counted", folder, "cuda", _BURST, 90, module="counted")
    yield GpuStage("verify", ("-m", f"{_PACKAGE}.verify", *files), 30, needs=("cuda", "vgpu", "counted"))


def _speed(folder: Path) -> Iterator[GpuStage]:
    """Timed only: a trace of thousands of graphs would not fit."""
    for name, overrides, deadline in (("speed-8b", _EIGHT_BILLION, 150), ("speed-0.6b", _HALF_BILLION, 75)):
        stage = _run(name, folder, "cuda", overrides, deadline, scenario="throughput")
        yield replace(stage, arguments=(*stage.arguments, "--timed"))
    yield _overhead("overhead", folder, "bare", "timed")


def _overhead(name: str, folder: Path, before: str, after: str) -> GpuStage:
    """Ranges are taken by CUPTI, where it is found: it is a tool as Nsight Systems is."""
    tool = {INJECTED: str(path)} if after == "nvtx" and (path := cupti(_libraries())) else {}
    words = ("throughput", "--device", "cuda", "--sides", before, after, *_sets(_DECODES))
    output = ("--output", str(folder / f"{name}.json"))
    return GpuStage(name, ("-m", f"{_PACKAGE}.overhead", *words, *output), 60, environment=tool)


def cupti(folders: Iterable[Path]) -> Path | None:
    """The library, which takes NVTX ranges where the process is told of it before nvtx is loaded."""
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


def _hazards(folder: Path) -> Iterator[GpuStage]:
    """The same questions to the checker on both devices, and to torch's sanitizer."""
    module = ("-m", f"{_PACKAGE}.hazards.table")
    yield GpuStage("hazards-vgpu", (*module, "vgpu", str(folder)), 45)
    yield GpuStage("hazards-cuda", (*module, "cuda", str(folder)), 90, writes=("hazards.json", "hazards.md"))


def _predictions(folder: Path, *, every: bool) -> Iterator[GpuStage]:
    """The machine's own profile, questions on it and on the GPU, and how far they are apart. Emulation comes first: it
    shares the processors among many, which measuring must not."""
    profile = folder / "calibrated.yaml"
    places = ("--probes", str(folder), "--output", str(profile))
    probes = tuple(f"probe-{name}" for name in ("environment", *_CALIBRATED))
    fit = ("-m", "schedbench.profiles.calibrate.calibration", *places)
    yield GpuStage("calibrate", fit, 90, uses=probes, packages=("scipy",), writes=(profile.name,))
    questions = predicted(every=every)
    emulated = _several("prediction-emulated", questions, folder, "vgpu", "emulated", 120)
    on_profile = ("--hardware", str(profile), "--workers", str(_workers()))
    yield replace(emulated, arguments=(*emulated.arguments, *on_profile), needs=("calibrate",))
    tiny = [question for question in questions if question.scenario in TINY]
    large = [question for question in questions if question.scenario in LARGE]
    yield _several("prediction-measured", tiny, folder, "cuda", "measured", 150)
    if large:
        yield _several("prediction-measured-large", large, folder, "cuda", "measured", 240)
    names = map(str, questions)
    yield GpuStage("prediction", ("-m", f"{_PACKAGE}.prediction", str(folder), *names), 15, kept=True)


def predicted(*, every: bool) -> list[PredictionQuestion]:
    """In the order in which they are asked."""
    return ladder(*TINY, *LARGE) if every else ladder("mixed")


def _workers() -> int:
    return max(1, min((os.cpu_count() or 1) - 2, _WORKERS))


def _several(
    name: str, questions: Iterable[PredictionQuestion], folder: Path, device: str, side: str, deadline: float
) -> GpuStage:
    where = ("--device", device, "--side", side, "--folder", str(folder))
    asked = list(questions)
    files = tuple(f"{file(*question, side)}.json" for question in asked)
    return GpuStage(name, ("-m", f"{_PACKAGE}.several", *map(str, asked), *where), deadline, writes=files)


def _run(
    name: str,
    folder: Path,
    device: str,
    overrides: Iterable[str],
    deadline: float,
    *,
    module: str = "one",
    scenario: str = "mixed",
) -> GpuStage:
    output = ("--output", str(folder / f"{name}.json"))
    arguments = ("-m", f"{_PACKAGE}.{module}", scenario, "--device", device, *_sets(overrides), *output)
    return GpuStage(name, arguments, deadline, environment={"KINETO_CONFIG": str(folder / "kineto.conf")})


def _sets(overrides: Iterable[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def _probe(name: str, folder: Path, deadline: float) -> GpuStage:
    output = str(folder / f"probe-{name}.json")
    return GpuStage(f"probe-{name}", ("-m", f"{_PACKAGE}.probes", name, output), deadline)


def check(stages: Iterable[GpuStage]) -> list[str]:
    """What is wrong with a plan that can be known without a GPU: its modules import, its scenarios resolve, and what is
    asked of CUDA has values."""
    wrong = []
    for stage in stages:
        if absent(stage):
            continue  # nor would it be run
        try:
            _construct(stage)
        except Exception as error:
            wrong.append(f"{stage.name}: {type(error).__name__}: {error}")
    return wrong


def _construct(stage: GpuStage) -> None:
    _, module, *arguments = stage.arguments
    importlib.import_module(module)
    if module in (f"{_PACKAGE}.one", f"{_PACKAGE}.counted"):
        given = parse(arguments)
        _computed(question(given).scenario.device.values, given.device)
    elif module == f"{_PACKAGE}.several":
        given = several.parse(arguments)
        for one in given.questions:
            _computed(asked(one, given.device).scenario.device.values, given.device)
    elif module == f"{_PACKAGE}.overhead":
        given = overhead.parse(arguments)
        _computed(resolve(load(given.scenario, given.set)).scenario.device.values, given.device)
    elif module == f"{_PACKAGE}.probes":
        importlib.import_module(PROBES[arguments[0]])


def _computed(values: str, device: str) -> None:
    if device == "cuda" and values == "none":
        raise ValueError("on CUDA values are real")

"""Timed runs of many prediction questions in one process: ``python -m schedbench.profiles.lab.prediction_runs``.

A question is a shipped scenario with fewer requests under one state of the relay, written ``scenario:state``; it is run
both emulated and on a GPU. Scenarios that need a file of the user's are left out. One process starts up and compiles
once for all questions. Emulated questions may be spread over several processes, which changes none of their times.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from ...sched.relay.states import states
from ..calibrate.host import PhaseCollector, own_times
from ..platform.pool import Workers, pool, use_workers
from ..platform.resolve import Resolved, ask
from ..ranks.execute import Options, execute
from ..record.timeline import Range
from .prediction import HOST_TIMES, file

Device = Literal["cuda", "vgpu"]
# What a run on a device is one side of.
SIDES: Final[Mapping[Device, str]] = {"cuda": "measured", "vgpu": "emulated"}


# Overrides by scenario. Tiny models take about a second each on a GPU. The most important scenario is first.
TINY: Final[Mapping[str, Sequence[str]]] = {
    "mixed": ("workload.requests=24",),
    "penalties": ("workload.requests=16",),
    "retraction": (),
    "shared_prefix": ("workload.requests=32",),
    "spec_v2": ("workload.requests=12",),
    "spec_v1": ("workload.requests=12",),
    "hisparse": ("workload.requests=16",),
    "grammar": ("workload.requests=16",),
    "spec_grammar": ("workload.requests=8",),
    "embedding": (),
    "encoder_decoder": (),
    "block_diffusion": ("workload.requests=8",),
    "logprobs": (),
    "deferred": (),
    "split_prefill": ("engine.split_prefill.divisions=[]",),
    "pause": (),
}
_CLOSED: Final = (
    "workload.requests=48",
    "workload.arrival.concurrency=24",
    "workload.output_tokens={dist: uniform, min: 32, max: 96}",
    "engine.kv_tokens=65536",
)
# Models of billions of parameters take some seconds each, most of them for weights and graphs.
LARGE: Final[Mapping[str, Sequence[str]]] = {
    "overlap_on": _CLOSED,
    "overlap_off": _CLOSED,
    "ladder": (),
    "throughput": (
        "workload.requests=64",
        "workload.output_tokens={dist: uniform, min: 64, max: 192}",
        "engine.kv_tokens=131072",
    ),
    "decode_heavy": (
        "workload.requests=64",
        "workload.arrival.concurrency=32",
        "workload.output_tokens={dist: uniform, min: 64, max: 128}",
        "engine.kv_tokens=65536",
    ),
    "start": (),
    "prompt_staging": (),
    "prefill_heavy": ("workload.requests=12", "workload.arrival.rate=12", "engine.kv_tokens=131072"),
}


def ladder(*scenarios: str) -> list[str]:
    """The questions of each scenario under every state of the relay, in the ladder's order."""
    return [f"{scenario}:{state}" for scenario in scenarios for state in states()]


def resolved(question: str, device: Device, more: Sequence[str] = ()) -> Resolved:
    """The question's scenario with its overrides and ``more``. On CUDA values are real, with random weights where the
    scenario skips values. Raises ScenarioError."""
    scenario, _, state = question.partition(":")
    real = ("device.values=real",) if device == "cuda" else ()
    return ask(scenario, [*{**TINY, **LARGE}[scenario], *real, f"engine.relay={state}", *more])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run scenarios under states of the relay.")
    parser.add_argument("questions", nargs="+", metavar="SCENARIO:STATE")
    parser.add_argument("--device", choices=("cuda", "vgpu"), required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--hardware", type=Path, help="a hardware profile that an earlier stage writes")
    parser.add_argument("--workers", type=int, default=1, help="processes; virtual GPU only")
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args(arguments)


class FailedRun(NamedTuple):
    """Why a question has no result; empty where it has one. ``last``: no later question can be run."""

    reason: str
    last: bool = False


def host_us_per_step(ranges: Sequence[Range]) -> dict[str, float]:
    """us by range of the scheduler. The time of an inner range does not count for the outer one; calls and waits
    count."""
    names, steps = {span.name for span in ranges}, len({span.step for span in ranges})
    own, _ = own_times(ranges, (), phases=names, through_torch=0)
    return {name: sum(sample.ns for sample in found) / 1e3 / steps for (name, _), found in own.items()}


def run(question: str, given: argparse.Namespace) -> FailedRun:
    """Run one question and write its result. An exception is reported and leaves later questions unaffected, except
    for an error of the accelerator: after one, every later call of CUDA in this process fails."""
    options = Options(device=given.device, traced=False, command=f"prediction_runs {question}")
    try:
        profile = [f"device.hardware={given.hardware.resolve()}"] if given.hardware else []
        asked = resolved(question, given.device, [*given.set, *profile])
        host = PhaseCollector()
        result = execute(asked, options, extra_sinks=[host])
    except Exception as error:
        broken = isinstance(error.__cause__ or error, torch.AcceleratorError)
        return FailedRun(f"{question}: {type(error).__name__}: {error}", last=broken)
    if result.run.cancelled:
        return FailedRun(f"{question}: interrupted", last=True)
    environment = {**result.environment, HOST_TIMES: host_us_per_step(host.ranges)}
    result = result.model_copy(update={"environment": environment})
    result.write(given.folder / file(question, SIDES[given.device]))
    return FailedRun("")


def run_all(given: argparse.Namespace) -> Iterator[str]:
    """Run every question; yields why it has no result, or an empty string."""
    use_workers(Workers(given.workers))
    with pool(len(given.questions)) if given.workers > 1 else nullcontext(map) as each:
        for failure in each(partial(run, given=given), given.questions):
            yield failure.reason
            if failure.last:
                return
            gc.collect()  # a scheduler is a reference cycle that holds a model and its KV on the device


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if some question has no result."""
    given = parse(arguments)
    failed = 0
    for reason in run_all(given):
        failed += bool(reason)
        print(reason, end="\n" if reason else "", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    from . import prediction_runs  # other processes find ``run`` under this name alone

    sys.exit(prediction_runs.main(sys.argv[1:]))

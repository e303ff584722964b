"""Several questions, one after the other in one process: ``python -m schedbench.profiles.lab.several``.

Timed only, one result per question. A process that starts up and compiles once has time for many. Emulated ones may be
shared out among processes, which changes none of their times.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch

from ..judge.prediction import file
from ..ranks.execute import Options, execute
from .questions import PredictionQuestion, asked


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run scenarios under states of the relay.")
    parser.add_argument("questions", nargs="+", metavar="SCENARIO:STATE", type=PredictionQuestion.of)
    parser.add_argument("--device", choices=("cuda", "vgpu"), required=True)
    parser.add_argument("--side", choices=("measured", "emulated"), required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--hardware", type=Path, help="a profile that a stage before this one writes")
    parser.add_argument("--workers", type=int, default=1, help="processes, of the virtual GPU only")
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args(arguments)


class Said(NamedTuple):
    """Why there is no result, if so; ``last``: nothing can be asked after it."""

    why: str
    last: bool = False


def answer(question: PredictionQuestion, given: argparse.Namespace) -> Said:
    """Write its result. What breaks one question leaves the others, unless it broke the device: CUDA tells every later
    call of it."""
    hardware = [] if given.hardware is None else [f"device.hardware={given.hardware.resolve()}"]
    options = Options(device=given.device, traced=False, command=f"several {question}")
    try:
        resolved = asked(question, given.device, [*given.set, *hardware])
        result = execute(resolved, resolved.relays[0], options).result
    except Exception as error:
        broken = isinstance(error.__cause__ or error, torch.AcceleratorError)
        return Said(f"{question}: {type(error).__name__}: {error}", last=broken)
    if result.run.cancelled:
        return Said(f"{question}: interrupted", last=True)
    result.write(given.folder / f"{file(*question, given.side)}.json")
    return Said("")


def answers(given: argparse.Namespace) -> Iterator[str]:
    """Of each why there is no result."""
    if given.workers == 1:
        for question in given.questions:
            said = answer(question, given)
            yield said.why
            if said.last:
                return
            gc.collect()  # a scheduler is a ring of references that holds a model and its KV on the device
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=context) as pool:
        for future in as_completed([pool.submit(answer, question, given) for question in given.questions]):
            yield future.result().why


def main(arguments: Sequence[str]) -> int:
    """1 when a question broke down; the others have run."""
    given = parse(arguments)
    broke = 0
    for why in answers(given):
        broke += bool(why)
        print(why, end="\n" if why else "", flush=True)
    return 1 if broke else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

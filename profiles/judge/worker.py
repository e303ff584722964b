"""A side in a process of its own: reads requests from stdin and writes samples to stdout, as one line of JSON each.

Started as ``python -m schedbench.profiles.judge.worker`` with the sources of the checkout to run. A scenario that
cannot run on this machine is answered with the reason; any other error ends the process with a traceback on stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from ...scenarios.problems import ScenarioError
from ...scenarios.records import TraceError
from ...sched.model.checkpoint import CheckpointError
from ..platform.machine import MachineError
from ..platform.own_process import claim_process
from .local import margin, run_trial
from .trials import Question, TrialRequest


def serve(lines: Iterable[str], out: TextIO) -> None:
    for line in lines:
        out.write(json.dumps(_answer(json.loads(line))) + "\n")
        out.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    question = Question(**{**request["question"], "overrides": tuple(request["question"]["overrides"])})
    order = TrialRequest(**{**request["order"], "overrides": tuple(request["order"]["overrides"])})
    try:
        if "margin" in request:
            return {"margin": margin(question, order, *request["margin"])}
        return run_trial(question, order).document()
    except (ScenarioError, TraceError, CheckpointError, MachineError) as error:
        return {"refused": str(error), "unable": isinstance(error, MachineError)}


def _main() -> None:
    """Reserves stdout for the responses; everything else that is printed goes to stderr."""
    claim_process()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin, out)


if __name__ == "__main__":
    _main()

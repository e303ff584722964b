"""The runs of a sweep: spread over processes or a cluster, and kept in a folder for a later sweep."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from ...scenarios.problems import ScenarioError
from ...scenarios.records import TraceError
from ...sched.memory.allocation import OutOfKVMemoryError
from ...sched.model.checkpoint import CheckpointError
from ..engines.client import EngineFailedError, opened_engine
from ..engines.names import EngineError
from ..judge.local import unrepeatable
from ..judge.trials import in_short
from ..platform.inputs import inputs
from ..platform.machine import MachineError
from ..platform.pool import require_alone, spread
from ..platform.resolve import Resolved
from ..ranks.execute import Options, execute, whole
from ..record.environment import tool
from ..record.result import Result, ResultError, read
from ..run.crash import Crash, crash_of
from ..run.machines import device_kind

Answer = Result | str | Crash
"""A result, the reason for which the question has none, or how its run failed."""


class Runs:
    """Runs scenarios, or takes the results of earlier ones from ``folder``."""

    def __init__(self, options: Options, *, folder: Path | None = None, resume: bool = False) -> None:
        self._options = options
        self._folder = folder
        self._resume = resume
        self._tool = tool()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def file(self, resolved: Resolved) -> str:
        """Named after the question, the hardware and the source of the engine, so that another sweep finds it."""
        engine = (
            "" if resolved.engine is None else f"-{opened_engine(resolved.engine).source.part.sha256[:16]}"
        )
        return f"{resolved.scenario.sha256[:16]}-{resolved.hardware.sha256[:8]}{engine}.json"

    def answers(self, questions: Sequence[Resolved]) -> Iterator[Answer]:
        """The answers in order, each as soon as it is there. Raises WorkersError, and KeyboardInterrupt where a run was
        interrupted."""
        stored = [self._is_stored(question) for question in questions]
        new = [question for question, known in zip(questions, stored, strict=True) if not known]
        made = self._run_each(new)
        for question, is_stored in zip(questions, stored, strict=True):
            found: Answer | None = self._known(question) if is_stored else None
            if found is None:
                found = run(self._options, question) if is_stored else next(made)
                if self._folder is not None and isinstance(found, Result):
                    found.write(self._folder / self.file(question))
            yield found

    def _run_each(self, questions: Sequence[Resolved]) -> Iterator[Answer]:
        """Runs whose times are measured have the machine to themselves. Of others, the first shows whether processes
        would save time."""
        reasons = (unrepeatable(question, self._options) for question in questions)
        measured = next(filter(None, reasons), "")
        require_alone(measured)
        alone = len(questions) if measured else 1
        begin = time.perf_counter()
        yield from map(partial(run, self._options), questions[:alone])
        rest = questions[alone:]
        if rest:
            with spread(len(rest), time.perf_counter() - begin, lost=partial(Crash, site=None)) as each:
                yield from each(partial(run, self._options), rest)

    def _is_stored(self, question: Resolved) -> bool:
        if not self._resume or self._folder is None:
            return False
        try:
            return (self._folder / self.file(question)).exists()
        except EngineError:  # which its run will report, too
            return False

    def _known(self, resolved: Resolved) -> Result | None:
        """An earlier result of this question by this version of the program on this kind of device."""
        if self._folder is None:
            return None
        try:
            result = read(self._folder / self.file(resolved))
        except ResultError:
            return None
        emulated = device_kind(self._options.device, resolved.scenario) == "vgpu"
        same = result.scenario.sha256 == resolved.scenario.sha256
        alike = same and result.scenario.inputs == inputs(resolved) and result.tool == self._tool
        return result if alike and result.labels.emulated == emulated else None


def run(options: Options, question: Resolved) -> Answer:
    """An error of the run is an answer, so that it does not end the other runs. Raises KeyboardInterrupt where the run
    was interrupted, and MachineError."""
    try:
        return whole(execute(question, options))
    except ScenarioError as error:
        return error.reasons
    except (TraceError, CheckpointError) as error:
        return str(error)
    except EngineError as error:
        return in_short(error)
    except (OutOfKVMemoryError, EngineFailedError) as error:
        return Crash(in_short(error), None)
    except MachineError:
        raise
    except Exception as error:
        return crash_of(error)

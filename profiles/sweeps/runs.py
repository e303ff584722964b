"""The runs of a sweep: spread over processes or a cluster, and kept in a folder for a later sweep."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
from ..record.environment import environment, tool
from ..record.result import Result, ResultError, read
from ..run.crash import Crash, crash_of
from ..run.machines import device_kind

Answer = Result | str | Crash
"""A result, the reason for which the question has none, or how its run failed."""


class Unable(str):
    """A reason that is this machine's: another one may run the question."""


class Runs:
    """Runs scenarios, or takes the results of earlier ones from ``folder``."""

    def __init__(self, options: Options, *, folder: Path | None = None, resume: bool = False) -> None:
        self._options = options
        self._folder = folder
        self._known_from = folder if resume else None
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
        stored = [self._stored(question) for question in questions]
        made = self._run_each([one for one, path in zip(questions, stored, strict=True) if path is None])
        for question, path in zip(questions, stored, strict=True):
            found: Answer | None = None if path is None else self._known(path, question)
            if found is None:
                found = run(self._options, question) if path else next(made)
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
            with spread(len(rest), time.perf_counter() - begin, lost=self._lost) as each:
                yield from each(partial(run, self._options), rest)

    def _lost(self, reason: str) -> Crash:
        again = "" if self._folder is None else "; --resume runs it again"
        return Crash(f"{reason}{again}", None)

    def _stored(self, question: Resolved) -> Path | None:
        with suppress(EngineError):  # which its run will report, too
            if self._known_from is not None and (path := self._known_from / self.file(question)).exists():
                return path
        return None

    def _known(self, path: Path, resolved: Resolved) -> Result | None:
        """An earlier result of this question by this version of the program and of torch on this kind of device; where
        times were measured, on this processor, too."""
        try:
            result = read(path)
        except ResultError:
            return None
        here, device = environment(), self._options.device
        of_times = ("torch",) if result.labels.exact else tuple(here)
        kind = device_kind(device, resolved.scenario) if device == "auto" else device
        alike = (
            result.scenario.sha256 == resolved.scenario.sha256
            and result.scenario.inputs == inputs(resolved)
            and result.tool == self._tool
            and all(result.environment.get(name) == here[name] for name in of_times)
            and result.labels.emulated == (kind == "vgpu")
        )
        return result if alike else None


def run(options: Options, question: Resolved) -> Answer:
    """An error of the run is an answer, so that it does not end the other runs. Raises KeyboardInterrupt where the run
    was interrupted."""
    try:
        return whole(execute(question, options))
    except ScenarioError as error:
        return error.reasons
    except (TraceError, CheckpointError) as error:
        return str(error)
    except MachineError as error:
        return Unable(error)
    except EngineError as error:
        return in_short(error)
    except (OutOfKVMemoryError, EngineFailedError) as error:
        return Crash(in_short(error), None)
    except Exception as error:
        return crash_of(error)

"""Engines in processes of their own, as the rest of schedbench runs them. Nothing of an engine is imported here."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final

from ...scenarios.combinations import MODES
from ...scenarios.schema import Scenario
from ..platform.engine_choice import EngineChoice, working
from ..platform.resolve import Resolved
from ..record.result import Result
from ..run.machines import Options
from ..run.rank_context import RankContext
from ..run.runner import ExtraSink
from ..run.task import RankReport, RouterReport
from .adapter import find_adapter
from .failures import STACKS, Answer, Stack, packed, unpacked
from .names import EngineError, PackagePlace, parse_engine
from .process import GRACE_S, PACKAGE, TEMPORARY, EngineOutput, EnginePipes, ending, our_package
from .server import NEEDED, STACK_SIGNAL
from .source import EngineSource, opened_source

_MOST_ENGINES: Final = 4  # processes that are kept, each with an imported engine
# What an adapter has where the ranks of a mode run at the same time.
_RANKS_OF_MODES: Final = {
    "pipeline": "stages",
    "disaggregation": "transfers",
    "data-parallel ranks": "data_ranks",
}
_QUIET_S: Final = 10.0  # without progress that are not shown
_STACK_S: Final = 1.0  # for the processes of an engine to write their stacks


class EngineFailedError(RuntimeError):
    """The engine raised an error, or its process ended or did not advance; or its run has ended with this ``result``,
    and the engine holds memory."""

    result: Result | None = None


def run_engine(
    choice: EngineChoice,
    resolved: Resolved,
    options: Options,
    ranks: Sequence[RankContext],
    extra_sinks: Sequence[ExtraSink] = (),
) -> Sequence[RankReport | RouterReport]:
    """Run once on that engine. Each of several ``ranks`` runs in a process of its own: the stages of a pipeline and
    workers that send each other KV at the same time, and workers that do not one after the other. Each of
    ``extra_sinks`` gets the state of a copy that has seen the rank at its place. Raises EngineError, EngineFailedError,
    KeyboardInterrupt, and what a run raises."""
    if options.device == "cuda":
        raise EngineError(
            f"{choice.name}: an engine of another project runs on the virtual GPU: --device vgpu"
        )
    scenario, engine = resolved.scenario, opened_engine(choice)
    engine.refuse(scenario)
    apart = MODES["fake transfer"].on(scenario)
    together = not apart and any(
        MODES[mode].on(scenario) and engine.has(part) for mode, part in _RANKS_OF_MODES.items()
    )
    if len(ranks) > 1 and not (apart or together):
        raise EngineError(
            f"{choice.name}: the engine runs on one rank, and the scenario has {scenario.engine.ranks}; only the"
            " workers of engine.disaggregation={mode: pair, transfer: fake} run apart, one after the other"
        )
    if MODES["own model runner"].on(scenario) and not engine.has("own_runner"):
        raise EngineError(
            f"{choice.name}: its adapter has no model runner of the engine's own: engine.model_runner=stub"
        )
    engine.start()
    engine.output.begin_run()
    workers = [rank for rank in ranks if not rank.is_router]
    groups = [workers] if together else [[worker] for worker in workers]
    reports = [report for group in groups for report in engine.run(resolved, options, group, extra_sinks)]
    return reports if len(workers) == len(ranks) else [*reports, RouterReport((), "", 0)]


def require_freed(choice: EngineChoice, result: Result) -> None:
    """Raises EngineFailedError, which has the result, if the engine holds memory after all requests have ended."""
    if result.run.leak:
        error = opened_engine(choice)._failed(f"the run failed: {result.run.leak}")
        error.result = result
        raise error


_engines: dict[EngineChoice, EngineProcess] = {}  # those that were used last are at the end


def opened_engine(choice: EngineChoice) -> EngineProcess:
    """That engine, with its source, and with its process once it was started. Raises EngineError."""
    engine = _engines.pop(choice, None) or EngineProcess(choice)
    _engines[choice] = engine
    while len(_engines) > _MOST_ENGINES:
        _engines.pop(next(iter(_engines))).close()
    return engine


def end_engines() -> None:
    """End the processes of all engines."""
    while _engines:
        _engines.popitem()[1].close()


@atexit.register
def _end_with_program() -> None:
    """An interrupt while exported sources are removed would leave some of them."""
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_engines()


class EngineProcess:
    """An engine's source, and the process that has imported it, which is started again after a failure."""

    def __init__(self, choice: EngineChoice) -> None:
        self._choice = choice
        self.timeout = choice.timeout
        self._stack = ExitStack()
        self._pipes: EnginePipes | None = None
        name = parse_engine(choice.name)
        self._adapter = find_adapter(name.adapter)
        place = PackagePlace(self._adapter.package, self._adapter.python_path)
        with working(f"reading the source of {choice.name}"):
            self.source: EngineSource = self._stack.enter_context(
                opened_source(name, place, wheels=choice.wheels)
            )
        self._ours = self._stack.enter_context(our_package())
        self.output = EngineOutput(self._stack.enter_context(tempfile.TemporaryFile()))  # noqa: SIM115
        self.import_s = 0.0
        self.threads: Sequence[str] = ()  # that the import has started, and a run does not have
        self.hollow: Sequence[str] = ()  # packages that are absent

    def has(self, part: str) -> bool:
        """Whether the adapter has that optional part of ``EngineAdapter``."""
        return bool(getattr(self._adapter, part, False))

    def refuse(self, scenario: Scenario) -> None:
        """Raises EngineError where the adapter refuses the scenario, before anything is imported."""
        if needs := getattr(self._adapter, "needs", lambda _: ())(scenario):
            raise EngineError(
                f"{self.source.name}: the engine cannot be run with this scenario: {'; '.join(needs)}"
            )

    def start(self) -> None:
        """Raises EngineError where the interpreter lacks something, EngineFailedError where the import fails."""
        if self._pipes is not None:
            return
        temporary = self.source.temporary
        self._pipes = EnginePipes(
            self._choice.python,
            self._ours,
            self.output.file,
            [self._ours, *([] if temporary is None else [temporary])],
        )
        requires = {**NEEDED, **self._adapter.requires}
        opening = {
            "source": packed(self.source),
            "watched": str(self.source.watched),
            "requires": requires,
            "ours": self._choice.python == sys.executable,
        }
        with working(f"importing {self._choice.name}"):
            answer = self._ask(opening, "its import")
        if "loaded" not in answer:
            self.end()
        if "refused" in answer:
            raise EngineError(f"{self._choice.name}: {self._choice.python} {answer['refused']}")
        self._raise(answer, "its import")
        self.import_s, self.threads, self.hollow = (answer[key] for key in ("loaded", "threads", "hollow"))

    def run(
        self,
        resolved: Resolved,
        options: Options,
        ranks: Sequence[RankContext],
        extra_sinks: Sequence[ExtraSink],
    ) -> Sequence[RankReport]:
        """The reports of the ``ranks``, which run at the same time. Raises what ``run_engine`` raises."""
        task = packed((resolved, options, ranks, extra_sinks))
        answer = self._ask({"run": task, "cwd": os.getcwd()}, "the run")
        self._raise(answer, "the run")
        reports: list[RankReport] = []
        for part in answer["result"]:
            for rank, seen in unpacked(part["sinks"]):
                vars(extra_sinks[rank]).update(vars(seen))
            report: RankReport = unpacked(part["report"])
            run = report.result.run.model_copy(update={"import_s": self.import_s, **answer.get("marks", {})})
            reports.append(report._replace(result=report.result.model_copy(update={"run": run})))
        return reports

    @property
    def pid(self) -> int | None:
        """The number of the process, if it runs."""
        return None if self._pipes is None else self._pipes.process.pid

    def end(self) -> None:
        """End the process. The source stays."""
        if self._pipes is not None:
            self._pipes.end()
            self._pipes = None

    def close(self) -> None:
        self.end()
        self._stack.close()

    def _ask(self, command: Answer, what: str) -> Answer:
        """The outcome of the command. Raises EngineFailedError where the process has none, KeyboardInterrupt."""
        assert self._pipes is not None
        self.output.begin_command()
        self._pipes.write(command)
        try:
            return self._outcome(what, self.timeout)
        except KeyboardInterrupt:
            if self._pipes.interrupt():
                with suppress(EngineFailedError):
                    answer = self._outcome(what, GRACE_S)  # of a run that may have ended before
                    return answer | {"marks": {"cancelled": True}}
            self.end()
            raise

    def _outcome(self, what: str, patience: float) -> Answer:
        assert self._pipes is not None
        outcome: Answer | None = None
        try:
            while answer := self._next(what, patience):
                if "began" in answer:
                    self._pipes.run = answer["began"]
                elif "ended" in answer:
                    self._pipes.run = None
                    if outcome is None:
                        how = ending(answer["ended"])
                        raise self._failed(f"{what} did not end: its process {how}")
                    return outcome
                elif "beat" not in answer:
                    outcome = answer
                    if self._pipes.run is None:
                        return outcome
        except TimeoutError:
            late = "took longer than" if self._pipes.run is None else "made no progress for"
            self._pipes.process.send_signal(STACK_SIGNAL)
            time.sleep(_STACK_S)
            self.end()
            stacks = self._stacks()
            at = ", ".join(f"{stack.at} ({stack.rank})" if len(stacks) > 1 else stack.at for stack in stacks)
            why = f"{what} {late} {patience:g} s (--engine-timeout), and was ended"
            shown = [f"Stack of {stack.rank} (most recent call last):\n{stack.text}" for stack in stacks]
            raise self._failed(f"{why}{at and f' at {at}'}", *shown) from None
        code, answered = self._pipes.process.wait(), self._pipes.answered
        self.end()
        if not answered:
            python = self._choice.python
            said = [f"no Python interpreter: {python}, which {ending(code)}", *self.output.last()]
            raise EngineError("\n".join(said))
        raise self._failed(f"{what} did not end: the engine's process {ending(code)}")

    def _next(self, what: str, patience: float) -> Answer | None:
        """The next answer. Once a run has made no progress for a while, that is shown. Raises TimeoutError."""
        assert self._pipes is not None
        quiet = patience if self._pipes.run is None else min(_QUIET_S, patience)
        with suppress(TimeoutError):
            return self._pipes.next(quiet)
        with working(f"{self._choice.name}: waiting for {what}, limit {patience:g} s", quiet):
            return self._pipes.next(patience - quiet)

    def _stacks(self) -> list[Stack]:
        """Those that the engine's processes have written."""
        files = sorted((self._ours / TEMPORARY).glob(f"{STACKS}*"))
        found = [Stack.read(file, str(self.source.watched), str(self._ours / PACKAGE)) for file in files]
        for file in files:
            file.unlink()
        return [stack for stack in found if stack is not None]

    def _raise(self, answer: Answer, what: str) -> None:
        if "interrupted" in answer:
            raise KeyboardInterrupt
        if "raised" in answer:
            error: BaseException = unpacked(answer["raised"])
            raise error
        if "failed" in answer:
            raise self._failed(f"{what} failed: {answer['failed']}", answer["traceback"])

    def _failed(self, why: str, *below: str) -> EngineFailedError:
        """``why`` is one line. What the engine has printed follows, and the texts ``below``."""
        return EngineFailedError(
            "\n".join([f"{self._choice.name}: {why}", *self.output.last(), *filter(None, below)])
        )

"""The arguments that commands share, and what they stand for: a scenario, an engine, workers, the command as it was
typed.

Errors name the option that was typed, not the key that it stands for.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

import typer

from .errors import UsageError

if TYPE_CHECKING:
    from ..profiles.platform.engine_choice import EngineChoice
    from ..profiles.platform.resolve import Resolved
    from ..scenarios.schema import Kind

    Value = bool | int | float | str | None | Sequence[Any] | Mapping[str, Any]  # of a key of the scenario
    Texts = Sequence[str]
    NameOrPath = str | Path
    Switch = Literal["on", "off"] | bool
else:  # what Typer makes of such arguments
    Value, Texts, NameOrPath, Switch = str, list[str], str, Literal["on", "off"]

Format = Literal["table", "json", "md", "csv", "html", "svg"]
Form = Annotated[Format, typer.Option("--format", help="What to print on stdout.")]
# Of commands whose pages have no picture.
UndrawnForm = Annotated[
    Literal["table", "json", "md", "csv", "html"], typer.Option("--format", help="What to print on stdout.")
]
Name = Annotated[NameOrPath, typer.Argument(help="A scenario file, or the name of a shipped one.")]
Overrides = Annotated[
    Texts,
    typer.Option("--set", metavar="KEY=VALUE", help="Override any key, e.g. engine.overlap=false."),
]
Device = Annotated[
    Literal["auto", "cuda", "vgpu"], typer.Option("--device", help="auto takes CUDA where there is one.")
]
Relay = Annotated[
    str | None,
    typer.Option(help="A relay state instead of the scenario's, or one of your own: FILE.py:NAME."),
]
Faults = Annotated[
    Texts,
    typer.Option(
        "--fault", metavar="NAME", help="Break the relay as upstream had it broken; see list faults."
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="ENGINE",
        help="Run another project's scheduler: sglang:FOLDER, sglang:FOLDER@REF, sglang==VERSION.",
    ),
]


def _refuse_engine(name: str | None) -> None:
    if name is not None:
        raise UsageError(f"--engine: an engine is a side here, as in --a {name} --b {name},KEY=VALUE")


SideEngine = Annotated[str | None, typer.Option("--engine", hidden=True, callback=_refuse_engine)]
ENGINE_PYTHON = "SCHEDBENCH_ENGINE_PYTHON"
EnginePython = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help=f"The interpreter that has the engine's dependencies, by default {ENGINE_PYTHON} or this one.",
    ),
]
EngineWheels = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where the wheels of releases are, if not here.")
]
EngineTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=1,
        help="End an engine whose import or next step takes longer, by default 300 s.",
    ),
]
EveryTable = Annotated[bool, typer.Option("--all", help="Show every table, not only the first screenful.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Processes at a time; as many as processors without it.")
]
ExecutorName = Annotated[
    str | None,
    typer.Option(
        "--executor", metavar="dask:ADDRESS", help="Run on a dask cluster instead, e.g. dask:tcp://host:8786."
    ),
]
Budgets = Annotated[
    Texts,
    typer.Option("--expect", metavar="BUDGET", help="A budget, e.g. decode.steady.schedule.sync=0."),
]
Draws = Annotated[
    int,
    typer.Option(
        min=0,
        help="Ask emulated verdicts again under so many draws of the hardware's constants from their ranges.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Without the draws: --draws 0.")]
Meaning = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="FILE",
        help="The map of a capture's ranges: sglang, schedbench, or a file; else the one that fits (docs/captures.md).",
    ),
]
Tool = Annotated[
    str | None, typer.Option("--nsys", metavar="PATH", help="The nsys that exports .nsys-rep files.")
]
WantsPicture = Annotated[
    bool,
    typer.Option(
        "--picture", help="Draw a few representative steps: lanes, waits, idle time. svg and html always do."
    ),
]


python_call: ContextVar[str] = ContextVar("python_call", default="")  # that is answered, if Python made one


def settings(keys: Mapping[str, Value]) -> list[str]:
    """The keys as ``--set`` takes them; plain words without quotes, as they are typed."""
    word = re.compile(r"[A-Za-z_][\w.+-]*").fullmatch
    return [
        f"{key}={value if isinstance(value, str) and word(value) else json.dumps(value, default=str)}"
        for key, value in keys.items()
    ]


def resolved(
    name: str | Path,
    overrides: Sequence[str],
    *,
    relay: str | None = None,
    budgets: Sequence[str] = (),
    faults: Sequence[str] = (),
    engine: EngineChoice | None = None,
) -> Resolved:
    """Raises UsageError, ScenarioError, FaultError and RelayError."""
    from ..profiles.platform.names import refuse_mistyped, require_faults

    require_faults(faults)
    for budget in budgets:
        if "=" not in budget:
            raise UsageError(
                f"--expect: expected KIND.STREAM.COUNTER=N, e.g. decode.steady.schedule.sync=0, got {budget!r}"
            )
    for key, count in Counter(budget.partition("=")[0] for budget in budgets).items():
        if count > 1:
            raise UsageError(f"--expect: {count} budgets for {key}")
    typed = [*with_relay(relay, overrides), *(f"expect.{budget}" for budget in budgets)]
    with (
        typed_as("--relay", ["engine.relay"] * (relay is not None)),
        typed_as("--expect", ["expect"] * bool(budgets)),
    ):
        refuse_mistyped(str(name), typed)
        from ..profiles.platform.resolve import ask

        found = ask(str(name), typed)
    for budget in budgets:
        _refuse_unasked(budget, found)
    from ..profiles.check.faults import with_faults

    found = with_faults(found, faults)
    if engine is None:
        return found
    for option, given in (("--relay", relay), ("--fault", faults), ("engine.relays", len(found.relays) > 1)):
        if given:
            raise UsageError(f"{option} is about the relay of our own scheduler: leave it out with --engine")
    return replace(found, engine=engine)


class EngineOptions(NamedTuple):
    """The values of the options ``--engine-...``, which hold for every engine that a command names."""

    python: str | None = None
    wheels: Path | None = None
    timeout: float | None = None

    def choice(self, name: str) -> EngineChoice:
        """Raises EngineError."""
        from ..profiles.engines.names import parse_engine
        from ..profiles.engines.source import require_there
        from ..profiles.platform.engine_choice import TIMEOUT_S, EngineChoice

        engine = parse_engine(name)
        require_there(engine)
        return EngineChoice(
            str(engine),
            self.python or os.environ.get(ENGINE_PYTHON) or sys.executable,
            self.wheels or Path(),
            self.timeout or TIMEOUT_S,
        )

    def chosen(self, *names: str | None) -> list[EngineChoice | None]:
        """All engines of the command, of which None is not named. Raises UsageError, EngineError."""
        found = [None if name is None else self.choice(name) for name in names]
        self.require_all([choice.name for choice in found if choice is not None])
        return found

    def require_used(self, engines: Collection[str]) -> None:
        """Raises UsageError for an option that none of these engines, which are all of the command, uses."""
        from ..profiles.engines.names import parse_engine

        for name, given in self._asdict().items():
            if given is not None and not engines:
                raise UsageError(f"--engine-{name}: no engine is named")
        if self.wheels is not None and all(parse_engine(name).version is None for name in engines):
            raise UsageError(
                "--engine-wheels: only a release, NAME==VERSION, has a wheel: leave it out with"
                f" {' and '.join(engines)}"
            )

    def require_all(self, engines: Collection[str]) -> None:
        """As ``require_used``. Raises EngineError, too, where the source of one of them is not there."""
        from ..profiles.engines.names import parse_engine
        from ..profiles.engines.source import require_source

        self.require_used(engines)
        for name in engines:
            require_source(parse_engine(name), self.wheels or Path())


def use_workers(jobs: int | None, executor: str | None) -> None:
    """Raises UsageError."""
    from ..profiles.platform import pool

    kind, _, address = (executor or "").partition(":")
    if executor is not None and (kind != "dask" or not address):
        raise UsageError(f"--executor {executor}: expected dask:ADDRESS, e.g. dask:tcp://host:8786")
    if executor is not None and jobs is not None:
        raise UsageError(
            "--jobs counts processes of this machine, --executor names a cluster: give one of them"
        )
    pool.use_workers(pool.Workers(jobs, address))


def make_output_dir(path: Path | None) -> None:
    """Created before the run, so that a long run cannot fail for it at its end. Raises UsageError."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-dir {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"--output-dir {path}: not writable")


def numbers(option: str, text: str) -> list[int]:
    """Numbers with commas between. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    found = [int(word) if word.isdecimal() else 0 for word in words]
    if not all(found):
        raise UsageError(f"{option}: expected numbers from 1 on, e.g. 1,8, got {text!r}")
    return found


def with_relay(relay: str | None, overrides: Sequence[str]) -> list[str]:
    """``--relay`` as an override, and the others, which may change the switches of that relay. Raises UsageError."""
    if relay is None:
        return list(overrides)
    for text in overrides:
        if text.partition("=")[0].strip() in ("relay", "engine.relay"):
            raise UsageError(f"--relay {relay} and --set {text} both choose the relay: leave one of them out")
    return [f"engine.relay={relay}", *overrides]


def budget_kind(budget: str) -> str:
    """The kind of step that a budget of ``--expect`` is for."""
    from ..scenarios.overrides import split

    return str(split(f"expect.{budget.partition('=')[0]}")[1])


def _refuse_unasked(budget: str, found: Resolved) -> None:
    """Raises UsageError where a budget of ``--expect`` would not apply, because the scenario has a condition for the
    budget of that kind of step, and none of the relays meets it."""
    from ..scenarios.combinations import overlaps
    from ..scenarios.conditions import unmet

    scenario, kind = found.scenario, budget_kind(budget)
    when = scenario.expect[cast("Kind", kind)].when or {}
    reasons = [
        unmet(when, scenario.expanded(), relay=relay.state.name, overlap=overlaps(scenario))
        for relay in found.relays
    ]
    if all(reasons):
        raise UsageError(
            f"--expect {budget}: the scenario's budget of {kind} is {reasons[0]}; "
            f"--set 'expect.{kind}={{STREAM: {{COUNTER: N}}}}' replaces it"
        )


@contextmanager
def typed_as(option: str, keys: Collection[str]) -> Iterator[None]:
    """Problems of overrides with these keys, and of all overrides where ``""`` is among them, name the option that was
    typed."""
    from ..scenarios.problems import OPTION, ScenarioError, SourceLocation

    try:
        yield
    except ScenarioError as error:
        raise ScenarioError(
            problem._replace(place=SourceLocation(option))
            if problem.place == OPTION and problem.path.startswith(tuple(keys))
            else problem
            for problem in error.problems
        ) from None


class Stopwatch:
    """The ``run`` part of a document: when a command began, how it was typed, and how long it took."""

    def __init__(self) -> None:
        self._started = datetime.now(UTC)
        self._began = time.perf_counter()

    def run(self, *, cancelled: bool = False) -> dict[str, Any]:
        return {
            "id": uuid.uuid4().hex,
            "command": command_line(),
            "started": self._started.isoformat(timespec="seconds"),
            "wall_s": time.perf_counter() - self._began,
            "cancelled": cancelled,
        }


def command_line() -> str:
    """The command as it was typed, or the call from Python."""
    return python_call.get() or shlex.join(["schedbench", *sys.argv[1:]])

"""Checks every known fault: all checks must pass without it, and one must fail with it, without its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from pydantic import TypeAdapter

from ...scenarios.combinations import overlaps
from ...sched.relay.faults import awaited_faults
from ..platform.pool import pool
from ..platform.resolve import Resolved, ask
from ..record.environment import environment, tool
from .conclusion import conclusion
from .examine import Examiner
from .faults import FaultScenario, fault_scenarios, with_faults
from .one_batch import examine_one_batch
from .report import SCHEMA_VERSION, Check, Document


@dataclass(frozen=True, slots=True)
class FaultVerdict:
    """The checks of a question without the fault; and with it, the cheapest first, up to the first that fails."""

    name: str
    about: str
    reference: str
    state: str
    loop: str
    sound: tuple[Check, ...]
    broken: tuple[Check, ...]

    @property
    def clean(self) -> bool:
        return not _failed(self.sound)

    @property
    def by(self) -> tuple[Check, ...]:
        return _failed(self.broken)

    @property
    def passed(self) -> bool:
        return self.clean and bool(self.by)


_VERDICT: Final = TypeAdapter(FaultVerdict)


class _Task(NamedTuple):
    """A question as names and overrides, which can be pickled; policies cannot."""

    scenario: str
    overrides: tuple[str, ...]
    fault: str | None
    onebatch: bool


def catch_all(adversaries: Sequence[int], notice: Callable[[str], None]) -> list[FaultVerdict]:
    """Verdicts in upstream's order, with one worker process per processor. The checks do not get the faults' names.
    ``notice`` is called after each fault."""
    chosen = fault_scenarios()
    tasks = list(dict.fromkeys(task for scenario in chosen.values() for task in _tasks(scenario)))
    checks: dict[_Task, tuple[Check, ...]] = {}
    found: list[FaultVerdict] = []
    with pool(len(tasks)) as each:
        done = zip(tasks, each(partial(_checked, tuple(adversaries)), tasks), strict=True)
        for scenario in chosen.values():
            while not checks.keys() >= {*_tasks(scenario)}:
                task, verdicts = next(done)
                checks[task] = verdicts
            found.append(_verdict(scenario, *(checks[task] for task in _tasks(scenario))))
            notice(f"{len(found)} of {len(chosen)}: {_words(found[-1])}")
    return found


def _words(caught: FaultVerdict) -> str:
    by = ", ".join(check.name for check in caught.by) or "NOTHING"
    return f"{caught.name} caught by {by}{'' if caught.clean else '; FAILED without it'}"


def _tasks(scenario: FaultScenario) -> tuple[_Task, _Task]:
    """Without the fault, and with it."""
    sound = _Task(scenario.scenario, scenario.overrides, None, scenario.onebatch)
    return sound, sound._replace(fault=scenario.fault.name)


def _checked(adversaries: Sequence[int], task: _Task) -> tuple[Check, ...]:
    question = ask(task.scenario, task.overrides)
    if task.fault is not None:
        question = with_faults(question, [task.fault], onebatch=task.onebatch)
    [relay] = question.relays
    if task.onebatch:
        return examine_one_batch(question, relay).checks
    checks = []
    for check in Examiner(question, adversaries).checks(relay):
        checks.append(check)
        if task.fault is not None and check.verdict == "failed":
            break
    return tuple(checks)


def _verdict(scenario: FaultScenario, sound: tuple[Check, ...], broken: tuple[Check, ...]) -> FaultVerdict:
    question, fault = scenario.sound(), scenario.fault
    return FaultVerdict(
        name=fault.name,
        about=fault.about,
        reference=fault.reference,
        state=question.relays[0].state.name,
        loop=_loop(scenario, question),
        sound=sound,
        broken=broken,
    )


def _loop(scenario: FaultScenario, question: Resolved) -> str:
    if scenario.onebatch:
        return "onebatch"
    return "overlapped" if overlaps(question.scenario) else "serial"


def faults_document(found: Sequence[FaultVerdict], *, run: Document) -> Document:
    content = {
        "schema_version": SCHEMA_VERSION,
        "tool": tool().model_dump(mode="json"),
        "run": run,
        "environment": environment(),
        "passed": all(caught.passed for caught in found),
        "faults": [_part(caught) for caught in found],
        "awaited": [
            {"name": fault.name, "reference": fault.reference, "feature": fault.feature}
            for fault in awaited_faults().values()
        ],
    }
    return content | {"conclusion": conclusion(content)}


def _part(caught: FaultVerdict) -> Document:
    part: Document = _VERDICT.dump_python(caught, mode="json")
    return {**part, "clean": caught.clean, "caught_by": [check.name for check in caught.by]}


def _failed(checks: Sequence[Check]) -> tuple[Check, ...]:
    return tuple(check for check in checks if check.verdict == "failed")

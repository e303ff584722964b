"""Every known bug, off and on: all checks pass without it, and some check fails with it, not knowing its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from ...scenarios.combinations import overlaps
from ...sched.relay.faults import awaited_faults
from ..environment import environment, tool
from ..resolve import Resolved
from .document import SCHEMA_VERSION, Document, check_part
from .examine import Examiner
from .probes import probes
from .verdicts import Check


@dataclass(frozen=True, slots=True)
class Caught:
    """What the checks say of a question without the fault, and with it."""

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


def catch_all(adversaries: Sequence[int], notice: Callable[[str], None]) -> list[Caught]:
    """In upstream's order, as many at a time as there are processors."""
    chosen = list(probes())
    found = []
    workers = min(len(os.sched_getaffinity(0)), len(chosen))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for caught in pool.map(partial(catch, adversaries=tuple(adversaries)), chosen):
            found.append(caught)
            notice(f"{len(found)} of {len(chosen)}: {caught.name}")
    return found


def catch(name: str, adversaries: Sequence[int]) -> Caught:
    """One fault, by its name: the checks are told nothing of it."""
    probe = probes()[name]
    sound, fault = probe.sound(), probe.fault
    return Caught(
        name=name,
        about=fault.about,
        reference=fault.reference,
        state=sound.relays[0].state.name,
        loop="overlapped" if overlaps(sound.scenario) else "serial",
        sound=_checks(sound, adversaries),
        broken=_checks(probe.broken(), adversaries),
    )


def faults_document(found: Sequence[Caught], *, run: Document) -> Document:
    return {
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


def _part(caught: Caught) -> Document:
    return {
        "name": caught.name,
        "about": caught.about,
        "reference": caught.reference,
        "state": caught.state,
        "loop": caught.loop,
        "clean": caught.clean,
        "caught_by": [check.name for check in caught.by],
        "sound": [check_part(check) for check in caught.sound],
        "broken": [check_part(check) for check in caught.broken],
    }


def _checks(question: Resolved, adversaries: Sequence[int]) -> tuple[Check, ...]:
    [relay] = question.relays
    return Examiner(question, adversaries).examine(relay).checks


def _failed(checks: Sequence[Check]) -> tuple[Check, ...]:
    return tuple(check for check in checks if check.verdict == "failed")

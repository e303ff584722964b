"""The question that a side runs, and the sample that a run gives. Imports no torch until a question is resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...scenarios.loader import loads, opened
from ...scenarios.schema import Scenario
from ..platform.engine_choice import EngineChoice
from ..record.result import Result
from .fingerprint import StepPrint

if TYPE_CHECKING:
    from ..platform.resolve import Resolved
    from ..run.machines import DeviceChoice


@dataclass(frozen=True, slots=True)
class Question:
    """The text of a scenario, so that every checkout runs the same, and the overrides of both sides."""

    content: str
    file: str
    folder: str
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(cls, path_or_name: str, overrides: Sequence[str] = ()) -> Question:
        """Raises ScenarioError."""
        content, file, folder = opened(path_or_name)
        text = content.decode("utf-8", "surrogateescape")
        return cls(text, file, str(folder.resolve()), tuple(overrides))

    def scenario(self, overrides: Sequence[str] = ()) -> Scenario:
        """Raises ScenarioError."""
        return loads(
            self.content.encode("utf-8", "surrogateescape"),
            file=self.file,
            folder=Path(self.folder),
            overrides=(*self.overrides, *overrides),
        )


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """One run of the question with a side's overrides on a device."""

    overrides: tuple[str, ...] = ()
    seed: int | None = None  # the scenario's own
    device: DeviceChoice = "auto"
    command: str = ""
    engine: EngineChoice | None = None
    record: str = ""  # a folder that gets the timelines


class Sample(NamedTuple):
    """A result, what each step did, and the step that made each token; the latter two where they are known."""

    result: Result
    steps: tuple[StepPrint, ...] | None = None
    token_steps: Mapping[str, Sequence[int]] | None = None

    @property
    def seed(self) -> int:
        """The seed of the workload."""
        return self.result.scenario.seed or 0

    @property
    def exact(self) -> bool:
        """Whether the times of the run repeat exactly."""
        return self.result.labels.exact

    def document(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        return {
            "result": self.result.document(),
            "steps": None if self.steps is None else [list(step) for step in self.steps],
            "token_steps": None
            if self.token_steps is None
            else {request: list(steps) for request, steps in self.token_steps.items()},
        }

    @classmethod
    def of(cls, document: Mapping[str, Any], *, name: str) -> Sample:
        """Raises ResultError when the result is of a version that is not understood."""
        steps = document.get("steps")
        return cls(
            Result.from_document(document["result"], name=name),
            None if steps is None else tuple(StepPrint(*step) for step in steps),
            document.get("token_steps"),
        )


def resolved_for(question: Question, order: TrialRequest) -> Resolved:
    """Raises ScenarioError, also where the scenario names several relays."""
    from ..platform.resolve import resolve

    seed = () if order.seed is None else (f"measure.seed={order.seed}",)
    scenario = question.scenario((*order.overrides, *seed))
    resolved = resolve(scenario)
    if len(resolved.relays) != 1:
        raise scenario.source.refuse(("engine", "relays"), "a side has one relay: give it as relay=NAME")
    return replace(resolved, engine=order.engine)

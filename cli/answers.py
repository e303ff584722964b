"""What the Python interface returns: documents as the command line writes them, with its pages."""

from __future__ import annotations

import html
import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from . import check_page, compare_page, result_page
from .errors import UsageError
from .html_page import to_html
from .outcome import csv_of
from .page import WIDE, Document, Page, to_csv

if TYPE_CHECKING:
    from ..profiles.measure.budget import RunOutcome
    from ..profiles.record.result import Result

Library = Literal["pandas", "polars"]
_LIBRARIES: Final = ("pandas", "polars")
_COMPARED: Final = ("unit", "direction", "a", "b", "delta_pct", "ci_low", "ci_high", "verdict")
_EMBEDDED: Final = '<iframe srcdoc="{}" style="width: 100%; height: 40em; border: 0"></iframe>'


class Answer(ABC):
    """A versioned document, as ``--format json`` prints it, and the page that shows it."""

    @property
    @abstractmethod
    def document(self) -> Document: ...

    @property
    def conclusion(self) -> str:
        """The first sentence of the page."""
        return str(self.document.get("conclusion", ""))

    @property
    @abstractmethod
    def passed(self) -> bool:
        """Whether the command would exit with 0."""

    @abstractmethod
    def page(self, width: int = WIDE) -> Page: ...

    @abstractmethod
    def to_csv(self) -> str:
        """The figures, as ``frame`` has them."""

    def to_json(self) -> str:
        from ..profiles.record.result import canonical

        return canonical(self.document)

    def save(self, path: str | Path) -> None:
        """Write the document into a file, which ``load`` reads."""
        from ..profiles.record.files import write_whole

        write_whole(Path(path), self.to_json())

    def frame(self, library: Library | None = None) -> Any:
        """The figures as a data frame of ``library``; of the first that is installed, if it is None. Raises UsageError
        where none is."""
        chosen = library or next((name for name in _LIBRARIES if find_spec(name)), None)
        if chosen is None:
            raise UsageError(f"frame: {' or '.join(_LIBRARIES)} has to be installed")
        return import_module(chosen).read_csv(io.StringIO(self.to_csv()))

    def _repr_html_(self) -> str:
        """The page for notebooks, in a frame that keeps its styles to itself."""
        return _EMBEDDED.format(html.escape(to_html(self.page(), charts=False)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.conclusion}>"

    def __str__(self) -> str:
        return self.conclusion


@dataclass(frozen=True, eq=False, repr=False)
class RunAnswer(Answer):
    """One run. ``result`` is the typed form of its document."""

    outcome: RunOutcome

    @classmethod
    def of(cls, result: Result) -> RunAnswer:
        """A stored result, held against its scenario's budget."""
        from ..profiles.measure.budget import RunOutcome, asked, breaches

        return cls(RunOutcome(result, tuple(breaches(asked(result).budget, result)), ()))

    @property
    def result(self) -> Result:
        return self.outcome.result

    @property
    def document(self) -> Document:
        return self.result.document()

    @property
    def passed(self) -> bool:
        from .run import exit_code

        return exit_code(self.outcome) == 0

    def page(self, width: int = WIDE) -> Page:
        return result_page.page(self.document, width, breaches=self.outcome.breaches)

    def to_csv(self) -> str:
        return csv_of([self.document])

    def assert_budget(self, kind: str, **streams: Mapping[str, int]) -> None:
        """Raises AssertionError where a step of the kind did more on a stream than it may, with the source lines, and
        where no step was of that kind. ``schedule={"sync": 0}``: no step may sync on the schedule stream. Raises
        ScenarioError for a kind, stream or counter that does not exist."""
        from ..profiles.measure.budget import breaches, given, untested

        budget = given(kind, streams)
        if untested(budget, self.result):
            raise AssertionError(f"no step was of kind {kind}; its budget is untested")
        if broken := breaches(budget, self.result):
            raise AssertionError("\n".join(line.plain for line in result_page.budget(broken, width=WIDE)))

    def assert_same_tokens(self, other: RunAnswer) -> None:
        """Raises AssertionError where the runs have different tokens, with the first difference, and where one of them
        has no meaningful tokens."""
        from ..profiles.judge.conclusion import divergence_text
        from ..profiles.judge.divergence import first_divergence
        from ..profiles.record.result import Abstained

        for outputs in (self.result.outputs, other.result.outputs):
            if isinstance(outputs, Abstained):
                raise AssertionError(f"tokens cannot be compared: {outputs.abstained}")
        found = first_divergence(self.result, other.result, seed=self.result.scenario.seed or 0)
        if found is not None:
            raise AssertionError(f"tokens differ, {divergence_text(found)}")


@dataclass(frozen=True, eq=False, repr=False)
class ComparisonAnswer(Answer):
    """Two sides and the verdict."""

    content: Document

    @property
    def document(self) -> Document:
        return self.content

    @property
    def verdict(self) -> str:
        """better, worse, trade-off, no change or inconclusive."""
        return str(self.content["comparison"]["verdict"])

    @property
    def passed(self) -> bool:
        """Whether all gates passed, and the tokens are equal unless others were allowed."""
        from ..profiles.judge.verdict import Reason

        found = self.content["comparison"]
        gates = all(gate["outcome"] == "passed" for gate in found["gates"])
        return gates and Reason.OUTPUT_DIFF not in found["reasons"]

    def page(self, width: int = WIDE) -> Page:
        return compare_page.page(self.content, width)

    def to_csv(self) -> str:
        metrics = self.content["comparison"]["metrics"]
        return to_csv(
            ("metric", *_COMPARED), ([name, *map(row.get, _COMPARED)] for name, row in metrics.items())
        )


@dataclass(frozen=True, eq=False, repr=False)
class CheckAnswer(Answer):
    """The checks of a scenario."""

    content: Document

    @property
    def document(self) -> Document:
        return self.content

    @property
    def passed(self) -> bool:
        return bool(self.content["passed"])

    def page(self, width: int = WIDE) -> Page:  # noqa: ARG002
        return check_page.page(self.content)

    def to_csv(self) -> str:
        return check_page.as_csv(self.content)

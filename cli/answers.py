"""What the Python interface returns: documents as the command line writes them, with its pages."""

from __future__ import annotations

import html
import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, get_args

from rich.errors import NotRenderableError

from . import check_page, compare_page, ladder_page, onebatch, result_page, result_tables, sweep_page
from .arguments import Format
from .errors import UsageError
from .html_page import to_html
from .page import UNLIMITED, WIDE, Document, Drawn, Page, show, tables_csv, with_picture
from .source_lines import LINES, hazard_lines
from .text import echo

if TYPE_CHECKING:
    from ..profiles.captures.files import Reader
    from ..profiles.measure.budget import Breach
    from ..profiles.record.result import Result

Library = Literal["pandas", "polars"]
_EMBEDDED: Final = '<iframe srcdoc="{}" style="width: 100%; height: 40em; border: 0"></iframe>'


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Answer(ABC):
    """A versioned document, as ``--format json`` prints it, and the page that shows it. ``remarks``: what its command
    prints on stderr. ``unused``: the options that had no effect, and why. ``exit_code``: that of its command; None of a
    stored answer."""

    picture: Drawn = ()
    remarks: Sequence[str] = ()
    unused: Sequence[tuple[str, str]] = ()
    exit_code: int | None = None
    file: ClassVar[str] = ""  # that ``--output-dir`` keeps

    @property
    @abstractmethod
    def document(self) -> Document: ...

    @property
    def conclusion(self) -> str:
        """The first sentence of the page."""
        return str(self.document.get("conclusion", ""))

    @property
    def passed(self) -> bool:
        """Whether the command would exit with 0."""
        return self.is_good if self.exit_code is None else self.exit_code == 0

    @property
    @abstractmethod
    def is_good(self) -> bool:
        """Whether the command would exit with 0, as far as the document says."""

    @abstractmethod
    def page(self, width: int = WIDE, *, few: bool = False) -> Page:
        """``few``: only so many rows of a table as the first screenful has."""

    def to_csv(self) -> str:
        """The figures, as ``frame`` has them."""
        return tables_csv(self.page(UNLIMITED))

    def show(self, form: Format, *, every_table: bool = False) -> None:
        """Print the answer on stdout, as its command does."""
        few = form == "table" and not every_table
        show(
            form,
            lambda width: with_picture(self.page(width, few=few), self.picture),
            json=self.to_json,
            csv=self.to_csv,
            every_table=every_table,
        )
        for remark in self.remarks:
            echo(remark, err=True)

    def to_json(self) -> str:
        from ..profiles.record.result import canonical

        return canonical(self.document)

    def save(self, path: str | Path) -> None:
        """Write the document into a file, which ``load`` reads."""
        from ..profiles.record.files import write_whole

        write_whole(Path(path), self.to_json())

    def kept(self, folder: Path | None) -> Self:
        """The answer, whose document is in the folder, if there is one."""
        if folder is not None:
            self.save(folder / self.file)
        return self

    def frame(self, library: Library | None = None) -> Any:
        """The figures as a data frame of ``library``; of the first that is installed, if it is None. Raises UsageError
        where none is."""
        chosen = library or next((name for name in get_args(Library) if find_spec(name)), None)
        if chosen is None:
            raise UsageError(f"frame: {' or '.join(get_args(Library))} has to be installed")
        return import_module(chosen).read_csv(io.StringIO(self.to_csv()))

    def _repr_html_(self) -> str:
        """The page for notebooks, in a frame that keeps its styles to itself."""
        page = with_picture(self.page(), self.picture)
        return _EMBEDDED.format(html.escape(to_html(page, charts=False)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.conclusion}>"

    def __str__(self) -> str:
        return self.conclusion


@dataclass(frozen=True, eq=False, repr=False)
class RunAnswer(Answer):
    """One run. ``result`` is the typed form of its document."""

    result: Result
    file: ClassVar = "result.json"

    @property
    def document(self) -> Document:
        return self.result.document()

    @property
    def is_good(self) -> bool:
        from .run import exit_code

        return exit_code(self.result) == 0

    @property
    def _broken(self) -> list[Breach]:
        """What the run broke of its scenario's budget."""
        from ..profiles.measure.budget import asked, breaches

        return breaches(asked(self.result).budget, self.result)

    def page(self, width: int = WIDE, *, few: bool = False) -> Page:
        lines = result_page.FEW if few else LINES
        return result_page.page(self.document, width, breaches=self._broken, lines=lines)

    def show(self, form: Format, *, every_table: bool = False) -> None:
        """Broken budgets and hazards also go to stderr where stdout is a document."""
        from ..profiles.measure.budget import asked, untested, untested_text

        super().show(form, every_table=every_table)
        if form != "table" and (broken := self._broken):
            for line in result_tables.budget(broken):
                echo(line.plain, err=True)
        if form != "table" and self.result.undeclared:
            echo(hazard_lines(self.document["hazards"]), err=True)
        if self.exit_code is not None:  # not of a stored answer
            for kind in untested(asked(self.result).budget, self.result):
                echo(f"expect: {untested_text(kind, self.result)}", err=True)

    def to_csv(self) -> str:
        return result_page.csv_of([self.document])

    def assert_budget(self, kind: str, **streams: Mapping[str, int]) -> None:
        """Raises AssertionError where a step of the kind did more on a stream than it may, with the source lines, and
        where no step was of that kind. ``schedule={"sync": 0}``: no step may sync on the schedule stream. Raises
        ScenarioError for a kind, stream or counter that does not exist, and ValueError where nothing is bounded."""
        from ..profiles.measure.budget import breaches, given, untested, untested_text

        budget = given(kind, streams)
        if not streams or not all(streams.values()):
            raise ValueError("expected a bound for each stream, at least one, such as schedule={'sync': 0}")
        if untested(budget, self.result):
            raise AssertionError(untested_text(kind, self.result))
        if broken := breaches(budget, self.result):
            raise AssertionError("\n".join(line.plain for line in result_tables.budget(broken)))

    def assert_same_tokens(self, other: RunAnswer) -> None:
        """Raises AssertionError where the runs have different tokens, with the first difference, and where they cannot
        be compared: one of them has no meaningful tokens, or they answer different requests."""
        from ..profiles.judge.conclusion import divergence_text
        from ..profiles.judge.likeness import first_divergence, unlike_questions
        from ..profiles.record.result import Abstained

        for outputs in (self.result.outputs, other.result.outputs):
            if isinstance(outputs, Abstained):
                raise AssertionError(f"tokens cannot be compared: {outputs.abstained}")
        sides = (answer.result.scenario.expanded for answer in (self, other))
        for difference in unlike_questions(*sides):
            if difference.key.startswith(("model.", "workload.")):
                raise AssertionError(f"tokens cannot be compared: {difference}")
        found = first_divergence(self.result, other.result, seed=self.result.scenario.seed or 0)
        if found is not None:
            raise AssertionError(divergence_text(found))


class WorthAnswer(RunAnswer):
    """One run, with what its lines and host phases are worth, which is all that its page shows. A run that was
    interrupted or broke off before that was asked has the page of a run."""

    def page(self, width: int = WIDE, *, few: bool = False) -> Page:
        if "worth" not in self.document:
            return super().page(width, few=few)
        return result_page.worth_page_of(self.document, few=few)

    def to_csv(self) -> str:
        return result_page.csv_of([self.document], only="worth.")


@dataclass(frozen=True, eq=False, repr=False)
class DocumentAnswer(Answer):
    """An answer that is its document. ``keys`` are those by which it is known, of which no other kind of document has
    one. ``pages`` is the module that has its ``page`` and ``as_csv``."""

    content: Document
    keys: ClassVar[Sequence[str]]
    pages: ClassVar[ModuleType]

    @property
    def document(self) -> Document:
        return self.content

    def page(self, width: int = WIDE, *, few: bool = False) -> Page:
        found: Page = self.pages.page(self.content, width, few=few)
        return found

    def to_csv(self) -> str:
        figures: str = self.pages.as_csv(self.content)
        return figures


class ComparisonAnswer(DocumentAnswer):
    """Two sides and the verdict."""

    keys: ClassVar = ("comparison",)
    pages: ClassVar = compare_page
    file: ClassVar = "compare.json"

    @property
    def verdict(self) -> str:
        """better, worse, trade-off, no change or inconclusive."""
        return str(self.content["comparison"]["verdict"])

    @property
    def is_good(self) -> bool:
        """Whether all gates passed, the tokens are equal unless others were allowed, B has no new hazard, and there is
        a verdict if ``exit_on_inconclusive`` asks for one."""
        return bool(self.content["comparison"]["passed"])


class CasesAnswer(DocumentAnswer):
    """The comparisons of the library of cases."""

    keys: ClassVar = ("cases",)
    file: ClassVar = "cases.json"

    def page(self, width: int = WIDE, *, few: bool = False) -> Page:  # noqa: ARG002
        return compare_page.cases_page(self.content)

    def to_csv(self) -> str:
        return Answer.to_csv(self)

    @property
    def is_good(self) -> bool:
        return all(ComparisonAnswer(case).passed for case in self.content["cases"].values())


class CheckAnswer(DocumentAnswer):
    """The checks of a scenario."""

    keys: ClassVar = ("reports", "faults")
    pages: ClassVar = check_page
    file: ClassVar = "check.json"

    @property
    def is_good(self) -> bool:
        return bool(self.content["passed"])


class SweepAnswer(DocumentAnswer):
    """A grid of cells, and where the better side changes."""

    keys: ClassVar = ("cells",)
    pages: ClassVar = sweep_page
    file: ClassVar = "sweep.json"

    @property
    def is_good(self) -> bool:
        return not self.content["run"]["cancelled"]


class LadderAnswer(DocumentAnswer):
    """A scenario with each of several relays."""

    keys: ClassVar = ("rungs",)
    pages: ClassVar = ladder_page
    file: ClassVar = "ladder.json"

    @property
    def runs(self) -> list[RunAnswer]:
        from ..profiles.record.result import Result

        return [RunAnswer(Result.from_document(rung["result"])) for rung in self.content["rungs"]]

    @property
    def is_good(self) -> bool:
        return self.content["ladder"]["tokens_agree"] and all(run.passed for run in self.runs)


class BatchesAnswer(DocumentAnswer):
    """The latencies of static batches."""

    keys: ClassVar = ("points",)
    pages: ClassVar = onebatch
    file: ClassVar = "onebatch.json"

    @property
    def is_good(self) -> bool:
        return not all(point["refused"] for point in self.content["points"])


_KINDS: Final = {key: kind for kind in DocumentAnswer.__subclasses__() for key in kind.keys}
_FILES: Final = (RunAnswer.file, *dict.fromkeys(kind.file for kind in _KINDS.values() if kind.file))


def stored(path: Path, reader: Reader) -> Answer:
    """The answer in a stored document, in the folder that a command kept one in, or in a capture. Raises ResultError,
    CaptureError, MapError."""
    from ..profiles.captures.capture import CaptureFileError, read_json
    from ..profiles.record.result import SCHEMA_VERSION, ResultError

    if path.is_dir():
        there = [name for name in _FILES if (path / name).is_file()]
        if there[1:]:
            echo(f"schedbench: {path}: shown is {there[0]}, not {', '.join(there[1:])}", err=True)
        path /= there[0] if there else ""
    document = None
    with suppress(OSError, CaptureFileError):  # which the reader reports
        document = read_json(path) if path.suffix == ".json" and path.is_file() else None
    known = document if isinstance(document, dict) else {}
    kind = next((_KINDS[key] for key in _KINDS if key in known), None)
    answer = RunAnswer(reader.read(path)) if kind is None else kind(known)
    version = str(known.get("schema_version", SCHEMA_VERSION))
    try:
        if not (version.startswith("1.") and isinstance(answer.document["conclusion"], str)):
            raise ValueError
        _ = answer.page(), answer.page(few=True), answer.to_csv(), answer.is_good
    except (LookupError, TypeError, ValueError, AttributeError, NotRenderableError):
        raise ResultError(
            f"{path}: its schema_version, {version}, is not understood, or it is not whole"
        ) from None
    return answer

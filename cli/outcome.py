"""Results as CSV, and what ``worth`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..profiles.record.conclusion import engine_name
from . import result_page
from .arguments import Format
from .page import Document, to_csv
from .page import show as show_page

if TYPE_CHECKING:
    from ..profiles.measure.budget import RunOutcome

_RUN = ("scenario", "relay", "label", "host", "digest")
_RANK = ("rank", "role")  # empty in rows of the whole run
_FIGURES = (
    *("metric", "unit", "value", "p50", "p90", "p95", "p99"),
    *("median", "mean", "max", "steps_with", "abstained"),
    *("low", "high"),  # under draws of the hardware's constants
)


def show_worth(outcome: RunOutcome, form: Format, *, every_line: bool) -> None:
    """Print what lines and phases are worth; as JSON the whole result."""
    document = outcome.result.document()
    show_page(
        form,
        lambda width: result_page.worth_page_of(document, width, few=form == "table" and not every_line),
        json=outcome.result.to_json,
        csv=lambda: csv_of([document], only="worth."),
    )


def csv_of(documents: Sequence[Document], *, only: str = "") -> str:
    """One row per metric, and per count of a kind and stream, of the run and then of each rank. Each row names its
    run, so that files of many runs can be joined. ``value`` is a distribution's mean and a count's median."""
    header = (*_RUN, *_RANK, *_FIGURES)
    rows = (row for document in documents for row in _rows(document) if row["metric"].startswith(only))
    return to_csv(header, ([row.get(name, "") for name in header] for row in rows))


def _rows(document: Document) -> Iterator[dict[str, str]]:
    run = dict(zip(_RUN, _which(document), strict=True))
    for part in (document, *document.get("ranks", ())):
        rank = {} if part is document else {"rank": part["name"], "role": part["role"]}
        for row in (*_metric_rows(part), *_count_rows(part), *_worth_rows(part)):
            yield run | rank | row
    for kind, reason in result_page.not_asked(document).items():
        yield run | {"metric": f"expect.{kind}", "abstained": f"not asked: {reason}"}


def _which(document: Document) -> tuple[str, ...]:
    label, scenario = document["labels"], document["scenario"]["expanded"]
    return (
        str(scenario.get("name", "")),
        engine_name(label["engine"]) if label.get("engine") else document["relay"]["state"],
        "emulated" if label["emulated"] else "measured",
        label["host"],
        document["outputs"].get("digest", ""),
    )


def _metric_rows(part: Document) -> Iterator[dict[str, str]]:
    ranges = part.get("ranges", {}).get("metrics", {})
    for name, metric in part["metrics"].items():
        values, extent = metric.get("values"), ranges.get(name, {})
        figures = {figure: metric.get(figure) for figure in ("p50", "p90", "p95", "p99", "max")}
        yield {
            "metric": name,
            "unit": metric.get("unit", ""),
            "value": repr(sum(values) / len(values)) if values else "",
            "abstained": metric.get("abstained", ""),
            **{figure: repr(value) for figure, value in figures.items() if isinstance(value, float | int)},
            **{end: repr(extent[end]) for end in ("low", "high") if extent},
        }


def _count_rows(part: Document) -> Iterator[dict[str, str]]:
    for kind, streams in part["per_step"].items():
        for stream, counters in streams.items():
            if stream != "steps":
                for counter, tally in counters.items():
                    figures = {figure: repr(value) for figure, value in tally.items()}
                    median = {"unit": "median/step", "value": figures["median"]}
                    yield {"metric": f"{kind}.{stream}.{counter}", **median, **figures}


def _worth_rows(part: Document) -> Iterator[dict[str, str]]:
    """One row per figure that a counterfactual run changes: ``worth.PLACE.CHANGE.FIGURE``."""
    units = {"output_throughput_pct": "%", "ttft_ms": "ms", "tpot_ms": "ms", "idle_us_per_step": "us"}
    for row in part.get("worth", {}).get("rows", ()):
        site = row["site"]
        place = f"{site['file']}:{site['line']}" if site else f"phase {row['phase']}"
        for figure, unit in units.items():
            value = row[figure]
            yield {
                "metric": f"worth.{place}.{row['change']}.{figure}",
                "unit": unit,
                "value": "" if value is None else repr(value),
                "abstained": row["abstained"],
            }

"""The page of a ladder: one row per relay, so that a column shows what each relay changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from ..profiles.record.conclusion import metric_value, numbers
from ..profiles.record.definitions import IDLE_NAMES
from ..profiles.sweeps.conclusion import rung_labels
from .charts import Chart
from .page import WIDE, Document, Lines, Page, framed, to_csv
from .result_tables import FIRST_RANK
from .source_lines import source_line
from .text import MISSING, number, percent, whole

_KINDS = ("decode.steady", "prefill", "mixed")
_STREAMS = ("schedule", "forward")
_COUNTERS = ("h2d", "d2h", "sync", "kernel")
_EXPOSED = ("exposed_stall_us_per_step", "exposed_host_us_per_step")
_DIGITS = 6  # of a digest
_LEAST = 0.1  # percent; lines that are worth less are not shown
_FORWARD = "forward stream and tokens"
_Figures = Mapping[str, Callable[[Document], str]]
_ON_SCHEDULE: _Figures = {
    ">exposed\nµs/step": lambda result: number(_exposed(result)),
    ">idle\nµs/step": lambda result: number(metric_value(result, "forward_idle_us_per_step")),
    ">output\ntokens/s": lambda result: number(metric_value(result, "output_throughput")),
}
_ON_FORWARD: _Figures = {
    ">occupied\n%": lambda result: percent(metric_value(result, "forward_occupancy")),
    "tokens": lambda result: str(result["outputs"].get("digest", MISSING)[:_DIGITS]),
}


def page(ladder: Document, width: int = WIDE, *, few: bool = False) -> Page:  # noqa: ARG001
    """The first screenful has the schedule stream; what the relays do on the forward stream differs little."""
    return Page(
        f"run {ladder['scenario']['expanded']['name']}",
        [
            Lines([Text(line) for line in setting(ladder).splitlines()]),
            table(ladder, "the ladder", "schedule", _ON_SCHEDULE),
            *_worth(ladder),
            table(ladder, _FORWARD, "forward", _ON_FORWARD),
            *charts(ladder),
        ],
        ladder["conclusion"],
        rest=[_FORWARD],
    )


def as_csv(ladder: Document) -> str:
    """One row per rung; counts are medians per step."""
    places = [
        (kind, stream, counter) for kind in _kinds(ladder) for stream in _STREAMS for counter in _COUNTERS
    ]
    metrics = (*_EXPOSED, "forward_idle_us_per_step", "forward_occupancy", "output_throughput")
    rows = []
    for _, result in _results(ladder):
        switches = " ".join(f"{name}={value}" for name, value in result["relay"]["switches"].items())
        counts = [_median(result, *place) for place in places]
        values = [metric_value(result, name) for name in metrics]
        last = [result["outputs"].get("digest"), numbers(result["labels"])]
        rows.append([result["relay"]["state"], switches, *counts, *values, *last])
    return to_csv(["relay", "switches", *map(".".join, places), *metrics, "digest", "label"], rows)


def setting(ladder: Document) -> str:
    scenario, first = ladder["scenario"]["expanded"], ladder["rungs"][0]["result"]
    kind = numbers(first["labels"], first["hardware"]["name"])
    title = f"{scenario['name']}  {scenario.get('about', '')}".rstrip()
    return f"{title}\n{kind} · {len(first['requests'])} requests each"


def table(ladder: Document, title: str, stream: str, figures: _Figures) -> Table:
    """Of each rung the counts on the stream, and figures. Holds 80 columns."""
    kinds = _kinds(ladder)
    caption = f"{' / '.join(_COUNTERS)}: median per step, {stream} stream"
    caption += f"; {FIRST_RANK}" * any(result.get("ranks", ()) for _, result in _results(ladder))
    headings = ("relay, barrier", *(f">{kind}".replace(".", "\n") for kind in kinds), *figures)
    found = framed(title, *headings, caption=caption, no_wrap=True, tight=True)
    found.columns[0].no_wrap = False
    for label, result in _results(ladder):
        counts = [
            "/".join(number(whole(_median(result, kind, stream, counter))) for counter in _COUNTERS)
            if kind in result["per_step"]
            else MISSING
            for kind in kinds
        ]
        found.add_row(label, *counts, *(figure(result) for figure in figures.values()))
    return found


def _worth(ladder: Document) -> Iterator[Table]:
    """The lines in which a rung differs from the one before it, by what they account for, where the run computed it."""
    rows = [
        (label, line)
        for label, rung in zip(rung_labels(ladder), ladder["rungs"], strict=True)
        for line in _places(rung.get("lines", ()))
    ]
    if rows:
        caption = "of the rung's throughput against that of the rung before it, each line alone"
        found = framed(
            "what the lines are worth", "relay, barrier", "source line", ">worth, %", caption=caption
        )
        for label, line in rows:
            found.add_row(label, source_line(line), f"{line['worth_pct']:+.2f}")
        yield found


def _places(lines: Sequence[Document]) -> list[Document]:
    """A row for each line that accounts for something, the largest first."""
    known = {
        (line["site"]["file"], line["site"]["line"]): line
        for line in lines
        if line["worth_pct"] is not None and abs(line["worth_pct"]) >= _LEAST
    }
    return sorted(known.values(), key=lambda line: -abs(line["worth_pct"]))


def _results(ladder: Document) -> Iterator[tuple[str, Document]]:
    for label, rung in zip(rung_labels(ladder), ladder["rungs"], strict=True):
        yield label, rung["result"]


def _kinds(ladder: Document) -> list[str]:
    """The kinds of steps that at least one rung has."""
    return [kind for kind in _KINDS if any(kind in rung["result"]["per_step"] for rung in ladder["rungs"])]


def _exposed(result: Document) -> float | None:
    exposed = [metric_value(result, name) for name in _EXPOSED]
    return None if None in exposed else sum(value or 0.0 for value in exposed)


def _median(result: Document, kind: str, stream: str, counter: str) -> float:
    tally = result["per_step"].get(kind, {}).get(stream, {}).get(counter)
    return float(tally["median"]) if tally else 0.0


def charts(ladder: Document) -> Iterator[Chart]:
    """Of each rung its throughput, and the idle time that the host exposes."""
    speed = [
        {"y": label, "x": metric_value(result, "output_throughput")} for label, result in _results(ladder)
    ]
    yield Chart("throughput of the rungs", "interval", "output tokens/s", "", speed)
    exposed = [
        {"y": label, "x": metric_value(result, name), "series": IDLE_NAMES[name.removesuffix("_us_per_step")]}
        for label, result in _results(ladder)
        for name in _EXPOSED
    ]
    yield Chart("exposed time of the rungs", "bar", "µs/step", "", exposed)

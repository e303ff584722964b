"""Pictures and charts of runs: where their timelines are kept, and what is drawn of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from ..profiles.measure.intervals import counted
from ..profiles.record.conclusion import metric_value, number_of
from ..profiles.record.recording import RecordedTimeline
from .charts import Chart, Point
from .page import Document, Drawn
from .source_lines import CHANGES
from .text import echo
from .trace import named

if TYPE_CHECKING:
    from ..profiles.judge.trials import Side
    from ..profiles.picture.model import Picture
    from ..profiles.record.result import Result

T = TypeVar("T")

_POINTS = 200  # of a line
_LINES = 12  # that are worth most


@contextmanager
def timelines(output_dir: Path | None, *, wanted: bool) -> Iterator[Path | None]:
    """The folder for the timelines of a run: that of the output, or one for as long as a picture takes."""
    if output_dir is not None or not wanted:
        yield output_dir
        return
    with TemporaryDirectory(prefix="schedbench-picture-") as folder:
        yield Path(folder)


def drawn(result: Result, folder: Path | None) -> Drawn:
    """The picture of the timelines in ``folder`` and charts of them; nothing where there are none."""
    from ..profiles.picture.draw import picture

    found = _timelines(result, folder)
    return *picture(found), *timeline_charts(found)


def _timelines(result: Result, folder: Path | None) -> dict[str, RecordedTimeline]:
    """None where their clocks differ."""
    from ..profiles.record.recording import read_ranks

    found = {} if folder is None else named(read_ranks(folder), result)
    if len(found) > 1 and not result.one_clock:
        echo("no picture: each rank has a clock of its own", err=True)
        return {}
    return found


def side_by_side(a: Side, b: Side, seed: int) -> Picture:
    """A above B, from one more run of each; stored sides have the timelines beside them, if any."""
    from ..profiles.judge.worker import CrashError
    from ..profiles.picture.draw import pictures

    found = {}
    for name, side in {"A": a, "B": b}.items():
        with TemporaryDirectory(prefix="schedbench-picture-") as folder:
            try:
                found[name] = _timelines(*side.recorded(seed, Path(folder)))
            except CrashError:
                echo(f"no picture of {name}: that version cannot record its timeline", err=True)
    return pictures(found)


def timeline_charts(found: Mapping[str, RecordedTimeline]) -> Iterator[Chart]:
    """The KV in use over time, of each rank that has any."""
    points: list[Point] = []
    for name, timeline in found.items():
        begin = timeline.windows[0].start if timeline.windows else 0
        series = {"series": name} if len(found) > 1 else {}
        for at, tokens in _thinned(timeline.kv):
            points.append({"x": (at - begin) / 1e6, "y": tokens, **series})
    if points:
        yield Chart("KV in use", "step", "ms", "tokens", points)


def run_charts(result: Document) -> Iterator[Chart]:
    """Of one run: its requests' latencies and number over time, and what draws and counterfactual runs found."""
    if "abstained" not in result["metrics"].get("ttft_ms", {"abstained"}):
        yield from _requests(result["requests"])
    if "ranges" in result:
        yield _ranges(result)
    if rows := [row for row in result.get("worth", {}).get("rows", ()) if row["output_throughput_pct"]]:
        gains = [
            {"y": place(row), "x": row["output_throughput_pct"], "series": CHANGES[row["change"]]}
            for row in rows
        ]
        yield Chart("what would it be worth", "bar", "output throughput, %", "", gains[:_LINES])


def place(row: Document) -> str:
    return f"{row['site']['file']}:{row['site']['line']}" if row["site"] else f"phase {row['phase']}"


def _requests(rows: Sequence[Document]) -> Iterator[Chart]:
    done = [row for row in rows if row["status"] == "finished" and row["first_token"] is not None]
    if len(done) < 2:
        return
    times = {
        "TTFT": [row["first_token"] - row["arrival"] for row in done],
        "TPOT": [
            (row["finish"] - row["first_token"]) / (row["output_tokens"] - 1)
            for row in done
            if row["output_tokens"] > 1
        ],
        "E2E": [row["finish"] - row["arrival"] for row in done],
    }
    shares = [point for name, found in times.items() for point in _shares(name, found)]
    yield Chart("latency of requests: share that is at most as long", "step", "ms", "%", shares, log=True)
    waiting = [(row["arrival"], row["first_token"]) for row in done]
    decoding = [(row["first_token"], row["finish"]) for row in done]
    load = [*_counted("before the first token", waiting), *_counted("after the first token", decoding)]
    yield Chart("requests over time", "step", "ms", "requests", load)


def _shares(name: str, times: Sequence[float]) -> Iterator[Point]:
    """The cumulative distribution, at most at so many points. Zero has no place on a logarithmic axis."""
    ordered = sorted(time for time in times if time > 0)
    for at in _thinned(range(len(ordered))):
        yield {"x": ordered[at] / 1e6, "y": 100 * (at + 1) / len(ordered), "series": name}


def _counted(name: str, spans: Sequence[tuple[int, int]]) -> Iterator[Point]:
    for at, total in _thinned(counted(spans)):
        yield {"x": at / 1e6, "y": total, "series": name}


def _thinned(values: Sequence[T]) -> Sequence[T]:
    """At most so many of them, evenly spaced, with the first and the last."""
    if len(values) <= _POINTS:
        return values
    return [values[round(n * (len(values) - 1) / (_POINTS - 1))] for n in range(_POINTS)]


def _ranges(result: Document) -> Chart:
    part = result["ranges"]
    points = []
    for name, extent in part["metrics"].items():
        if value := metric_value(result, name):
            ends = {end: 100 * (extent[end] / value - 1) for end in ("low", "high")}
            points.append({"y": name, "x": 0.0, **ends})
    title = f"ranges under {number_of(part['draws'], 'draw')} of the hardware's constants"
    return Chart(title, "interval", "% of the value", "", points)

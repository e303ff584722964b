"""The charts of pages: of a run, a comparison, a ladder and a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from ..profiles.record.conclusion import mean_value
from ..profiles.record.definitions import IDLE_NAMES
from ..profiles.record.recording import RecordedTimeline
from ..profiles.sweeps.conclusion import rung_labels
from .charts import Chart, ChartKind, PointValue
from .page import Document

_POINTS = 200  # of a line
_LINES = 12  # that are worth most
_EFFECTS = ("output_throughput", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")  # beside the headline
Point = Mapping[str, PointValue]


def of_result(result: Document) -> Iterator[Chart]:
    """Of one run: its requests' latencies and number over time, and what draws and counterfactual runs found."""
    if "abstained" not in result["metrics"].get("ttft_ms", {"abstained"}):
        yield from _requests(result["requests"])
    if "ranges" in result:
        yield _ranges(result)
    if rows := [row for row in result.get("worth", {}).get("rows", ()) if row["output_throughput_pct"]]:
        gains = [
            {"y": _place(row), "x": row["output_throughput_pct"], "series": row["change"]} for row in rows
        ]
        yield Chart("what would it be worth", "bar", "output throughput, %", "", gains[:_LINES])


def _place(row: Document) -> str:
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
    """How many of the spans are open, at each instant at which that changes."""
    changes = sorted((at, by) for start, end in spans for at, by in ((start, 1), (end, -1)))
    totals = list(accumulate(by for _, by in changes))
    last = {at: total for (at, _), total in zip(changes, totals, strict=True)}
    for at in _thinned(sorted(last)):
        yield {"x": at / 1e6, "y": last[at], "series": name}


def _thinned(values: Sequence[int]) -> Sequence[int]:
    """At most so many of them, evenly spaced, with the first and the last."""
    if len(values) <= _POINTS:
        return values
    return [values[round(n * (len(values) - 1) / (_POINTS - 1))] for n in range(_POINTS)]


def _ranges(result: Document) -> Chart:
    part = result["ranges"]
    points = []
    for name, extent in part["metrics"].items():
        if value := mean_value(result, name):
            ends = {end: 100 * (extent[end] / value - 1) for end in ("low", "high")}
            points.append({"y": name, "x": 0.0, **ends})
    title = f"ranges under {part['draws']} draws of the hardware's constants"
    return Chart(title, "interval", "% of the value", "", points)


def of_timelines(found: Mapping[str, RecordedTimeline]) -> Iterator[Chart]:
    """The KV in use over time, of each rank that has any."""
    points: list[Point] = []
    for name, timeline in found.items():
        begin = timeline.windows[0].start if timeline.windows else 0
        series = {"series": name} if len(found) > 1 else {}
        for n in _thinned(range(len(timeline.kv))):
            at, tokens = timeline.kv[n]
            points.append({"x": (at - begin) / 1e6, "y": tokens, **series})
    if points:
        yield Chart("KV in use", "step", "ms", "tokens", points)


def of_comparison(found: Document) -> Iterator[Chart]:
    """The effects with their intervals, and under draws; where the GPU waited on both sides."""
    points: list[Point] = []
    for name in dict.fromkeys((*found["headline"], *_EFFECTS)):
        metric = found["metrics"].get(name)
        if metric is None or metric["delta_pct"] is None or metric["ci_low"] is None:
            continue
        effect = {"x": metric["delta_pct"], "low": metric["ci_low"], "high": metric["ci_high"]}
        points.append({"y": name, **effect, "series": metric["verdict"]})
        if (firmness := metric["firmness"]) and "abstained" not in firmness:
            ends = {end: firmness[end] for end in ("low", "high")}
            points.append(
                {"y": f"{name}, over draws", "x": metric["delta_pct"], **ends, "series": metric["verdict"]}
            )
    if points:
        yield Chart("effects of B against A", "interval", "Δ %", "", points)
    parts = [part for part in found["idle"] if part["part"] not in ("forward_idle", "host_late")]
    waits = [
        {
            "y": IDLE_NAMES[part["part"]],
            "x": part[side],
            "series": side.upper(),
        }
        for part in parts
        for side in ("a", "b")
        if part["a"] or part["b"]
    ]
    if waits:
        yield Chart("where the GPU waited", "bar", "µs/step", "", waits)


def of_ladder(ladder: Document) -> Iterator[Chart]:
    """Of each rung its throughput, and the idle time that the host exposes."""
    rungs = [
        (label, rung["result"]) for label, rung in zip(rung_labels(ladder), ladder["rungs"], strict=True)
    ]
    speed = [{"y": label, "x": mean_value(result, "output_throughput")} for label, result in rungs]
    yield Chart("throughput of the rungs", "interval", "output tokens/s", "", speed)
    exposed = [
        {
            "y": label,
            "x": mean_value(result, f"{name}_us_per_step"),
            "series": IDLE_NAMES[name],
        }
        for label, result in rungs
        for name in ("exposed_stall", "exposed_host")
    ]
    yield Chart("exposed time of the rungs", "bar", "µs/step", "", exposed)


def of_sweep(document: Document) -> Iterator[Chart]:
    """The metric, or its change, over the first axis; one line for each combination of the others."""
    first, *others = document["sweep"]["axes"]
    compares = len(document["sweep"]["sides"]) == 2
    kind: ChartKind
    numeric = all(_is_number(value) for value in first["values"])
    cells = [
        (cell, cell["delta_pct"] if compares else cell["values"][0])
        for cell in document["cells"]
        if cell["values"]
    ]
    points: list[Point] = []
    for cell, value in cells:
        series = ", ".join(f"{axis['key']} {at}" for axis, at in zip(others, cell["at"][1:], strict=True))
        at = cell["at"][0]
        place = {"x": float(at), "y": value} if numeric else {"x": value, "y": f"{first['key']} {at}"}
        points.append({**place, **({"series": series} if series else {})})
    unit = "Δ %" if compares else document["sweep"]["unit"] or ""
    kind, across, up = ("line", first["key"], unit) if numeric else ("bar", unit, "")
    if points:
        yield Chart(document["sweep"]["metric"], kind, across, up, points)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

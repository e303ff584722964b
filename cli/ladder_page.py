"""The page of a ladder: one row per relay, so that a column shows what each relay changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ..profiles.record.conclusion import mean_value
from .page import Document, Lines, Page, framed, to_csv
from .text import MISSING, number, percent, whole

_KINDS = ("decode.steady", "prefill", "mixed")
_STREAMS = ("schedule", "forward")
_COUNTERS = ("h2d", "d2h", "sync", "kernel")
_EXPOSED = ("exposed_stall_us_per_step", "exposed_host_us_per_step")
_DIGITS = 6  # of a digest


def page(ladder: Document) -> Page:
    lines = setting(ladder).splitlines()
    return Page(
        " · ".join(lines), [Lines([Text(line) for line in lines]), table(ladder), Text(verdict(ladder))]
    )


def as_csv(ladder: Document) -> str:
    """One row per rung; counts are medians per step."""
    places = [
        (kind, stream, counter) for kind in _kinds(ladder) for stream in _STREAMS for counter in _COUNTERS
    ]
    metrics = (*_EXPOSED, "forward_idle_us_per_step", "forward_occupancy", "output_throughput")
    rows = []
    for rung in ladder["rungs"]:
        result = rung["result"]
        switches = " ".join(f"{name}={value}" for name, value in result["relay"]["switches"].items())
        counts = [repr(_median(result, *place)) for place in places]
        values = [mean_value(result, name) for name in metrics]
        figures = ["" if value is None else repr(value) for value in values]
        digest = result["outputs"].get("digest", "")
        rows.append([result["relay"]["state"], switches, *counts, *figures, digest])
    return to_csv(["relay", "switches", *map(".".join, places), *metrics, "digest"], rows)


def setting(ladder: Document) -> str:
    scenario, first = ladder["scenario"]["expanded"], ladder["rungs"][0]["result"]
    kind = "emulated" if first["labels"]["emulated"] else "measured"
    title = f"{scenario['name']}  {scenario.get('about', '')}".rstrip()
    return f"{title}\n{kind} · {first['hardware']['name']} · {len(first['requests'])} requests each"


def verdict(ladder: Document) -> str:
    agree = ladder["ladder"]["tokens_agree"]
    return (
        "tokens: every relay gives what it promises"
        if agree
        else "tokens: relays DIFFER that promise the same"
    )


def table(ladder: Document) -> Table:
    counters = " / ".join(_COUNTERS)
    caption = f"per step, median: {counters}; S the schedule stream, F the forward stream"
    found = framed("the ladder", caption=caption)
    found.add_column("relay, barrier", overflow="fold")
    found.add_column("")
    for kind in _kinds(ladder):
        found.add_column(kind, justify="right", no_wrap=True)
    for heading in ("exposed\nµs/step", "idle\nµs/step", "occupied\n%", "output\ntokens/s", "tokens"):
        found.add_column(heading, justify="right", no_wrap=True)
    for label, rung in zip(labels(ladder), ladder["rungs"], strict=True):
        found.add_row(label, "S\nF", *_cells(ladder, rung["result"]))
    return found


def labels(ladder: Document) -> list[str]:
    """Each state with its barrier, and with further switches where several rungs would have the same label."""
    relays = [rung["result"]["relay"] for rung in ladder["rungs"]]
    plain = [f"{relay['state']}, {relay['switches'].get('barrier', MISSING)}" for relay in relays]
    same = Counter(plain)
    return [
        name if same[name] == 1 else f"{name} {_apart(relay, relays)}"
        for name, relay in zip(plain, relays, strict=True)
    ]


def _apart(relay: Document, relays: Sequence[Document]) -> str:
    alike = [other["switches"] for other in relays if other["state"] == relay["state"]]
    differing = [name for name in relay["switches"] if len({switches[name] for switches in alike}) > 1]
    return " ".join(f"{name}={relay['switches'][name]}" for name in differing if name != "barrier")


def _cells(ladder: Document, result: Document) -> list[str]:
    counts = ["\n".join(_counts(result, kind, stream) for stream in _STREAMS) for kind in _kinds(ladder)]
    exposed = [mean_value(result, name) for name in _EXPOSED]
    return [
        *counts,
        number(None if None in exposed else sum(value or 0.0 for value in exposed)),
        number(mean_value(result, "forward_idle_us_per_step")),
        percent(mean_value(result, "forward_occupancy")),
        number(mean_value(result, "output_throughput")),
        result["outputs"].get("digest", MISSING)[:_DIGITS],
    ]


def _counts(result: Document, kind: str, stream: str) -> str:
    if kind not in result["per_step"]:
        return MISSING
    return "/".join(number(whole(_median(result, kind, stream, counter))) for counter in _COUNTERS)


def _kinds(ladder: Document) -> list[str]:
    """The kinds of steps that at least one rung has."""
    return [kind for kind in _KINDS if any(kind in rung["result"]["per_step"] for rung in ladder["rungs"])]


def _median(result: Document, kind: str, stream: str, counter: str) -> float:
    tally = result["per_step"].get(kind, {}).get(stream, {}).get(counter)
    return float(tally["median"]) if tally else 0.0

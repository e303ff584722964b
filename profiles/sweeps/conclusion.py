"""A sweep and a ladder in one sentence each, from their documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from ..record.conclusion import attributed, listed, metric_value, number_of, numbers

Document = dict[str, Any]

SEEDS: Final = "1 workload seed per cell"

_SHOWN: Final = 2  # changes of sign
_UNJUDGED: Final = ("not judged (no result)", "not judged (tokens differ)")


def sweep_conclusion(document: Document) -> str:
    """Return in how many cells the candidate is better, and which are not judged, the extreme effects, and where the
    sign changes; of a sweep without sides, the extreme values of the metric; and over how many seeds that is."""
    sweep = document["sweep"]
    cells = [cell for cell in document["cells"] if cell["values"]]
    labels, names = document["labels"], " and ".join(document["hardware"])
    said = f"{numbers(labels, names)}, {SEEDS}" if labels else SEEDS
    partial = f"; partial: {number_of(len(cells), 'cell')}" if document["run"]["cancelled"] else ""
    found = "no cell of the sweep has a value"
    if cells:
        found = _effects(document) if len(sweep["sides"]) == 2 else _extremes(document, cells)
    return f"{sweep['metric']} of {document['scenario']['name']} ({said}{partial}): {found}."


def _effects(document: Document) -> str:
    cells = document["cells"]
    a, b = (side["label"] for side in document["sweep"]["sides"])
    tones = Counter(cell["candidate"] or _UNJUDGED[cell["tokens"] == "different"] for cell in cells)
    words = [f"{tones[tone]} {tone}" for tone in ("better", "worse", "no change", *_UNJUDGED) if tones[tone]]
    said = f"{b} against {a} in {number_of(len(cells), 'cell')}: {', '.join(words)}"
    judged = [cell for cell in cells if cell["candidate"] and cell["delta_pct"] is not None]
    if not judged:
        return said
    ends = [end(judged, key=lambda cell: cell["delta_pct"]) for end in (min, max)]
    extent = dict.fromkeys(f"{cell['delta_pct']:+.2f} % at {_at(document, cell)}" for cell in ends)
    return f"{said}, {' to '.join(extent)}; {_changes(document)}"


def beyond(document: Document, entry: Document) -> str:
    """The side of the candidate beyond a change of sign, and whether by too little to be of interest."""
    slight = f" by less than {document['sweep']['min_effect_pct']:g} %" if entry.get("slight") else ""
    return f"{entry['beyond']}{slight}"


def _changes(document: Document) -> str:
    """The first changes of sign along the first axis."""
    found = document["break_even"]
    key = document["sweep"]["axes"][0]["key"].rpartition(".")[2]
    if not found:
        judged = all(cell["candidate"] for cell in document["cells"])
        return f"along {key} the sign changes nowhere{'' if judged else ' among those judged'}"
    words = []
    for entry in found:
        at = "".join(f"{name.rpartition('.')[2]}={value} " for name, value in entry["at"].items())
        words.append(f"{at}{beyond(document, entry)} beyond {key} {' … '.join(entry['between'])}")
    doubted = sum(1 for entry in found if entry["drawn"] and not entry["drawn"]["stands"])
    doubt = f", {doubted} of {len(found)} inconclusive: CONSTANTS" if doubted else ""
    return f"{listed(words, _SHOWN)}{doubt}"


def _extremes(document: Document, cells: list[Document]) -> str:
    unit = document["sweep"]["unit"] or ""
    low, high = (end(cells, key=lambda cell: cell["values"][0]) for end in (min, max))
    ends = (f"{cell['values'][0]:,.4g} {unit} at {_at(document, cell)}" for cell in (low, high))
    return " to ".join(dict.fromkeys(ends))


def _at(document: Document, cell: Document) -> str:
    keys = (axis["key"].rpartition(".")[2] for axis in document["sweep"]["axes"])
    return " ".join(f"{key}={value}" for key, value in zip(keys, cell["at"], strict=True))


def rung_labels(ladder: Document) -> list[str]:
    """Each state with its barrier, and where several rungs would have the same label with further switches, or with
    what the scenario says."""
    relays = [rung["result"]["relay"] for rung in ladder["rungs"]]
    written = [relay["state"] for relay in ladder["scenario"]["expanded"]["engine"]["relays"]]
    plain = [f"{relay['state']}, {relay['switches'].get('barrier', '–')}" for relay in relays]
    same = Counter(plain)
    return [
        name if same[name] == 1 else f"{name} {_apart(relay, relays) or state}"
        for name, relay, state in zip(plain, relays, written, strict=False)
    ]


def _apart(relay: Document, relays: Sequence[Document]) -> str:
    alike = [other["switches"] for other in relays if other["state"] == relay["state"]]
    differing = [name for name in relay["switches"] if len({switches[name] for switches in alike}) > 1]
    return " ".join(f"{name}={relay['switches'][name]}" for name in differing if name != "barrier")


def ladder_conclusion(ladder: Document) -> str:
    """Return by how much the last rung's output throughput differs from the first one's, the largest change from one
    rung to the next of its block, and whether relays with the same rules give the same tokens; nothing of that where
    the user interrupted the runs."""
    runs = [rung["result"]["run"] for rung in ladder["rungs"]]
    if any(run["cancelled"] or run.get("further_cancelled") for run in runs):
        whole = number_of(sum(not run["cancelled"] for run in runs), "relay")
        return f"interrupted after {whole}, no conclusion."
    agree = ladder["ladder"]["tokens_agree"]
    tokens = (
        "every relay gives the tokens it promises" if agree else "relays DIFFER that promise the same tokens"
    )
    labels, rungs = rung_labels(ladder), ladder["rungs"]
    values = [metric_value(rung["result"], "output_throughput") for rung in rungs]
    timed = [(number, value) for number, value in enumerate(values) if value]
    if len(timed) < 2:
        return f"{number_of(len(values), 'relay')}, no times to compare; {tokens}."
    (first, a), (last, b) = timed[0], timed[-1]
    ends = f"{labels[last]} gives {100 * (b / a - 1):+.2f} % output throughput against {labels[first]}"
    kind = numbers(rungs[0]["result"]["labels"], rungs[0]["result"]["hardware"]["name"])
    parts = [f"{ends} ({a:,.4g} to {b:,.4g} tokens/s, {kind})"]
    relays = [rung["result"]["relay"] for rung in rungs]
    steps = [
        (n, 100 * (y / x - 1))
        for (m, x), (n, y) in pairwise(timed)
        if not _begins_block(relays[: m + 1], relays[n])
    ]
    if steps:
        rung, change = max(steps, key=lambda step: abs(step[1]))
        source = attributed(change, rungs[rung].get("lines", ()))
        largest = f"{labels[rung]} {change:+.2f} %{f' (of which {source})' if source else ''}"
        parts.append(f"largest change from one to the next: {largest}")
    return f"{'; '.join((*parts, tokens))}."


def _begins_block(earlier: Sequence[Document], relay: Document) -> bool:
    """Whether the relay goes back to an earlier state with another barrier, and is no pair with the one before it."""
    before, barriers = earlier[-1], {one["switches"].get("barrier") for one in (earlier[-1], relay)}
    again = relay["state"] != before["state"] and any(one["state"] == relay["state"] for one in earlier)
    return again and len(barriers) > 1

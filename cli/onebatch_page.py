"""The page of static batches: latency and throughput of both steps against batch and prompt length."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from .page import WIDE, Document, Page, framed, to_csv
from .text import MISSING, number

_COLUMNS: Final = ("batch", "prompt", "output")
_FIGURES: Final = {  # heading by field
    "prefill_ms": ">prefill\nms",
    "prefill_throughput": ">prompt\ntokens/s",
    "decode_ms": ">decode\nms",
    "decode_throughput": ">output\ntokens/s",
    "total_ms": ">total\nms",
    "throughput": ">all\ntokens/s",
}


def page(document: Document, width: int = WIDE, *, few: bool = False) -> Page:  # noqa: ARG001
    table = framed(
        "one static batch, without the scheduler", *(f">{name}" for name in _COLUMNS), *_FIGURES.values()
    )
    for point in document["points"]:
        table.add_row(*(number(point[name]) for name in (*_COLUMNS, *_FIGURES)))
    refused = dict.fromkeys(
        f"{MISSING} {point['batch']} x {point['prompt']}: {point['refused']}"
        for point in document["points"]
        if point["refused"]
    )
    name = document["scenario"]["expanded"]["name"]
    return Page(
        f"one batch of {name}",
        [Text(setting(document)), table, *map(Text, refused)],
        document["conclusion"],
        footer=(f"`{document['run']['command']}`",),
    )


def setting(document: Document) -> str:
    """What kind of numbers these are."""
    labels = document["labels"]
    kind = "no run" if labels is None else "emulated" if labels["emulated"] else "measured"
    relay = document["relay"]
    name = document["scenario"]["expanded"]["name"]
    faults = [f"fault {fault}" for fault in relay["faults"]]
    hardware = [] if labels is None else [document["hardware"]["name"]]
    return " · ".join([name, kind, *hardware, f"relay {relay['state']}", *faults, "decode: the median step"])


def as_csv(document: Document) -> str:
    """One row per batch."""
    fields = [*_COLUMNS, *_FIGURES, "digest", "refused"]
    return to_csv(
        fields, [["" if p[name] is None else p[name] for name in fields] for p in document["points"]]
    )

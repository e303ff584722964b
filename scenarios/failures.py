"""The ranks, phases and links of a scenario, and the checks of its scripted failures.

Ranks are named as in a result's ``ranks``: ``stage 0``, ``rank 0``, ``replica 0``, ``prefill 0``, ``decode 0``; and
``router``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from .combinations import Finding
from .problems import KeyPath, meant, show, unknown
from .schema import OF_LINKS, OF_RANKS, Failure, Scenario

# The phases of a rank by role. Where a phase is a message, the rank dies before it sends it or after it received it.
PHASES: Final[Mapping[str, Sequence[str]]] = {
    "stage": ("requests", "admit", "prepare", "forward", "proxies", "tokens", "settle"),
    "rank": ("admit", "prepare", "exchange", "forward", "settle"),
    "replica": ("requests", "admit", "prepare", "forward", "settle", "ended"),
    "prefill": ("requests", "bootstrap", "admit", "prepare", "forward", "settle", "transfer"),
    "decode": ("requests", "bootstrap", "transfer", "admit", "prepare", "forward", "settle", "ended"),
    "router": ("requests", "ended"),
}
# The tags of messages between workers, by sender and receiver.
_TAGS: Final[Mapping[tuple[str, str], Sequence[str]]] = {
    ("router", "replica"): ("request",),
    ("replica", "router"): ("ended",),
    ("router", "prefill"): ("request",),
    ("router", "decode"): ("request",),
    ("decode", "prefill"): ("handshake",),
    ("prefill", "decode"): ("kv",),
    ("decode", "router"): ("ended",),
}
TRANSFER: Final = "kv"


def rank_names(scenario: Scenario) -> list[str]:
    """In the order of their numbers."""
    engine, pair = scenario.engine, scenario.engine.disaggregation
    if engine.replicas > 1:
        return [*(f"replica {index}" for index in range(engine.replicas)), "router"]
    if engine.data_parallel.ranks > 1:
        return [f"rank {index}" for index in range(engine.data_parallel.ranks)]
    if pair.mode == "none":
        return [f"stage {index}" for index in range(engine.pipeline.stages)]
    workers = [f"prefill {index}" for index in range(pair.prefill)]
    return [*workers, *(f"decode {index}" for index in range(pair.decode)), "router"]


def role_of(rank: str) -> str:
    return rank.partition(" ")[0]


def phases(scenario: Scenario, rank: str) -> Sequence[str]:
    """The phases of a rank. The last stage sends no proxies."""
    last = role_of(rank) == "stage" and rank == rank_names(scenario)[-1]
    return [phase for phase in PHASES[role_of(rank)] if not (last and phase == "proxies")]


def tags(scenario: Scenario, sender: str, receiver: str) -> Sequence[str]:
    """The tags of the messages from one rank to the other."""
    names = rank_names(scenario)
    if role_of(sender) != "stage":
        return _TAGS.get((role_of(sender), role_of(receiver)), ())
    count, index = len(names), names.index(sender)
    if names.index(receiver) != (index + 1) % count:
        return ()
    onward = ("requests", "proxy") if index < count - 1 else ()
    return (*onward, *(("output",) if index != count - 2 else ()))


def sends(role: str, tag: str) -> bool:
    """Whether a worker of that role, or a router, sends messages with the tag."""
    return any(sender == role and tag in found for (sender, _), found in _TAGS.items())


def words(failure: Failure) -> str:
    """An entry of the script, in words."""
    if failure.dies is not None:
        return f"{failure.rank} dies in {failure.dies.phase} {failure.dies.nth}"
    late = "" if failure.ms is None else f" for {failure.ms:g} ms"
    return f"{failure.link[0]} to {failure.link[1]}: {failure.does} of {failure.tag} {failure.nth}{late}"


def findings(scenario: Scenario) -> Iterator[Finding]:
    """The problems of the script, each with a key and a reason."""
    if not scenario.faults:
        return
    if scenario.engine.ranks == 1:
        yield (
            ("faults",),
            "ranks and links break where there are several: see engine.pipeline, engine.disaggregation, "
            "engine.data_parallel, engine.replicas",
        )
        return
    if scenario.engine.relays:
        yield ("faults",), "expected one relay: rungs of a ladder are to give the same tokens"
    for place, failure in enumerate(scenario.faults):
        yield from _entry(scenario, failure, ("faults", place))


def _entry(scenario: Scenario, failure: Failure, path: KeyPath) -> Iterator[Finding]:
    given = failure.model_fields_set
    of_rank, of_link = given & set(OF_RANKS), given & set(OF_LINKS)
    if bool(of_rank) == bool(of_link):
        yield path, "expected rank and dies, or link, tag and does, and not both"
        return
    needed = OF_RANKS if of_rank else OF_LINKS[:3]
    missing = [name for name in needed if not getattr(failure, name)]
    yield from (((*path, name), "required, but not given") for name in missing)
    if not missing:
        yield from (_rank if of_rank else _link)(scenario, failure, path)


def _rank(scenario: Scenario, failure: Failure, path: KeyPath) -> Iterator[Finding]:
    assert failure.rank is not None and failure.dies is not None
    names = rank_names(scenario)
    if failure.rank not in names:
        yield (*path, "rank"), unknown("rank", failure.rank, names)
    elif failure.dies.phase not in (known := phases(scenario, failure.rank)):
        yield (*path, "dies", "phase"), unknown(f"phase of {failure.rank}", failure.dies.phase, known)


def _link(scenario: Scenario, failure: Failure, path: KeyPath) -> Iterator[Finding]:
    assert failure.tag is not None
    names = rank_names(scenario)
    strangers = [name for name in failure.link if name not in names]
    if len(failure.link) != 2:
        yield (*path, "link"), f"expected two ranks, from and to, got {len(failure.link)}"
    elif strangers:
        yield (*path, "link"), unknown(f"rank {show(strangers[0])}", strangers[0], names)
    elif {role_of(name) for name in failure.link} == {"rank"} and failure.link[0] != failure.link[1]:
        yield (
            (*path, "link"),
            "links between data-parallel ranks do not fail by script, the ranks do: expected rank and dies",
        )
    elif not (sent := tags(scenario, *failure.link)):
        yield (*path, "link"), f"{failure.link[0]} sends nothing to {failure.link[1]}"
    elif failure.tag not in sent:
        hint = meant(failure.tag, sent) or f", known: {', '.join(sent)}"
        yield (*path, "tag"), f"{failure.link[0]} sends {failure.link[1]} no {show(failure.tag)}{hint}"
    elif failure.does in ("repeat", "reorder") and failure.tag != TRANSFER:
        yield (
            (*path, "does"),
            f"a link keeps the order of {failure.tag}; transfers ({TRANSFER}) alone can be repeated or reordered",
        )
    if failure.does in ("delay", "reorder") and failure.ms is None:
        yield (*path, "ms"), f"required with {failure.does}"
    if failure.does in ("drop", "repeat") and failure.ms is not None:
        yield (*path, "ms"), f"means nothing with {failure.does}"

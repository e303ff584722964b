"""Every rank dies in each of its phases, and every link fails in each way: every request ends once, the surviving ranks
free their memory and either continue or name what they waited for, and none waits for ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import Any

import pytest

from schedbench.profiles.record.result import Abstained
from schedbench.scenarios.failures import TRANSFER, rank_names, role_of, tags
from schedbench.sched.disagg.layout import RankLayout
from tests.acceptance.runs import resolved, statuses
from tests.robustness.fault_runs import FEW, WORLDS, Death, broken, deaths, unbroken, whole

KEPT = {"delay": ", ms: 3", "repeat": "", "reorder": ", ms: 3"}  # effects that cost no token
LOST = ("drop", "stall")
REAL = ("device.values=real", "engine.mixed_chunk=false")
OFTEN, EVERYWHERE = (1, 5), tuple(WORLDS)


def in_wide(cases: Iterable[tuple[object, ...]]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.wide) for case in cases]


def everywhere(*counts: int, worlds: tuple[str, ...]) -> list[tuple[str, Death]]:
    return [(world, death) for world in worlds for death in deaths(world, *counts)]


def failing(world: str) -> Iterator[tuple[str, str, str, str]]:
    """Yields every link with each of its tags and each kind of failure."""
    scenario = resolved("mixed", *FEW, *WORLDS[world]).scenario
    for sender, receiver in permutations(rank_names(scenario), 2):
        for tag in tags(scenario, sender, receiver):
            for does in (*KEPT, *LOST):
                if tag == TRANSFER or does not in ("repeat", "reorder"):
                    yield sender, receiver, tag, does


def links(*counts: int, worlds: tuple[str, ...]) -> list[tuple[str, tuple[str, str, str, str], int]]:
    return [(world, link, nth) for world in worlds for link in failing(world) for nth in counts]


@pytest.mark.parametrize(
    ("world", "death"),
    [*everywhere(3, worlds=("1x1",)), *in_wide(everywhere(*OFTEN, worlds=EVERYWHERE))],
    ids=str,
)
def test_a_rank_dies(world: str, death: Death) -> None:
    result = broken(death.scripted, *WORLDS[world])
    if result.run.missed:
        assert unbroken(result, *WORLDS[world]) and result.run.failure is None
        return
    first, *others = str(result.run.failure).split("; ")
    assert first == f"{death.rank} was killed by script in {death.phase} {death.nth}"
    alone = role_of(death.rank) in ("replica", "prefill", "decode")  # other workers continue
    survivors = len(rank_names(resolved("mixed", *FEW, *WORLDS[world]).scenario)) - 1
    assert len(others) == (0 if alone else survivors)
    assert all(" waited for " in other and death.rank in other for other in others)


def fails(world: str, link: tuple[str, str, str, str], nth: int) -> None:
    sender, receiver, tag, does = link
    script = f"{{link: [{sender}, {receiver}], tag: {tag}, does: {does}, nth: {nth}{KEPT.get(does, '')}}}"
    result = broken(f"faults=[{script}]", *WORLDS[world])
    if result.run.missed or does in KEPT:
        assert unbroken(result, *WORLDS[world]) and result.run.failure is None
        return
    assert isinstance(result.outputs, Abstained)
    assert "failed" in statuses(result) or "router is gone: it has ended" in str(result.run.failure)
    for row in result.requests:
        assert row.status == "finished" or " waited " in row.reason


@pytest.mark.parametrize("rank", ["prefill 1", "decode 1"])
def test_other_workers_serve_requests_after_a_worker_has_died(rank: str) -> None:
    """The requests arrive a tenth of a second apart: each has ended before the next one arrives."""
    late = (*WORLDS["2x2"], "workload.requests=12", "workload.arrival={process: constant, rate: 10}")
    role, place = role_of(rank), RankLayout(0, prefill=2, decode=2)
    result = broken(f"faults=[{{rank: {rank}, dies: {{phase: settle, nth: 1}}}}]", *late)
    for index, row in enumerate(result.requests):
        mine = (place.prefill_of(index) if role == "prefill" else place.decode_of(index) - 2) == 1
        assert row.status == ("failed" if mine else "finished")
        assert row.reason == (f"{rank} is gone: killed by script in settle 1" if mine else "length")


VARIANTS = {
    "serial": ("engine.overlap=false",),
    "verifying": (*REAL, "engine.speculative={algorithm: eagle, mode: v2, steps: 2}"),
    "serial verifying": (*REAL, "engine.speculative={algorithm: eagle, mode: v1, steps: 2}"),
    "retracting": ("engine.kv_tokens=320", "engine.disaggregation.reserved_decode_tokens=0"),
    "pages": ("engine.page_size=16",),
    "lengths of its own": ("engine.relay=pr25774-before",),
    "clients that leave": ("workload.abort={fraction: 0.5, after_tokens: 2}",),
}


@pytest.mark.wide
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("death", list(deaths("1x1", 4)), ids=str)
def test_a_death_in_other_modes(death: Death, variant: str) -> None:
    broken(death.scripted, *WORLDS["1x1"], *VARIANTS[variant])


@pytest.mark.wide
@pytest.mark.parametrize("death", list(deaths("two stages", 4)), ids=str)
def test_with_more_microbatches_than_stages(death: Death) -> None:
    broken(death.scripted, *WORLDS["two stages"], "engine.pipeline.async_depth=1", "device.values=real")


@pytest.mark.parametrize(
    ("world", "link", "nth"),
    [*links(2, worlds=("two stages",)), *in_wide(links(4, worlds=EVERYWHERE))],
)
def test_a_link_fails(world: str, link: tuple[str, str, str, str], nth: int) -> None:
    fails(world, link, nth)


@pytest.mark.parametrize("tag", ["handshake", "kv"])
def test_a_link_recovers(tag: str) -> None:
    way = "[prefill 0, decode 0]" if tag == "kv" else "[decode 0, prefill 0]"
    late = broken(f"faults=[{{link: {way}, tag: {tag}, does: stall, nth: 2, ms: 20}}]", *WORLDS["1x1"])
    assert unbroken(late, *WORLDS["1x1"])
    ends_at = [max(row.finish or 0 for row in result.requests) for result in (late, whole(*WORLDS["1x1"]))]
    assert ends_at[0] > ends_at[1] + 10_000_000


@pytest.mark.parametrize("receiver", ["prefill 0", "decode 0"])
def test_the_routers_last_message_may_be_late(receiver: str) -> None:
    """The router's seventh message announces that there are no more than six requests."""
    fails("1x1", ("router", receiver, "request", "delay"), 7)

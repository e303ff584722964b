"""Scripts of faults: the ranks, phases and links that exist, and the settings that exclude each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from schedbench.scenarios.failures import PHASES, TRANSFER, phases, rank_names, tags, words
from schedbench.scenarios.loader import load
from schedbench.sched.disagg.layout import ENDED, HANDSHAKE, KV, REQUEST, RankLayout
from schedbench.sched.loop.pipelined import OUTPUT, PROXY
from schedbench.sched.pipeline import REQUESTS
from tests.scenarios.refusals import refused

PAIR = "engine.disaggregation={mode: pair, prefill: 2, decode: 2}"


def faulty(*entries: str, scenario: str = "pp2") -> list[str]:
    """Returns the problems of these faults, without their place."""
    return [
        each.removeprefix("--set: ") for each in refused(load, scenario, [f"faults=[{', '.join(entries)}]"])
    ]


MISTAKES = {
    "oom": "expected a mapping, got 'oom'",
    "{rank: stage 9, dies: forward}": "rank: unknown rank, did you mean 'stage 1'?",
    "{rank: stage 1, dies: forwrd}": "dies.phase: unknown phase of stage 1, did you mean 'forward'?",
    "{rank: stage 1, dies: proxies}": "dies.phase: unknown phase of stage 1, known: ",
    "{rank: stage 1, dies: {nth: 2}}": "dies.phase: required, but not given",
    "{rank: stage 1, dies: {phase: forward, nth: 0}}": "dies.nth: expected at least 1, got 0",
    "{rank: stage 1}": "dies: required, but not given",
    "{rank: stage 1, dies: forward, ms: 3}": "expected rank and dies, or link, tag and does, and not both",
    "{nth: 1}": "link: required, but not given",
    "{link: [stage 0], tag: proxy, does: drop}": "link: expected two ranks, from and to, got 1",
    "{link: [stage 0, stage 7], tag: proxy, does: drop}": "link: unknown rank 'stage 7', did you mean 'stage 1'?",
    "{link: [stage 0, stage 0], tag: proxy, does: drop}": "link: stage 0 sends nothing to stage 0",
    "{link: [stage 0, stage 1], tag: prxy, does: drop}": "tag: stage 0 sends stage 1 no 'prxy', did you mean 'proxy'?",
    "{link: [stage 0, stage 1], tag: output, does: drop}": "tag: stage 0 sends stage 1 no 'output', known: ",
    "{link: [stage 0, stage 1], tag: proxy, does: lose}": "does: expected stall, drop, delay, repeat or reorder",
    "{link: [stage 0, stage 1], tag: proxy, does: repeat}": "does: a link keeps the order of proxy; transfers (kv)",
    "{link: [stage 0, stage 1], tag: proxy, does: delay}": "ms: required with delay",
    "{link: [stage 0, stage 1], tag: proxy, does: drop, ms: 3}": "ms: means nothing with drop",
    "{link: [stage 0, stage 1], tag: proxy, dose: drop}": "dose: unknown key, did you mean 'does'?",
}  # fmt: skip


@pytest.mark.parametrize("entry", MISTAKES)
def test_an_error_names_its_key(entry: str) -> None:
    found = faulty(entry)
    assert any(MISTAKES[entry] in line and line.startswith("faults.0") for line in found), found


def test_links_between_data_parallel_ranks_cannot_fail() -> None:
    [line] = faulty("{link: [rank 0, rank 1], tag: kv, does: drop}", scenario="dp_idle")
    assert line.startswith("faults.0.link: links between data-parallel ranks do not fail by script")


def test_errors_of_all_entries_are_reported_at_once() -> None:
    found = faulty("{rank: stage 9, dies: forward}", "{link: [stage 0, stage 1], tag: kv, does: drop}")
    assert [line.partition(":")[0] for line in found] == ["faults.0.rank", "faults.1.tag"]


def test_faults_need_several_ranks() -> None:
    [line] = faulty("{rank: stage 0, dies: forward}", scenario="mixed")
    assert line.startswith("faults: ranks and links break where there are several")


def test_ranks_are_those_of_the_result() -> None:
    pair = load("disagg", [PAIR])
    assert rank_names(pair) == [RankLayout(rank, prefill=2, decode=2).name for rank in range(5)]
    assert rank_names(load("pp4_mixed")) == [f"stage {index}" for index in range(4)]


def test_tags_are_the_schedulers_own() -> None:
    stages, pair = load("pp4_mixed"), load("disagg")
    assert tags(stages, "stage 0", "stage 1") == (REQUESTS, PROXY, OUTPUT)
    assert tags(stages, "stage 2", "stage 3") == (REQUESTS, PROXY)
    assert tags(stages, "stage 3", "stage 0") == (OUTPUT,)
    assert tags(stages, "stage 0", "stage 2") == ()
    assert tags(pair, "prefill 1", "decode 0") == (KV,) == (TRANSFER,)
    assert tags(pair, "decode 0", "prefill 1") == (HANDSHAKE,)
    assert tags(pair, "router", "decode 1") == tags(pair, "router", "prefill 1") == (REQUEST,)
    assert tags(pair, "decode 1", "router") == (ENDED,)
    assert tags(pair, "prefill 0", "prefill 1") == ()


def test_the_last_stage_sends_no_proxies() -> None:
    scenario = load("pp4_mixed")
    assert [len(phases(scenario, f"stage {index}")) for index in range(4)] == [7, 7, 7, 6]
    assert set(PHASES["stage"]) - set(phases(scenario, "stage 3")) == {"proxies"}


def test_the_page_lists_every_phase_and_tag() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "failures.md").read_text()
    rows = {line.split("|")[1].split()[0]: line for line in page.splitlines() if line.startswith("| ")}
    assert all(phase in rows[role] for role in PHASES for phase in PHASES[role])
    assert all(f"`{tag}`" in page for tag in (REQUESTS, PROXY, OUTPUT, REQUEST, ENDED, HANDSHAKE, KV))


def test_an_entry_in_words() -> None:
    late = "{link: [stage 0, stage 1], tag: proxy, does: delay, nth: 2, ms: 0.5}"
    script = load("pp2", [f"faults=[{{rank: stage 1, dies: settle}}, {late}]"]).faults
    said = [words(failure) for failure in script]
    assert said == ["stage 1 dies in settle 1", "stage 0 to stage 1: delay of proxy 2 for 0.5 ms"]

"""Runs short of KV or of rows: which request is retracted, and how the new-token ratio reacts."""

from __future__ import annotations

import pytest

from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.request import Request
from tests.sched.loop.cpu_engine import (
    LOOPS,
    EngineRun,
    RunRecorder,
    check_answers,
    config,
    recalled_answer,
    request,
)

CARELESS = 0.02  # so little is expected of running requests that the pool is overbooked


@LOOPS
def test_the_chunked_prompt_is_retracted_before_the_last_decode(overlap: bool) -> None:
    """Both grow by a token a step until no token is free. Only one request decodes, so the prompt is retracted."""
    decoding = request("decoding", range(300, 310), 70)
    under_way = request("under way", range(320, 390), 5, arrival=14_000)
    engine = config(
        overlap=overlap,
        mixed_chunk=True,
        chunked_prefill_size=2,
        kv_tokens=100,
        schedule_conservativeness=CARELESS,
    )
    EngineRun(engine, recall=True).run([decoding, under_way])
    assert (decoding.retraction_count, under_way.retraction_count) == (0, 1)
    check_answers([decoding, under_way])


@LOOPS
def test_the_least_advanced_request_is_retracted_first(overlap: bool) -> None:
    victims: list[tuple[str, list[tuple[int, int]]]] = []

    class Victims(RunRecorder):
        def retracted(self, req: Request) -> None:
            others = [r for r in crowd if r.req_pool_idx is not None and r is not req]
            victims.append((req.id, [(len(r.output_ids), -len(r.origin_input_ids)) for r in (req, *others)]))

    crowd = [
        request(f"r{i}", range(300 + 20 * i, 306 + 20 * i + 2 * i), 40, index=i, arrival=6000 * i)
        for i in range(6)
    ]
    engine = config(overlap=overlap, kv_tokens=120, schedule_conservativeness=CARELESS)
    EngineRun(engine, recall=True, observer=Victims()).run(crowd)
    assert victims
    assert all(progress[0] == min(progress) for _, progress in victims)
    check_answers(crowd)


def test_a_prompt_is_reused_while_its_request_still_runs() -> None:
    first = request("first", range(300, 360), 30)
    second = request("second", [*range(300, 360), 5, 6], 4, arrival=10_000)
    EngineRun(config(), recall=True).run([first, second])
    assert (first.cached_tokens, second.cached_tokens) == (0, 60)
    check_answers([first, second])


def test_an_output_is_reused_after_its_request_has_ended() -> None:
    first = request("first", range(300, 310), 8)
    engine_run = EngineRun(config(page_size=4), recall=True)
    follow_up = request("follow-up", [*range(300, 310), *recalled_answer(first), 7], 4, arrival=400_000)
    engine_run.run([first, follow_up])
    assert follow_up.cached_tokens == 16  # whole pages of 10 + 8 tokens
    check_answers([first, follow_up])


@LOOPS
def test_rows_never_exceed_the_limit(overlap: bool) -> None:
    most = 0

    def count(scheduler: Scheduler) -> None:
        nonlocal most
        slots = scheduler.engine.slots
        most = max(most, slots.size - slots.available_size())

    crowd = [request(f"r{i}", range(300 + i, 400 + i), 6, index=i) for i in range(9)]
    engine = config(overlap=overlap, max_running_requests=3, chunked_prefill_size=48, mixed_chunk=True)
    EngineRun(engine, recall=True, watch=count).run(crowd)
    assert most == 3
    check_answers(crowd)


def ratio(scheduler: Scheduler) -> float:
    return scheduler._ratio.value


def test_the_ratio_falls_with_every_decode_and_idle_restores_it() -> None:
    seen: list[float] = []
    late = request("late", range(400, 410), 2, arrival=10_000_000)
    EngineRun(config(), recall=True, watch=lambda scheduler: seen.append(ratio(scheduler))).run(
        [request("early", range(300, 310), 8), late]
    )
    step = (0.7 - 0.098) / 600
    resting = seen.index(0.7, 3)
    decodes = seen[1:resting]
    assert decodes[0] == 0.7 and decodes[-1] == pytest.approx(0.7 - 8 * step)
    assert sorted(decodes, reverse=True) == decodes


def test_the_ratio_jumps_after_a_retraction() -> None:
    recorder, seen = RunRecorder(), []

    def note(scheduler: Scheduler) -> None:
        if recorder.retractions and not seen:
            seen.append((ratio(scheduler), [len(req.output_ids) for req in scheduler.running_batch.reqs]))

    crowd = [
        request(f"r{i}", range(300 + 20 * i, 310 + 20 * i), 60, index=i, arrival=9000 * i) for i in range(5)
    ]
    engine = config(overlap=False, kv_tokens=120, schedule_conservativeness=CARELESS)
    EngineRun(engine, recall=True, observer=recorder, watch=note).run(crowd)
    [(value, outputs)] = seen
    # The step after the retraction has added one token to each request.
    assert value == (sum(outputs) - len(outputs) + 20 * len(outputs)) / (60 * len(outputs) + 1)


@LOOPS
def test_a_request_that_ends_with_its_prefill_frees_its_row_at_once(overlap: bool) -> None:
    steady = request("steady", range(300, 310), 40)
    short = [request(f"s{i}", range(320 + i, 330 + i), 1, index=i) for i in range(4)]
    EngineRun(config(overlap=overlap, max_running_requests=2), recall=True).run([steady, *short])
    assert all(req.finished_at < steady.finished_at for req in short)
    check_answers([steady, *short])


@pytest.mark.parametrize("kv_tokens", range(116, 124))
def test_a_mixed_chunk_leaves_tokens_for_the_decodes(kv_tokens: int) -> None:
    """Four decodes and a chunk of four grow by eight tokens a step, for every remainder of the pool."""
    decoding = [request(f"r{i}", range(300 + 20 * i, 310 + 20 * i), 30, index=i) for i in range(4)]
    under_way = request("under way", range(400, 460), 3, arrival=20_000)
    recorder = RunRecorder()
    engine = config(
        mixed_chunk=True, chunked_prefill_size=8, kv_tokens=kv_tokens, schedule_conservativeness=CARELESS
    )
    EngineRun(engine, recall=True, observer=recorder).run([*decoding, under_way])
    assert "mixed" in recorder.kinds
    check_answers([*decoding, under_way])

"""Requests that end early or are refused, while the run goes on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

from schedbench.sched.config import SamplingParams
from schedbench.sched.loop import settle
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer
from schedbench.sched.request import Request, Status
from tests.sched.loop.cpu_engine import EOS, LOOPS, EngineRun, config, recalled_answer, request

PROMPT = range(300, 340)


def healthy() -> Request:
    return request("healthy", PROMPT, 6)


def check_healthy(req: Request) -> None:
    assert req.status is Status.FINISHED and list(req.output_ids) == recalled_answer(req)


@LOOPS
@pytest.mark.parametrize(
    ("tokens", "most", "reason"),
    [
        ([], 4, "empty prompt"),
        (range(300, 390), 40, "90 prompt + 40 new tokens exceed the context length of 128"),
        (
            range(300, 380),
            20,
            "80 prompt + 20 new tokens exceed the 94 of the KV pool's 96 tokens that one request may have",
        ),
        (
            range(300, 380),
            15,
            "80 prompt + 15 new tokens exceed the 94 of the KV pool's 96 tokens that one request may have",
        ),
    ],
)
def test_what_can_never_run_is_refused(
    tokens: range | list[int], most: int, reason: str, overlap: bool
) -> None:
    refused, other = request("refused", tokens, most), healthy()
    EngineRun(config(overlap=overlap, context_len=128, kv_tokens=96), recall=True).run([refused, other])
    assert refused.status is Status.REFUSED and refused.reason == reason
    assert refused.finished_at is not None and not refused.output_ids
    check_healthy(other)


def test_the_longest_that_fits_runs() -> None:
    longest = request("longest", range(300, 380), 14)
    EngineRun(config(context_len=128, kv_tokens=96), recall=True).run([longest])
    assert longest.status is Status.FINISHED and list(longest.output_ids) == recalled_answer(longest)


def test_an_invalid_pattern_is_refused() -> None:
    broken = request("broken", PROMPT, sampling=SamplingParams(grammar=("regex", ("[a-",))))
    other = healthy()
    EngineRun(config(), recall=True).run([broken, other])
    assert broken.status is Status.REFUSED and "[a-" in broken.reason
    check_healthy(other)


@LOOPS
def test_a_request_that_forbids_its_own_grammar_fails(overlap: bool) -> None:
    sampling = SamplingParams(grammar=("choice", ("no",)), min_new_tokens=5)
    contrary, other = request("contrary", PROMPT, 8, sampling=sampling), healthy()
    EngineRun(config(overlap=overlap), recall=True).run([contrary, other])
    assert contrary.status is Status.FAILED and "grammar" in contrary.reason
    assert bytes(list(contrary.output_ids[:2])) == b"no"
    check_healthy(other)


@LOOPS
def test_a_grammar_ends_its_request(overlap: bool) -> None:
    sampling = SamplingParams(grammar=("choice", ("no", "perhaps")), ignore_eos=True)
    spelled = request("spelled", PROMPT, 20, sampling=sampling)
    EngineRun(config(overlap=overlap), recall=True).run([spelled])
    assert spelled.reason == "grammar" and spelled.output_ids[-1] == EOS
    assert bytes(list(spelled.output_ids[:-1])) in (b"no", b"perhaps")


@LOOPS
@pytest.mark.parametrize("max_running", [1, 2], ids=["waiting", "running"])
def test_an_abort_during_settling(max_running: int, overlap: bool) -> None:
    """It comes from the callback that a client's script uses."""
    other, victim = healthy(), request("victim", range(400, 440), 20)
    engine_run = EngineRun(config(overlap=overlap, max_running_requests=max_running), recall=True)

    class Aborting(Observer):
        def tokens(self, requests: Sequence[Request], count: int) -> None:  # noqa: ARG002
            if other in requests and len(other.output_ids) == 3:
                engine_run.current.abort(victim, "enough")

    engine_run.observer = Aborting()
    engine_run.run([other, victim])
    assert victim.status is Status.ABORTED and victim.reason == "enough"
    assert (len(victim.output_ids) > 0) == (max_running == 2) and len(victim.output_ids) < 8
    assert list(victim.output_ids) == recalled_answer(victim)[: len(victim.output_ids)]
    check_healthy(other)


class Announcements(Observer):
    """Records which requests got tokens together, and the ends between them."""

    def __init__(self) -> None:
        self.seen: list[list[str] | str] = []

    def tokens(self, requests: Sequence[Request], count: int) -> None:
        assert count == 1
        self.seen.append([req.id for req in requests])

    def ending(self, request: Request) -> None:
        self.seen.append(request.id)


@LOOPS
def test_tokens_of_a_decode_are_announced_together_up_to_an_end(overlap: bool) -> None:
    reqs = [
        request(name, PROMPT, count, index=i)
        for i, (name, count) in enumerate(zip("abc", (6, 5, 6), strict=True))
    ]
    observer = Announcements()
    EngineRun(config(overlap=overlap), recall=True, observer=observer).run(reqs)
    at = observer.seen.index("b")
    assert observer.seen[at - 2 : at + 2] == [["a", "b", "c"], ["a", "b"], "b", ["c"]]


@LOOPS
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_token_that_stops_a_request_ends_it_behind_others(overlap: bool, ignore_eos: bool) -> None:
    """The fourth token of the answer is made a stop token, or the model's end of a text, which may be ignored."""
    answer = recalled_answer(request("free", PROMPT, 6))
    assert answer[3] not in answer[:3]
    own = request("own", PROMPT, 6, sampling=SamplingParams(stop_token_ids=(answer[3],)))
    shared = request("shared", PROMPT, 6, sampling=SamplingParams(ignore_eos=ignore_eos))
    EngineRun(config(overlap=overlap), recall=True).run([own])
    EngineRun(config(overlap=overlap, eos_token_ids=(answer[3],)), recall=True).run([shared])
    assert own.reason == "stop" and list(own.output_ids) == answer[:4]
    assert shared.reason == ("length" if ignore_eos else "stop")
    assert list(shared.output_ids) == (answer if ignore_eos else answer[:4])


@LOOPS
def test_only_the_first_and_the_last_token_need_the_rules_of_ends(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, since each token of each request is asked about."""
    asked: list[int] = []
    rules = settle._ending

    def counted(req: Request, token: int, eos: Collection[int]) -> tuple[Status, str] | None:
        asked.append(token)
        return rules(req, token, eos)

    monkeypatch.setattr(settle, "_ending", counted)
    req = request("long", PROMPT, 12)
    EngineRun(config(overlap=overlap), recall=True).run([req])
    assert len(req.output_ids) == 12 and asked == [req.output_ids[0], req.output_ids[-1]]


@LOOPS
def test_a_request_aborted_with_its_token_ends_with_it(overlap: bool) -> None:
    victim, other = request("victim", range(400, 440), 20), healthy()

    class Aborting(Observer):
        def tokens(self, requests: Sequence[Request], count: int) -> None:  # noqa: ARG002
            if victim in requests and len(victim.output_ids) == 3:
                victim.end_with_next_token("enough")

    EngineRun(config(overlap=overlap), recall=True, observer=Aborting()).run([victim, other])
    assert victim.status is Status.ABORTED and len(victim.output_ids) == 3
    check_healthy(other)


@LOOPS
def test_a_request_that_arrives_aborted_never_runs(overlap: bool) -> None:
    gone, other = request("gone", PROMPT), healthy()
    gone.to_finish = "the client had left"
    engine_run = EngineRun(config(overlap=overlap), recall=True)
    engine_run.run([gone, other])
    assert gone.status is Status.ABORTED and gone.reason == "the client had left"
    assert gone.first_scheduled_at is None
    check_healthy(other)


@LOOPS
def test_an_abort_between_chunks_ends_at_the_first_token(overlap: bool) -> None:
    victim, other = request("victim", range(300, 400), 20), healthy()

    def watch(scheduler: Scheduler) -> None:
        if scheduler.chunked_req is victim and not victim.to_finish:
            scheduler.abort(victim, "enough")

    EngineRun(config(overlap=overlap, chunked_prefill_size=16), recall=True, watch=watch).run([victim, other])
    assert victim.status is Status.ABORTED and len(victim.output_ids) == 1
    check_healthy(other)


@LOOPS
def test_an_abort_after_retraction_ends_at_once(overlap: bool) -> None:
    crowd = [request(f"r{i}", range(300 + 20 * i, 310 + 20 * i), 40, index=i) for i in range(6)]
    tight = config(overlap=overlap, kv_tokens=120, schedule_conservativeness=0.02)
    aborted: list[Request] = []

    def watch(scheduler: Scheduler) -> None:
        for req in scheduler.waiting_queue:
            if req.retraction_count and req.status is Status.WAITING and not aborted:
                aborted.append(req)
                scheduler.abort(req, "enough")
                assert req.status is Status.ABORTED

    EngineRun(tight, recall=True, watch=watch).run(crowd)
    assert aborted
    for req in crowd:
        answer = recalled_answer(req)
        assert list(req.output_ids) == (answer[: len(req.output_ids)] if req in aborted else answer)


def test_an_abort_before_retraction_ends_with_it() -> None:
    crowd = [request(f"r{i}", range(300 + 20 * i, 310 + 20 * i), 40, index=i) for i in range(6)]
    tight = config(kv_tokens=120, schedule_conservativeness=0.02)
    seen: dict[str, int] = {}

    class Ended(Observer):
        def retracted(self, request: Request) -> None:
            if not seen:
                seen[request.id] = len(request.output_ids)
                request.end_with_next_token("enough")

    EngineRun(tight, recall=True, observer=Ended()).run(crowd)
    [(victim, tokens)] = seen.items()
    [req] = [req for req in crowd if req.id == victim]
    assert req.status is Status.ABORTED and len(req.output_ids) == tokens


def test_ending_twice_is_an_error() -> None:
    done = healthy()
    engine_run = EngineRun(config(), recall=True)
    scheduler = engine_run.scheduler([done])
    scheduler.receive()
    scheduler.abort(done, "enough")
    scheduler.abort(done, "again")
    assert done.reason == "enough" and len(engine_run.source.ended_requests) == 1

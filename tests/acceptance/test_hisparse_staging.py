"""A request whose prompt is being copied to the host waits before its first decode: a slow copy, retraction and abort
in that phase."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from schedbench.profiles.record.result import Result
from schedbench.sched.hisparse.coordinator import Coordinator
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.request import Request
from tests.acceptance.cells import Ask
from tests.acceptance.runs import digest_of, known_result, result_of, statuses, value

SMALL = (
    "workload.requests=8",
    "workload.arrival=burst",
    "workload.prompt_tokens={dist: uniform, min: 4, max: 60}",
    "workload.output_tokens={dist: uniform, min: 20, max: 60}",
    "measure.warmup_requests=0",
    "engine.max_running_requests=8",
    "engine.chunked_prefill_size=96",
    "engine.relay=latest",
)
LOOPS = pytest.mark.parametrize("loop", ["engine.overlap=true", "engine.overlap=false"])


def run(*overrides: str) -> Result:
    return result_of("hisparse", *SMALL, *overrides)


plain = partial(
    known_result,
    "hisparse",
    *SMALL,
    *("engine.hisparse={enabled: false}", "engine.kv_tokens=8192", "engine.overlap=false"),
)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only every eighth poll of the host reports finished copies."""
    look: Callable[[Coordinator], list[Request]] = Coordinator.collect_ready_reqs
    looks = iter(range(1 << 30))

    def seldom(self: Coordinator) -> list[Request]:
        return look(self) if next(looks) % 8 == 7 else []

    monkeypatch.setattr(Coordinator, "collect_ready_reqs", seldom)


@LOOPS
@pytest.mark.usefixtures("slow")
def test_a_slow_copy_changes_no_token(loop: str) -> None:
    assert digest_of(run(loop)) == digest_of(plain())


@LOOPS
def test_a_staged_request_is_retracted_for_the_last_decode(
    monkeypatch: pytest.MonkeyPatch, ask_anew: Ask, loop: str
) -> None:
    """Its copy is not reported while another request decodes."""
    look, release, waited = Coordinator.collect_ready_reqs, Coordinator.release, []

    def late(self: Coordinator) -> list[Request]:
        return [] if self._buffer_sizes else look(self)

    def noted(self: Coordinator, req: Request) -> None:
        waited.append(self.is_staging(req))
        release(self, req)

    monkeypatch.setattr(Coordinator, "collect_ready_reqs", late)
    monkeypatch.setattr(Coordinator, "release", noted)
    model = ("model.preset=tiny-sparse", "engine.radix_cache=false", "engine.relay=latest", loop)
    hosted = (
        "engine.hisparse={enabled: true, device_buffer_size: 48, host_ratio: 1.0}",
        "engine.kv_tokens=160",
        "engine.schedule_conservativeness=0.01",
    )
    growing = [(20, 100, 0), (60, 20, 1)]
    result = ask_anew(growing, *model, *hosted)
    assert waited == [True, False, False] and value(result, "retractions") == 1
    assert statuses(result) == {"finished"}
    assert digest_of(result) == digest_of(ask_anew(growing, *model))


@LOOPS
@pytest.mark.usefixtures("slow")
def test_a_request_aborted_during_staging_ends_at_once(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    """The other requests have the same tokens as without the aborts."""
    absorb = Scheduler.absorb_last_batch
    aborted: list[str] = []

    def abort_staged(self: Scheduler) -> None:
        waiting = [req for req in self.engine.tier.absent if self.engine.tier.is_staging(req)]
        if len(aborted) < 3 and waiting:
            self.abort(waiting[-1], "the client disconnected")
            aborted.append(waiting[-1].id)
        absorb(self)

    monkeypatch.setattr(Scheduler, "absorb_last_batch", abort_staged)
    result = run(loop)
    monkeypatch.undo()
    whole = plain()
    assert len(aborted) == 3 and statuses(result) == {"finished", "aborted"}
    for row, other in zip(result.requests, whole.requests, strict=True):
        assert row.token_ids is not None and other.token_ids is not None
        if row.id in aborted:
            assert (row.status, row.reason, row.output_tokens) == ("aborted", "the client disconnected", 1)
        assert row.token_ids == other.token_ids[: len(row.token_ids)]
        assert row.id in aborted or row.token_ids == other.token_ids

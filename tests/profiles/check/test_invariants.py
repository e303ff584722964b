"""The invariants of every run: none is violated in a correct run, and each violation is reported with its place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from schedbench.profiles.check.batch_invariants import Violation, Violations
from schedbench.profiles.check.invariants import Invariants, WatchedLink
from schedbench.profiles.platform.machine import Machine
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Result
from schedbench.sched.loop import launch, settle
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.model.grammar import GrammarState
from schedbench.sched.observe import Observer
from schedbench.sched.request import Request
from tests.acceptance.runs import resolved

MIXING, JOINING = "faults/mixing", "faults/joining"


def guarded(scenario: str, *overrides: str) -> Sequence[Violation]:
    invariants = Invariants()
    run(scenario, *overrides, guard=invariants)
    return invariants.violations()


def run(scenario: str, *overrides: str, guard: Invariants | None = None) -> Result:
    question = resolved(scenario, *overrides)
    return execute(question, Options(device="vgpu"), guard=guard)


# Whole runs of every state are guarded in test_ladder_tokens.py.


@pytest.mark.wide
@pytest.mark.parametrize(
    "overrides",
    [
        ("engine.page_size=16",),
        ("engine.radix_cache=false",),
        ("engine.cuda_graph=false", "measure.warmup_requests=3"),
        ("device.values=none",),
        ("engine.kv_tokens=256", "engine.schedule_conservativeness=0.05", "workload.output_tokens.max=60"),
        ("workload.sampling.temperature=0.8", "workload.sampling.presence_penalty=0.5"),
        ("workload.abort={fraction: 0.5, after_tokens: 3}",),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(("scenario", "state"), [(MIXING, "latest"), (JOINING, "pr25944")])
def test_invariants_hold_for_other_settings(scenario: str, state: str, overrides: tuple[str, ...]) -> None:
    assert not guarded(scenario, f"engine.relay={state}", *overrides)


def test_checking_invariants_changes_nothing() -> None:
    plain, seen = (run(MIXING, guard=guard).document() for guard in (None, Invariants()))
    for part in ("run", "environment"):
        del plain[part], seen[part]
    assert plain == seen


# ---- damage ------------------------------------------------------------------------------------------------


class Damaging(Invariants):
    """Does ``damage`` once, between two decodes of several requests, and then checks."""

    step = -1  # the step planned next

    @contextmanager
    def watching(self, scheduler: Scheduler, machine: Machine) -> Iterator[Observer]:
        with super().watching(scheduler, machine) as listener:
            yield _Damaging(self, listener, scheduler, machine)

    def damage(self, scheduler: Scheduler, machine: Machine) -> None:
        raise NotImplementedError


class _Damaging(Observer):
    def __init__(self, guard: Damaging, listener: Observer, scheduler: Scheduler, machine: Machine) -> None:
        self._guard = guard
        self._scheduler = scheduler
        self._machine = machine
        for hook in ("tokens", "retracted", "launched", "settled", "ended"):
            setattr(self, hook, getattr(listener, hook))
        self._listener = listener

    def range(self, name: str, step: int, size: int):
        running = self._scheduler.running_batch
        between = name == "receive" and running is self._scheduler.last_batch and running.batch_size > 1
        if between and self._guard.step < 0:
            self._guard.step = step
            self._guard.damage(self._scheduler, self._machine)
        return self._listener.range(name, step, size)


def found(guard: Invariants, *overrides: str) -> dict[tuple[str, str], Violation]:
    run(MIXING, *overrides, guard=guard)
    return {(violation.promise, violation.field): violation for violation in guard.violations()}


class WrongMirror(Damaging):
    def damage(self, scheduler: Scheduler, machine: Machine) -> None:  # noqa: ARG002
        scheduler.running_batch.seq_lens_cpu = scheduler.running_batch.seq_lens_cpu + 1


def test_a_wrong_mirror_is_reported_with_its_request() -> None:
    violations = found(WrongMirror())
    violation = violations["mirrors equal device values", "seq_lens"]
    assert re.search(r"seq_lens of request r\d+ is ", violation.says)
    assert ("mirrors equal the requests' values", "seq_lens_cpu") in violations


class OtherToken(Damaging):
    def damage(self, scheduler: Scheduler, machine: Machine) -> None:
        buffer = machine.peek(scheduler.engine.relay.context.futures.output_tokens_buf)
        row = scheduler.running_batch.reqs[0].req_pool_idx
        buffer[row] = (buffer[row] + 1) % scheduler.engine.config.vocab_size


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_another_token_than_sampled_is_reported_with_its_row(overlap: str) -> None:
    guard = OtherToken()
    violations = found(guard, f"engine.overlap={overlap}")
    [violation] = [v for (promise, _), v in violations.items() if promise.startswith("a step is fed")]
    assert re.match(rf"step {guard.step}, request r\d+, position .* of the relay gave token", violation.says)


class OtherSlot(Damaging):
    def damage(self, scheduler: Scheduler, machine: Machine) -> None:
        table = machine.peek(scheduler.engine.slots.req_to_token)
        request = scheduler.running_batch.reqs[-1]
        other = scheduler.running_batch.reqs[0]
        table[request.req_pool_idx, request.kv_committed_len - 1] = table[
            other.req_pool_idx, other.kv_committed_len - 1
        ]


# Several numbers belong to one step, and a pool of that size is checked before every third step.
SPECULATING = (
    "model={preset: tiny-llama-eagle}",
    "engine.mixed_chunk=false",
    "engine.kv_tokens=8192",
    "engine.speculative={algorithm: eagle, mode: v2}",
)


@pytest.mark.parametrize(("overrides", "within"), [((), 0), (SPECULATING, 6)], ids=["plain", "speculating"])
def test_a_page_with_two_owners_is_reported(overrides: tuple[str, ...], within: int) -> None:
    guard = OtherSlot()
    violation = found(guard, *overrides)["every page and row is in one place", "kv"]
    reported = re.match(r"before step (\d+): pages owned twice: \[\d", violation.says)
    assert reported and guard.step <= int(reported[1]) <= guard.step + within


class OtherPrefix(Damaging):
    def damage(self, scheduler: Scheduler, machine: Machine) -> None:
        request = scheduler.running_batch.reqs[-1]
        assert request.cache_protected_len
        machine.peek(scheduler.engine.slots.req_to_token)[request.req_pool_idx, 0] = 0


def test_a_row_that_leaves_its_cached_prefix_is_reported() -> None:
    guard = OtherPrefix()
    violation = found(guard)["every page and row is in one place", "kv"]
    assert re.match(rf"before step {guard.step}: the row of request r\d+ has other slots", violation.says)


class KVOfUnknownTokens(Damaging):
    def damage(self, scheduler: Scheduler, machine: Machine) -> None:  # noqa: ARG002
        scheduler.running_batch.reqs[0].kv_committed_len += 2


def test_committed_kv_of_unknown_tokens_is_reported() -> None:
    violation = found(KVOfUnknownTokens(), *SPECULATING)[
        "committed KV is of known tokens", "kv_committed_len"
    ]
    assert re.match(r"request r\d+ has committed KV of \d+ tokens, but has \d+", violation.says)


class LostRow(Damaging):
    def damage(self, scheduler: Scheduler, machine: Machine) -> None:  # noqa: ARG002
        scheduler.engine.slots.alloc(1)


def test_a_row_that_is_not_returned_is_reported() -> None:
    violations = found(LostRow(), "engine.max_running_requests=14")
    assert ("every page and row is in one place", "kv") in violations
    assert violations["nothing in flight at the end", "rows that are held"].says == (
        "at the end there are 1 rows that are held"
    )


class RowOfAWaitingRequest(Damaging):
    def damage(self, scheduler: Scheduler, machine: Machine) -> None:  # noqa: ARG002
        [scheduler.waiting_queue[0].req_pool_idx] = scheduler.engine.slots.alloc(1)


def test_a_row_of_a_waiting_request_is_reported() -> None:
    guard = RowOfAWaitingRequest()
    with suppress(AssertionError):  # the request cannot be admitted
        run(MIXING, "engine.kv_tokens=256", guard=guard)
    [violation] = (found for found in guard.violations() if found.field == "kv")
    assert re.match(r"before step \d+: rows owned twice: \[\], lost: \[\d+\]", violation.says)


STAGED = ("engine.relay=latest", "engine.pipeline={stages: 3}", "model={preset: tiny-deep}")


def test_tensors_that_are_sent_and_never_released_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flushes no buffer is reused too early; the link keeps all tensors, more with each step."""
    assert not guarded("faults/staging", *STAGED)
    monkeypatch.setattr(WatchedLink, "flush", lambda *_: None)
    found = {violation.field: violation for violation in guarded("faults/staging", *STAGED)}
    assert set(found) == {"proxy", "output"}
    assert found["proxy"].promise == "sent tensors are released"
    assert "rank 0 keeps the tensors of all " in found["proxy"].says


class RepeatedEnd(Observer):
    """Passes on one ending twice."""

    def __init__(self, listener: Observer) -> None:
        self._listener = listener

    def ended(self, request: Request) -> None:
        for _ in range(2 if request.id == "r3" else 1):
            self._listener.ended(request)


class InvariantsWithRepeatedEnd(Invariants):
    @contextmanager
    def watching(self, scheduler: Scheduler, machine: Machine) -> Iterator[Observer]:
        with super().watching(scheduler, machine) as listener:
            yield RepeatedEnd(listener)


def test_a_request_that_ends_twice_is_reported() -> None:
    assert (
        found(InvariantsWithRepeatedEnd())["a request ends once", "status"].says == "request r3 ended 2 times"
    )


def test_the_first_violation_of_a_kind_is_reported_and_others_are_counted() -> None:
    violations = Violations()
    violations.add(Violation("rows", "seq_lens", f"step {step}") for step in range(4))
    violations.add([Violation("rows", "input_ids", "step 9")])
    assert [violation.says for violation in violations.found()] == ["step 0 (and 3 more like it)", "step 9"]


def test_a_request_that_ends_late_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = settle._ending

    def late(req: Request, token: int, eos: Sequence[int]) -> object:
        return None if len(req.output_ids) == req.sampling.max_new_tokens else ending(req, token, eos)

    monkeypatch.setattr(settle, "_ending", late)
    [found] = guarded(MIXING, "engine.overlap=false", "workload.requests=2")
    assert found.promise == "a request ends where it asked to"
    assert re.match(
        r"request \w+ ended \(length\) with (\d+) of at most (?!\1)\d+ tokens, and no stop", found.says
    )


def test_a_token_that_its_grammar_does_not_allow_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarState, "copy", lambda state: GrammarState(state.matcher, state.eos_token_ids))
    [found] = guarded("grammar", "workload.requests=12")
    assert found.promise == "a grammar allows the tokens"
    assert re.match(
        r"request \w+: its grammar does not allow token \d+ as number \d+ of its output", found.says
    )


def test_a_bound_below_a_length_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "largest", lambda lens: int(lens.max()) - 1)
    found = guarded(MIXING, "engine.overlap=false", "workload.requests=2")
    assert {(one.promise, one.field) for one in found} == {
        ("the host's bounds hold all lengths", "max_seq_len")
    }

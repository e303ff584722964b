"""The invariants of every run: none is violated in a correct run, and each violation is reported with its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

import pytest

from schedbench.profiles.check.batch_invariants import Violation, Violations
from schedbench.profiles.check.invariants import Invariants, WatchedLink
from schedbench.profiles.platform.machine import Machine
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Result
from schedbench.profiles.run.system import ObserverGroup
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


Damage = Callable[[Scheduler, Machine], None]


class Damaging(Invariants):
    """Does ``damage`` once, between two decodes of several requests, and then checks."""

    def __init__(self, damage: Damage) -> None:
        super().__init__()
        self.damage = damage
        self.step = -1  # the step planned next

    @contextmanager
    def watching(self, scheduler: Scheduler, machine: Machine) -> Iterator[Observer]:
        guard = self

        class BetweenDecodes(Observer):
            def range(self, name: str, step: int, size: int) -> AbstractContextManager[object]:
                running = scheduler.running_batch
                between = name == "receive" and running is scheduler.last_batch and running.batch_size > 1
                if between and guard.step < 0:
                    guard.step = step
                    guard.damage(scheduler, machine)
                return super().range(name, step, size)

        with super().watching(scheduler, machine) as listener:
            yield ObserverGroup(BetweenDecodes(), listener)


def wrong_mirror(scheduler: Scheduler, machine: Machine) -> None:  # noqa: ARG001
    scheduler.running_batch.seq_lens_cpu = scheduler.running_batch.seq_lens_cpu + 1


def other_token(scheduler: Scheduler, machine: Machine) -> None:
    buffer = machine.peek(scheduler.engine.relay.context.futures.output_tokens_buf)
    row = scheduler.running_batch.reqs[0].req_pool_idx
    buffer[row] = (buffer[row] + 1) % scheduler.engine.config.vocab_size


def other_slot(scheduler: Scheduler, machine: Machine) -> None:
    table = machine.peek(scheduler.engine.slots.req_to_token)
    request = scheduler.running_batch.reqs[-1]
    other = scheduler.running_batch.reqs[0]
    table[request.req_pool_idx, request.kv_committed_len - 1] = table[
        other.req_pool_idx, other.kv_committed_len - 1
    ]


def other_prefix(scheduler: Scheduler, machine: Machine) -> None:
    request = scheduler.running_batch.reqs[-1]
    assert request.cache_protected_len
    machine.peek(scheduler.engine.slots.req_to_token)[request.req_pool_idx, 0] = 0


def kv_of_unknown_tokens(scheduler: Scheduler, machine: Machine) -> None:  # noqa: ARG001
    scheduler.running_batch.reqs[0].kv_committed_len += 2


def lost_row(scheduler: Scheduler, machine: Machine) -> None:  # noqa: ARG001
    scheduler.engine.slots.alloc(1)


def row_of_a_waiting_request(scheduler: Scheduler, machine: Machine) -> None:  # noqa: ARG001
    [scheduler.waiting_queue[0].req_pool_idx] = scheduler.engine.slots.alloc(1)


# Several numbers belong to one step, and a pool of that size is checked before every third step.
SPECULATING = (
    "model={preset: tiny-llama-eagle}",
    "engine.mixed_chunk=false",
    "engine.kv_tokens=8192",
    "engine.speculative={algorithm: eagle, mode: v2}",
)
FED = r"a step is fed .*: step STEP, request r\d+, position .* of the relay gave token"
OWNED = "every page and row is in one place, kv: "


def reported(guard: Invariants) -> list[str]:
    return [f"{found.promise}, {found.field}: {found.says}" for found in guard.violations()]


@pytest.mark.parametrize(
    ("damage", "overrides", "says"),
    [
        (wrong_mirror, (), r"mirrors equal device values, seq_lens: .*seq_lens of request r\d+ is "),
        (wrong_mirror, (), "mirrors equal the requests' values, seq_lens_cpu: "),
        (other_token, ("engine.overlap=true",), FED),
        (other_token, ("engine.overlap=false",), FED),
        (other_prefix, (), rf"{OWNED}before step STEP: the row of request r\d+ has other slots"),
        (
            kv_of_unknown_tokens,
            SPECULATING,
            r"committed KV is of known tokens, kv_committed_len: "
            r"request r\d+ has committed KV of \d+ tokens, but has \d+",
        ),
        (lost_row, ("engine.max_running_requests=14",), OWNED),
        (
            lost_row,
            ("engine.max_running_requests=14",),
            "nothing in flight at the end, rows that are held: at the end there are 1 rows that are held$",
        ),
    ],
)
def test_damage_is_reported_with_its_place(damage: Damage, overrides: tuple[str, ...], says: str) -> None:
    guard = Damaging(damage)
    run(MIXING, *overrides, guard=guard)
    found = reported(guard)
    assert len([one for one in found if re.match(says.replace("STEP", str(guard.step)), one)]) == 1, found


@pytest.mark.parametrize(("overrides", "within"), [((), 0), (SPECULATING, 6)], ids=["plain", "speculating"])
def test_a_page_with_two_owners_is_reported(overrides: tuple[str, ...], within: int) -> None:
    guard = Damaging(other_slot)
    run(MIXING, *overrides, guard=guard)
    [step] = re.findall(
        rf"^{OWNED}before step (\d+): pages owned twice: \[\d", "\n".join(reported(guard)), re.M
    )
    assert guard.step <= int(step) <= guard.step + within


def test_a_row_of_a_waiting_request_is_reported() -> None:
    guard = Damaging(row_of_a_waiting_request)
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


class InvariantsWithRepeatedEnd(Invariants):
    @contextmanager
    def watching(self, scheduler: Scheduler, machine: Machine) -> Iterator[Observer]:
        with super().watching(scheduler, machine) as listener:

            class Repeating(Observer):
                def ended(self, request: Request) -> None:
                    if request.id == "r3":
                        listener.ended(request)

            yield ObserverGroup(listener, Repeating())


def test_a_request_that_ends_twice_is_reported() -> None:
    guard = InvariantsWithRepeatedEnd()
    run(MIXING, guard=guard)
    assert reported(guard) == ["a request ends once, status: request r3 ended 2 times"]


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

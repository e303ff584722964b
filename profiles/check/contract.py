"""The contract of a row of relay policies, checked on scripted batches without a model, a device or a scenario.

A row keeps the contract if, whatever is done to the batches, each step gets the right tokens in the right order and
the host's mirrors stay correct; prompts pass unchanged; merging with a batch without tokens loses none of the other's;
and a step without requests changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, cast

import torch

from ...sched.batch import DraftInput, DraftState, ScheduleBatch
from ...sched.relay.choice import RelayChoice
from ...sched.relay.row import Relay, RelayRow, Speculation
from ...sched.relay.states import NEGATIVE_IDS, ONE_SIDED_MERGE
from ..run.crash import crash_of, exits_are_crashes
from .batch_invariants import PROMPTS, Violation, Violations
from .scripted_drafts import DraftSetup, token_of
from .scripted_engine import CHUNK, ScriptedEngine

Verb = Literal["prefill", "chunks", "decode", "mix", "leave", "retract", "idle"]


class BatchAction(NamedTuple):
    """``numbers`` are lengths of prompts, or indices of requests. Written ``prefill 5 3``."""

    verb: Verb
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.verb, *map(str, self.numbers)])

    @classmethod
    def of(cls, text: str) -> BatchAction:
        verb, *numbers = text.split()
        return cls(cast(Verb, verb), tuple(map(int, numbers)))


Script = Sequence[BatchAction]

DECODE = BatchAction("decode")
IDLE = BatchAction("idle")
SCRIPTS: Mapping[str, Script] = {
    name: [BatchAction.of(action) for action in text.split(",")]
    for name, text in {
        "decoding": "prefill 5 3 7, decode, decode, decode",
        "joining": "prefill 5 3, decode, prefill 4, decode, prefill 2 6, decode, decode",
        "leaving": "prefill 5 3 4 6, decode, leave 1 3, decode, prefill 7 2, decode",
        "leaving with the prompt": "prefill 5 3, decode, prefill 4 4, leave 2 3, decode, prefill 6, decode",
        "mixing": "prefill 5 3, decode, mix 4 20, mix 6, decode, decode",
        "idling": "idle, prefill 5 3, idle, decode, idle, decode, mix 4, idle, decode",
        "retracting": "prefill 5 3 4 6, decode, retract 3 0 2, decode, mix 9, decode",
        "prompts in chunks": f"prefill 5, {f'chunks {3 * CHUNK + 2}, ' * 7}decode, leave 0 2 4, decode",
    }.items()
}
ANY_PROMPT = "prompts pass, negative ids too"
BARE_SIDE = "merging with a batch without tokens loses none"
# How each declared defect of upstream's states shows: the promise that it breaks, and the sentence of the violation.
DEFECTS: Mapping[str, tuple[str, str]] = {
    NEGATIVE_IDS: (
        ANY_PROMPT,
        r"step \d+, request r\d+(, position \d+: the prompt's token is"
        r"|: its draft is extended at position \d+ by) \d+, not -\d+",
    ),
    ONE_SIDED_MERGE: (
        BARE_SIDE,
        r"merging a batch with its tokens with one without: TypeError: the side that joins carries no token ids .*"
        r"|merging a batch without its tokens with one with(out)?: AssertionError.*"
        r"\(at sched/relay/(tokens|penalties)\.py:\d+: assert batch\.(input|output)_ids is not None.*",
    ),
}


class ContractResult(NamedTuple):
    """``known`` are the violated promises that are the state's declared defects, by defect; ``broken`` are all
    others."""

    known: tuple[str, ...]
    broken: tuple[Violation, ...]


@exits_are_crashes()
def check_contract(
    row: Callable[[], RelayRow],
    *,
    overlap: bool,
    declared: Sequence[str] = (),
    drafts: Callable[[], DraftSetup] | None = None,
) -> ContractResult:
    """``row`` makes a new row for each script, since a policy may have state; so does ``drafts`` for speculation."""
    violations, known = Violations(), set[str]()

    def note(found: Iterable[Violation]) -> None:
        for violation in found:
            defect = _defect(violation)
            if defect in declared:
                known.add(defect)
            else:
                violations.add([violation])

    def engine() -> ScriptedEngine:
        return ScriptedEngine(row(), overlap=overlap, drafts=None if drafts is None else drafts())

    for name, script in _scripts(speculating=drafts is not None).items():
        found = followed(engine(), script)
        note(violation._replace(says=f"{name}: {violation.says}") for violation in found)
    note(_negative_ids(engine()))
    note(_no_rows(engine().engine.relay))
    if drafts is None:  # with speculation no batch has its tokens
        for left in (True, False):
            for right in (True, False):
                note(_sides(engine(), left=left, right=right))
    return ContractResult(tuple(name for name in declared if name in known), tuple(violations.found()))


def _defect(violation: Violation) -> str:
    """The declared defect that shows so; empty if none does."""
    return next(
        (
            defect
            for defect, (promise, says) in DEFECTS.items()
            if violation.promise == promise and re.fullmatch(says, violation.says, re.DOTALL)
        ),
        "",
    )


def speculating(relay: RelayChoice, mode: Speculation) -> DraftSetup:
    """A new setup of the worker for that relay."""
    row = relay.draft_row(mode)
    assert row is not None
    return DraftSetup(mode, row)


def _scripts(*, speculating: bool) -> Mapping[str, Script]:
    """With speculation there are no mixed steps."""
    if not speculating:
        return SCRIPTS
    unmixed = {name: [act for act in script if act.verb != "mix"] for name, script in SCRIPTS.items()}
    return {name: script for name, script in unmixed.items() if name != "mixing"}


def followed(scripted: ScriptedEngine, script: Script) -> Sequence[Violation]:
    """The violations of the engine's row in a script, up to a crash."""
    for number, act in enumerate(script):
        with _attempted("every step can be made", act.verb, f"action {number} ({act}) crashed") as crashes:
            _do(scripted, act)
        if crashes:
            return [*scripted.found, *crashes]
    return scripted.found


@contextmanager
def _attempted(promise: str, field: str, says: str) -> Iterator[Sequence[Violation]]:
    """Has the violation that a crash of the block is, if it crashed."""
    crashes: list[Violation] = []
    try:
        with exits_are_crashes(), torch.no_grad():
            yield crashes
    except Exception as error:
        crashes.append(Violation(promise, field, f"{says}: {crash_of(error)}"))


def _do(scripted: ScriptedEngine, act: BatchAction) -> None:
    match act.verb:
        case "prefill":
            scripted.prefill([_prompt(length) for length in act.numbers])
        case "mix":
            scripted.mix([_prompt(length) for length in act.numbers])
        case "chunks":
            scripted.chunks(_prompt(act.numbers[0]))
        case "decode":
            scripted.decode()
        case "idle":
            scripted.idle()
        case "leave":
            scripted.leave(act.numbers)
        case "retract":
            scripted.retract(act.numbers)


def _prompt(length: int) -> list[int]:
    return [100 + 13 * place for place in range(length)]


# ---- prompts, sides, no rows -----------------------------------------------------------------------------------


def _negative_ids(scripted: ScriptedEngine) -> Iterator[Violation]:
    """Negative ids stand for input other than text. All rows of the relay are in use when the prompt passes."""
    with _attempted(ANY_PROMPT, "input_ids", "a prompt with ids below zero") as crashes:
        scripted.prefill([_prompt(4)] * 3)
        scripted.decode()
        scripted.prefill([[7, -1, -3, -2, 8]])
    for violation in scripted.found:
        yield violation._replace(promise=ANY_PROMPT) if violation.promise == PROMPTS else violation
    yield from crashes


def _sides(scripted: ScriptedEngine, *, left: bool, right: bool) -> Iterator[Violation]:
    """Merge two batches, each with or without its tokens; then decode."""
    promise = "batches with their tokens are merged" if left and right else BARE_SIDE
    says = f"merging a batch {_with(left)} its tokens with one {_with(right)}"
    with _attempted(promise, "input_ids", says) as crashes:
        scripted.prefill([_prompt(5), _prompt(3)])
        scripted.decode()
        scripted.prefill([_prompt(4)])
        assert scripted.last is not None
        _set_tokens(scripted.running, present=left)
        _set_tokens(scripted.last, present=right)
        scripted.decode()
    for violation in scripted.found:
        yield violation._replace(promise=promise, says=f"{says}: {violation.says}")
    yield from crashes


def _with(present: bool) -> str:
    return "with" if present else "without"


def _set_tokens(batch: ScheduleBatch, *, present: bool) -> None:
    """Put each request's next input into the batch, or nothing. A placeholder counts as its token."""
    if not present:
        batch.input_ids = batch.output_ids = None
    elif batch.input_ids is None and batch.output_ids is None:
        batch.input_ids = torch.tensor([token_of(req, req.kv_committed_len) for req in batch.reqs])


def _no_rows(relay: Relay) -> Iterator[Violation]:
    """A step without requests, whose tensors may be padded, does not change the relay."""
    promise = "a step without requests changes nothing"
    futures = relay.context.futures
    before = {name: value.clone() for name, value in vars(futures).items() if torch.is_tensor(value)}
    with _attempted(promise, "stash", "a step without requests") as crashes:
        _step_without_requests(relay)
    yield from crashes
    for name, value in before.items():
        if not torch.equal(getattr(futures, name), value):
            yield Violation(promise, name, f"a step without requests writes to {name}")


def _step_without_requests(relay: Relay) -> None:
    batch = ScheduleBatch.empty()
    batch.req_pool_indices = batch.seq_lens = torch.empty(0, dtype=torch.int64)
    future = relay.open(batch)
    if relay.drafts is not None:
        relay.drafts.publish(batch, batch.seq_lens)
        relay.drafts.stash(future, DraftInput(batch.seq_lens, DraftState(*[batch.seq_lens] * 3)))
        return
    relay.publish(batch)
    relay.stash(future, torch.tensor([5, 6]))

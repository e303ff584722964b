"""What any row of relay policies promises, on batches made by hand: no model, no device, no scenario.

A row keeps the contract if, whatever is done to the batches, every step is fed the right tokens in the right order and
the host's mirrors stay true; prompts pass as they are; a side without tokens does not lose the other's; no rows are
no work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from ...sched.batch import DraftInput, DraftState, ScheduleBatch
from ...sched.relay.choice import RelayChoice
from ...sched.relay.draft_row import Speculation
from ...sched.relay.known import NEGATIVE_IDS, ONE_SIDED_MERGE
from ...sched.relay.row import Relay, RelayRow
from ..run.crash import crash_of
from .forward_invariants import PROMPTS
from .scripted_drafts import Speculating, token_of
from .scripted_engine import CHUNK, Workbench
from .violations import Violation, Violations

Verb = Literal["prefill", "chunks", "decode", "mix", "leave", "retract", "idle"]


class Act(NamedTuple):
    """``numbers``: lengths of prompts, or places of requests."""

    verb: Verb
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.verb, *map(str, self.numbers)])


Script = Sequence[Act]

DECODE = Act("decode")
IDLE = Act("idle")
SCRIPTS: Mapping[str, Script] = {
    "decoding": [Act("prefill", (5, 3, 7)), DECODE, DECODE, DECODE],
    "joining": [
        Act("prefill", (5, 3)),
        DECODE,
        Act("prefill", (4,)),
        DECODE,
        Act("prefill", (2, 6)),
        DECODE,
        DECODE,
    ],
    "leaving": [
        Act("prefill", (5, 3, 4, 6)),
        DECODE,
        Act("leave", (1, 3)),
        DECODE,
        Act("prefill", (7, 2)),
        DECODE,
    ],
    "leaving with the prompt": [
        Act("prefill", (5, 3)),
        DECODE,
        Act("prefill", (4, 4)),
        Act("leave", (2, 3)),
        DECODE,
        Act("prefill", (6,)),
        DECODE,
    ],
    "mixing": [Act("prefill", (5, 3)), DECODE, Act("mix", (4, 20)), Act("mix", (6,)), DECODE, DECODE],
    "idling": [IDLE, Act("prefill", (5, 3)), IDLE, DECODE, IDLE, DECODE, Act("mix", (4,)), IDLE, DECODE],
    "retracting": [
        Act("prefill", (5, 3, 4, 6)),
        DECODE,
        Act("retract", (3, 0, 2)),
        DECODE,
        Act("mix", (9,)),
        DECODE,
    ],
    "prompts in chunks": [
        Act("prefill", (5,)),
        *[Act("chunks", (3 * CHUNK + 2,))] * 7,
        DECODE,
        Act("leave", (0, 2, 4)),
        DECODE,
    ],
}
ANY_PROMPT = "prompts pass, negative ids too"
BARE_SIDE = "a side without tokens loses nothing"
# Which of the declared defects of upstream's states a broken promise is.
DEFECTS: Mapping[str, str] = {ANY_PROMPT: NEGATIVE_IDS, BARE_SIDE: ONE_SIDED_MERGE}


class Kept(NamedTuple):
    """``known``: defects that the state declares, by name; ``broken`` is everything else."""

    known: tuple[str, ...]
    broken: tuple[Violation, ...]


def check_contract(
    row: Callable[[], RelayRow],
    *,
    overlap: bool,
    declared: Sequence[str] = (),
    drafts: Callable[[], Speculating] | None = None,
) -> Kept:
    """``row`` makes the row anew for each part, for a policy may keep something; so does ``drafts``, where there is
    speculation."""
    violations = Violations()

    def bench() -> Workbench:
        return Workbench(row(), overlap=overlap, drafts=None if drafts is None else drafts())

    for name, script in _scripts(speculating=drafts is not None).items():
        violations.add(_named(name, _followed(bench(), script)))
    violations.add(_negative_ids(bench()))
    violations.add(_no_rows(bench().engine.relay))
    if drafts is None:  # else no batch carries its tokens
        for left in (True, False):
            for right in (True, False):
                violations.add(_sides(bench(), left=left, right=right))
    return _sorted_out(violations.told(), declared)


def speculating(relay: RelayChoice, mode: Speculation) -> Speculating:
    """What that relay answers the worker, made anew."""
    row = relay.draft_row(mode)
    assert row is not None
    return Speculating(mode, row)


def _scripts(*, speculating: bool) -> Mapping[str, Script]:
    """Speculation does not mix."""
    if not speculating:
        return SCRIPTS
    unmixed = {name: [act for act in script if act.verb != "mix"] for name, script in SCRIPTS.items()}
    return {name: script for name, script in unmixed.items() if name != "mixing"}


def follow(
    row: RelayRow, script: Script, *, overlap: bool, drafts: Speculating | None = None
) -> Sequence[Violation]:
    """What a row does wrong while its batches go through the script; nothing after it breaks down."""
    return _followed(Workbench(row, overlap=overlap, drafts=drafts), script)


def _followed(bench: Workbench, script: Script) -> Sequence[Violation]:
    for number, act in enumerate(script):
        crash = _attempted(_do, bench, act)
        if crash:
            text = f"act {number} ({act}) broke down: {crash}"
            return [*bench.found, Violation("every step can be made", act.verb, text, number)]
    return bench.found


def _attempted(call: Callable[..., None], *arguments: object) -> str:
    """How it broke down, if it did."""
    try:
        with torch.no_grad():
            call(*arguments)
    except Exception as error:
        return str(crash_of(error))
    return ""


def _do(bench: Workbench, act: Act) -> None:
    match act.verb:
        case "prefill":
            bench.prefill([_prompt(length) for length in act.numbers])
        case "mix":
            bench.mix([_prompt(length) for length in act.numbers])
        case "chunks":
            bench.chunks(_prompt(act.numbers[0]))
        case "decode":
            bench.decode()
        case "idle":
            bench.idle()
        case "leave":
            bench.leave(act.numbers)
        case "retract":
            bench.retract(act.numbers)


def _prompt(length: int) -> list[int]:
    return [100 + 13 * place for place in range(length)]


def _named(name: str, found: Sequence[Violation]) -> Iterator[Violation]:
    for violation in found:
        yield violation._replace(says=f"{name}: {violation.says}")


# ---- prompts, sides, no rows -----------------------------------------------------------------------------------


def _negative_ids(bench: Workbench) -> Iterator[Violation]:
    """Ids below zero stand for what is no text. The relay's rows are full when the prompt passes."""
    crash = _attempted(_pass_negative_ids, bench)
    for violation in bench.found:
        yield violation._replace(promise=ANY_PROMPT) if violation.promise == PROMPTS else violation
    if crash:
        yield Violation(ANY_PROMPT, "input_ids", f"a prompt with ids below zero: {crash}")


def _pass_negative_ids(bench: Workbench) -> None:
    bench.prefill([_prompt(4)] * 3)
    bench.decode()
    bench.prefill([[7, -1, -3, -2, 8]])


def _sides(bench: Workbench, *, left: bool, right: bool) -> Iterator[Violation]:
    """Two batches are merged, either of which may carry its tokens itself. Then a decode asks for them."""
    promise = "batches with their tokens are joined" if left and right else BARE_SIDE
    says = f"merging a batch {_with(left)} its tokens with one {_with(right)}"
    crash = _attempted(_merge_sides, bench, left, right)
    for violation in bench.found:
        yield violation._replace(promise=promise, says=f"{says}: {violation.says}")
    if crash:
        yield Violation(promise, "input_ids", f"{says}: {crash}")


def _merge_sides(bench: Workbench, left: bool, right: bool) -> None:
    bench.prefill([_prompt(5), _prompt(3)])
    bench.decode()
    bench.prefill([_prompt(4)])
    assert bench.last is not None
    _carry(bench.running, present=left)
    _carry(bench.last, present=right)
    bench.decode()


def _with(present: bool) -> str:
    return "with" if present else "without"


def _carry(batch: ScheduleBatch, *, present: bool) -> None:
    """Let the batch carry what each request's next input is, or nothing. A placeholder stands for its token."""
    if not present:
        batch.input_ids = batch.output_ids = None
    elif batch.input_ids is None and batch.output_ids is None:
        batch.input_ids = torch.tensor([token_of(req, req.kv_committed_len) for req in batch.reqs])


def _no_rows(relay: Relay) -> Iterator[Violation]:
    """A step without requests, whose tensors may be padded, leaves the relay as it was."""
    promise = "no rows are no work"
    futures = relay.context.futures
    before = {name: value.clone() for name, value in vars(futures).items() if torch.is_tensor(value)}
    crash = _attempted(_hand_on_nothing, relay)
    if crash:
        yield Violation(promise, "stash", f"a step without requests: {crash}")
    for name, value in before.items():
        if not torch.equal(getattr(futures, name), value):
            yield Violation(promise, name, f"a step without requests writes to {name}")


def _hand_on_nothing(relay: Relay) -> None:
    batch = ScheduleBatch.empty()
    batch.req_pool_indices = batch.seq_lens = torch.empty(0, dtype=torch.int64)
    future = relay.open(batch)
    if relay.drafts is not None:
        relay.drafts.publish(batch, batch.seq_lens)
        relay.drafts.stash(future, DraftInput(batch.seq_lens, DraftState(*[batch.seq_lens] * 3)))
        return
    relay.publish(batch)
    relay.stash(future, torch.tensor([5, 6]))


def _sorted_out(found: Sequence[Violation], declared: Sequence[str]) -> Kept:
    known = {DEFECTS.get(violation.promise, "") for violation in found}
    broken = tuple(v for v in found if DEFECTS.get(v.promise, "") not in declared)
    return Kept(tuple(name for name in declared if name in known), broken)

"""Hazards of a run: those that its relay state declares, by name, and all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...sched.loop.engine import Engine
from ...sched.relay import states
from ..platform.machine import Machine
from ..record.result import Abstained, HazardAccess, HazardFinding, Hazards, SitePart
from ..record.timeline import HazardKind

_NOWHERE = SitePart(file="", function="", line=0, statement="")


@dataclass(frozen=True, slots=True)
class AccessSign:
    """How one access of a declared hazard is recognised. ``function`` is the qualified name, ``statement`` a part of
    the statement's text, ``op`` the operation; an empty one is not compared."""

    stream: str
    write: bool
    function: str = ""
    statement: str = ""
    op: str = ""

    def matches(self, access: HazardAccess | None) -> bool:
        if access is None or (access.stream, access.write) != (self.stream, self.write):
            return False
        site = access.site or _NOWHERE
        named = self.function in ("", site.function) and self.statement in site.statement
        return named and self.op in ("", access.op)


@dataclass(frozen=True, slots=True)
class HazardSign:
    """How a declared hazard is recognised: its kind, its resource (a part of the name; empty: the accesses name it),
    and the access that was issued first and the one that was issued second, each by its possible places. There is no
    ``second`` for memory that is never read.

    The second access to a freed block is that of the next allocation, whichever it is: a sign gives its stream only.
    """

    kind: HazardKind
    resource: str
    first: tuple[AccessSign, ...]
    second: tuple[AccessSign, ...] = ()

    def matches(self, finding: HazardFinding) -> bool:
        if finding.kind != self.kind or self.resource not in finding.resource:
            return False
        second = any(sign.matches(finding.second) for sign in self.second)
        return any(sign.matches(finding.first) for sign in self.first) and (
            second if self.second else finding.second is None
        )


_read_by_forward = partial(AccessSign, "forward", False)
_written_by_forward = partial(AccessSign, "forward", True)
_read_by_schedule = partial(AccessSign, "schedule", False)
_written_by_schedule = partial(AccessSign, "schedule", True)

_PAGE_TABLE_READS = (
    _read_by_forward("Decoder._attended", "attention("),
    _read_by_forward("CrossDecoder._rows", "decoder_pages("),
    _read_by_forward("SparseAttention._extend", "sparse_extend("),
    _read_by_forward("ModelRunner._replay", "graph.replay()"),
    _read_by_forward("GraphedFunction.__call__", "graph.replay()"),
    _read_by_forward("SparseAttention._decode", "*scored"),
    _read_by_forward("PageTableLocator.read_slots", "page_lookup("),
    _read_by_forward("Drafter._tokens", "draft_places("),
    _read_by_forward("Drafter._draft_tree", "draft_places("),
    _read_by_forward("chain_batch", "draft_places("),
    _read_by_forward("resolve_fused", "decode_inputs("),
)
_PROMPT_PLACEMENTS = (
    _written_by_schedule("write_cache_indices", "_write_cache_indices("),
    _written_by_schedule("fused_prompts", "place_extend("),
)
_ROW_PLACEMENTS = (
    *_PROMPT_PLACEMENTS,
    _written_by_schedule("fused_tokens", "place_decode("),
    _written_by_schedule("split_tokens", "req_to_token["),
    _written_by_schedule("Inbox._allocate", "req_to_token["),
)
_CACHE_REWRITE = _written_by_schedule("RadixCache.cache_unfinished_req", "kv_indices[req.cache_protected_len")
_PENALTY_READS = (
    _read_by_forward("TokenPenalizer.accumulate", "(self.state)"),
    _read_by_forward("StopPenalizer.apply", "withhold_stops("),
)
_PENALTY_COUNTS = (
    _written_by_schedule("TokenPenalizer.cumulate", "self.state."),
    _written_by_schedule("StopPenalizer.cumulate", "self.output_lens."),
)
_DECODED = (_read_by_schedule("Decoder.forward", "embedding(batch.input_ids"),)
_TOKEN_READS = (
    _read_by_schedule("filter_input", "batch.input_ids[keep]"),
    _read_by_schedule("filter_input_summing", "batch.input_ids[keep]"),
    _read_by_schedule("filter_output_summing", "batch.output_ids[keep]"),
    _read_by_schedule("mix_once", "running.input_ids"),
    _read_by_schedule("mix_twice", "running.input_ids"),
    _read_by_schedule("_joined", "torch.cat([own, other])"),
    _read_by_schedule("merge_input_two_sided", "other.input_ids"),
    _read_by_schedule("cast_output", "batch.output_ids"),
)


def _dead(buffer: str, function: str, stream: str) -> tuple[HazardSign, ...]:
    """The function's writes of the buffer are never read. A device without side streams has the schedule stream
    alone."""
    writes = (AccessSign(on, True, function, f"self.{buffer}[") for on in (stream, "schedule"))
    return (HazardSign("unread", buffer, tuple(writes)),)


# By the names under which states of the relay declare them.
SIGNS: Mapping[str, tuple[HazardSign, ...]] = {
    states.SLOT_REUSE: (HazardSign("race", "req_to_token", _PAGE_TABLE_READS, _ROW_PLACEMENTS),),
    states.PAGE_TABLE_REWRITE: (HazardSign("race", "req_to_token", _PAGE_TABLE_READS, (_CACHE_REWRITE,)),),
    states.STAGED_LATE: (
        HazardSign(
            "freed",
            "",
            (_read_by_forward("_append_running", "output_tokens_buf[rows]", op="index"),),
            (_written_by_schedule(),),
        ),
    ),
    states.PENALTY_STATE: (
        HazardSign("race", "", _PENALTY_READS, _PENALTY_COUNTS),
        HazardSign("freed", "", _PENALTY_READS, (_written_by_schedule(),)),
    ),
    states.DRAFT_LENGTHS: (
        HazardSign(
            "race",
            "",
            (_written_by_forward("resolve_on_the_forward_stream", "batch.seq_lens = context.futures"),),
            (_read_by_schedule("filter_rows", "batch.seq_lens = batch.seq_lens["),),
        ),
    ),
    states.CHUNK_REWRITE: (
        HazardSign("race", "req_to_token", _PAGE_TABLE_READS, (*_PROMPT_PLACEMENTS, _CACHE_REWRITE)),
    ),
    states.ROUND_TRIP: (
        HazardSign("freed", "result of receive", _TOKEN_READS, (AccessSign("copy", write=True),)),
    ),
    states.SPLIT_TOKENS: (
        HazardSign("freed", "result of sample", (*_DECODED, *_TOKEN_READS), (_written_by_forward(),)),
    ),
    states.DEAD_STASH: _dead("output_tokens_buf", "FutureMap.stash", "copy"),
    states.DEAD_PUBLISH: _dead("new_seq_lens_buf", "FutureMap.publish", "forward"),
}


def hazards(machine: Machine, declared: Sequence[str], *, decoded: bool) -> Hazards | Abstained:
    """The hazards of everything that ran on the machine so far. ``decoded``: there were decodes or verifies, which read
    what earlier steps have left."""
    if machine.hazards is None:
        where = (
            "the run was not watched for hazards"
            if machine.labels.emulated
            else "a timed run on CUDA is not watched for hazards: check --device cuda"
        )
        return Abstained(abstained=where)
    names = machine.names.sites, machine.names.streams
    found = machine.hazards.found(*names) + (machine.hazards.unread(*names) if decoded else ())
    return split_declared(found, declared)


def name_pools(machine: Machine, engine: Engine) -> None:
    """Name the tensors that steps share, for findings."""
    if machine.hazards is not None:
        machine.hazards.name(engine.slots.req_to_token, "req_to_token")
        for name, value in vars(engine.relay.context.futures).items():
            if isinstance(value, torch.Tensor):
                machine.hazards.name(value, name)
        for name, value in engine.tier.tables().items():
            machine.hazards.name(value, name)


def split_declared(found: Sequence[HazardFinding], declared: Sequence[str]) -> Hazards:
    """The names of declared hazards that were found, and the findings that none of them explains."""
    shown = {
        name: [finding for finding in found if any(sign.matches(finding) for sign in SIGNS[name])]
        for name in declared
    }
    attributed = {id(finding) for findings in shown.values() for finding in findings}
    return Hazards(
        known=tuple(name for name, findings in shown.items() if findings),
        # As documents have them, so that those of ranks in other processes are equal to them.
        findings=tuple(HazardFinding(**one.model_dump()) for one in found if id(one) not in attributed),
    )

"""Hazards of a run: those that its relay state declares, by name, and all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...sched.loop.engine import Engine
from ...sched.relay import known
from ..platform.machine import Machine
from ..record.hazards import FoundAccess, FoundHazard, HazardKind
from ..record.result import Abstained, HazardAccess, HazardFinding, Hazards, SitePart
from ..record.timeline import Site


@dataclass(frozen=True, slots=True)
class HazardSign:
    """How a declared hazard is recognised: its kind, and parts of the two statements."""

    kind: HazardKind
    resource: str = ""
    first: str = ""
    second: str = ""

    def matches(self, finding: FoundHazard) -> bool:
        return (
            finding.kind == self.kind
            and self.resource in finding.resource
            and self.first in _statement(finding.first)
            and self.second in _statement(finding.second)
        )


# By the names under which states of the relay declare them.
SIGNS: Mapping[str, tuple[HazardSign, ...]] = {
    known.SLOT_REUSE: (
        HazardSign("race", "req_to_token", second="_write_cache_indices("),
        HazardSign("race", "req_to_token", second="req_to_token["),
        HazardSign("race", "req_to_token", second="place_extend("),
        HazardSign("race", "req_to_token", second="place_decode("),
        HazardSign("race", "output_tokens_buf"),
    ),
    known.PAGE_TABLE_REWRITE: (HazardSign("race", "req_to_token", second="match.device_indices["),),
    known.STAGED_LATE: (HazardSign("freed", first="output_tokens_buf[rows]"),),
    known.PENALTY_STATE: (
        HazardSign("race", "sched/model/penalties.py"),
        HazardSign("freed", "sched/model/penalties.py"),
    ),
    known.DRAFT_LENGTHS: (
        HazardSign("race", first="batch.seq_lens = context.futures", second="batch.seq_lens["),
    ),
    known.CHUNK_REWRITE: tuple(
        HazardSign("race", "req_to_token", second=statement)
        for statement in ("write_cache_indices(", "place_extend(", "match.device_indices[")
    ),
    known.ROUND_TRIP: (HazardSign("freed", "result of receive"), HazardSign("freed", "result of _to_copy")),
    known.DEAD_STASH: (HazardSign("unread", "output_tokens_buf"),),
    known.DEAD_PUBLISH: (HazardSign("unread", "new_seq_lens_buf"),),
}


def hazards(machine: Machine, declared: Sequence[str], *, decoded: bool) -> Hazards | Abstained:
    """The hazards of everything that ran on the machine so far. ``decoded``: there were decodes or verifies, which read
    what earlier steps have left."""
    if machine.hazards is None:
        where = (
            "hazards were not watched for"
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


def split_declared(found: Sequence[FoundHazard], declared: Sequence[str]) -> Hazards:
    """The names of declared hazards that were found, and the findings that none of them explains."""
    shown = {
        name: [finding for finding in found if any(sign.matches(finding) for sign in SIGNS[name])]
        for name in declared
    }
    attributed = {id(finding) for findings in shown.values() for finding in findings}
    return Hazards(
        known=tuple(name for name, findings in shown.items() if findings),
        findings=tuple(_part(finding) for finding in found if id(finding) not in attributed),
    )


def _part(finding: FoundHazard) -> HazardFinding:
    return HazardFinding(
        resource=finding.resource,
        first=_access(finding.first),
        second=None if finding.second is None else _access(finding.second),
        missing=finding.missing,
    )


def _access(access: FoundAccess) -> HazardAccess:
    return HazardAccess(op=access.op, site=_site(access.site), stream=access.stream)


def _site(site: Site | None) -> SitePart | None:
    return None if site is None else SitePart(**site._asdict())


def _statement(access: FoundAccess | None) -> str:
    return access.site.statement if access and access.site else ""

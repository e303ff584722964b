"""Known bugs of upstream's relay, each as a change of a row that a checker has to detect.

``reference`` numbers the bugs (5.n, or 4.10 for a mode) and names the pull requests or issues that report them.
``about`` describes the mistake, not its symptoms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

from . import broken, drafts, lengths, ordering, penalties, prebuilt, tokens
from .names import FAULT_NAMES
from .row import DraftRow, RelayRow, Speculation
from .rows import SWITCHES

Loop = Literal["overlapped", "serial", "pipelined"]
Feature = Literal["hisparse", "deferred", "embedding", "encoder-decoder", "block diffusion"]
FEATURES: Mapping[Feature, str] = {
    "hisparse": "engine.hisparse.enabled=true",
    "deferred": "engine.deferred=true",
    "embedding": "engine.embedding=true",
    "block diffusion": "engine.block_diffusion.enabled=true",
    "encoder-decoder": "workload.encoder_tokens",
}
"""Each feature as a setting."""
R = TypeVar("R", RelayRow, DraftRow)


def unchanged(row: R) -> R:
    """Leave a row as it is: the fault changes the other one."""
    return row


@dataclass(frozen=True, slots=True)
class Fault:
    """``change`` breaks a row of one of ``states`` (upstream's first) for one of ``loops``, ``change_drafts`` that of a
    speculative worker. Both are applied once per run, where a policy with a state of its own is made. They can be
    pickled, since a fault is sent to other processes."""

    name: str
    about: str
    reference: str
    states: tuple[str, ...]
    loops: tuple[Loop | Literal["onebatch"], ...]
    change: Callable[[RelayRow], RelayRow] = unchanged
    speculation: Speculation | None = None  # the worker that it applies to
    change_drafts: Callable[[DraftRow], DraftRow] = unchanged
    appends: bool = True  # a static batch appends its tokens to the requests
    feature: Feature | None = None  # what it changes is used only with this feature
    waits_for: str | None = None  # the feature, not here yet, that it is a bug of; it has no states then


_WITHOUT_BARRIER = ("pr26425", "pr26425-before", "pr26020", "pr25944-before", "pr25774", "pr25774-before")
_RELAY_ALWAYS_ON = ("pr25945", "latest")


def _refilling(row: RelayRow) -> RelayRow:
    return replace(row, staging=broken.one_pinned_buffer())


def _forgetting_rows(row: RelayRow) -> RelayRow:
    return replace(row, bootstrap=broken.without_mirror(row.bootstrap))


_FAULTS = (
    Fault(
        "one-sided-merge",
        "Merging checks only its own side for token ids, while a decode keeps its tokens as speculation v1 "
        "does and a prompt leaves them to the relay.",
        "5.1, #25774, fixed by #25945",
        ("pr25945",),
        ("serial",),
        partial(replace, conclude=broken.keep_decoded, merge=tokens.merge_input_one_sided),
    ),
    Fault(
        "penalties-from-input",
        "Penalties of the serial loop count the batch's input ids, which the relay has dropped.",
        "5.2, before #25945 was merged",
        ("pr25945",),
        ("serial",),
        partial(replace, penalty_tokens=penalties.from_input),
    ),
    Fault(
        "allocate-by-sentinel",
        "The allocator takes the batch's lengths, which are sentinels between forwards.",
        "5.4, #25944 without its allocator fix",
        ("pr25944",),
        ("overlapped",),
        partial(replace, allocation_lengths=lengths.allocate_by_batch_lengths),
    ),
    Fault(
        "mix-with-sentinel",
        "A mixed step takes the running requests' lengths as they are, which are sentinels between forwards.",
        "5.5, #25944 without its mixing fix",
        ("pr25944",),
        ("overlapped",),
        partial(replace, mix=tokens.mix_twice),
    ),
    Fault(
        "hot-buffer-by-sentinel",
        "The hot buffer's reserved slots follow from the batch's lengths, which are sentinels between forwards.",
        "5.6, #25944, fixed by #26020",
        ("pr25944",),
        ("overlapped",),
        partial(replace, buffer_lengths=lengths.lengths_of_batch),
        feature="hisparse",
    ),
    Fault(
        "resolve-ids-first",
        "Ids are resolved in place before lengths are looked up by the sentinel, which may be the same tensor.",
        "5.7, #25944 with two statements exchanged and lengths found through the sentinel",
        ("pr25944",),
        ("overlapped",),
        partial(replace, resolve=broken.resolve_ids_first),
    ),
    Fault(
        "prebuilt-unpublished",
        "A prebuilt batch joins without publishing lengths, which no forward of this worker has.",
        "5.8, #25944 without its prebuilt fix",
        ("pr25944",),
        ("overlapped",),
        partial(replace, prebuild=prebuilt.prebuild_input),
    ),
    Fault(
        "pd-freed-block-race",
        "A prefill worker frees pages whose transfer has been requested but not completed.",
        "5.16, prefill and decode workers",
        _RELAY_ALWAYS_ON,
        ("overlapped", "serial"),
        partial(replace, has_left=broken.at_once),
    ),
    Fault(
        "pd-overwritten-page",
        "KV is received into pages that a forward still writes for a request that has just ended.",
        "5.13, prefill and decode workers",
        ("latest",),
        ("overlapped",),
        partial(replace, before_transfer=broken.wait_for_schedule_alone),
    ),
    Fault(
        "rejoin-without-mirror",
        "A staged request rejoins in a batch without the host mirror of its rows.",
        "5.9, #26425, #28121, fixed by #28514",
        ("pr26425", "pr25945-before", "pr25945"),
        ("overlapped", "serial"),
        _forgetting_rows,
        feature="hisparse",
    ),
    Fault(
        "never-resolve",
        "The loop runs the forward without resolving its input first.",
        "5.10, #25945; fixed by #26904, #26883, #26882",
        _RELAY_ALWAYS_ON,
        ("overlapped", "serial"),
        partial(replace, resolve=ordering.nothing),
    ),
    Fault(
        "embedding-never-resolves",
        "A batch of prompts to embed is run without resolving its input, because nothing was relayed to it.",
        "5.10, the embedding branch of #25945",
        ("pr25945",),
        ("overlapped", "serial"),
        partial(replace, resolve_prompt=ordering.nothing),
        feature="embedding",
    ),
    Fault(
        "encoder-rebuilt-on-device",
        "Stripping the encoder's tokens rebuilds the prompt on the device, while the whole prompt stays staged.",
        "4.10, #25945 without its encoder-decoder fix",
        ("pr25945",),
        ("overlapped", "serial"),
        partial(replace, rebuild_prompt=tokens.upload_now),
        feature="encoder-decoder",
    ),
    Fault(
        "list-for-the-bridge",
        "The list of tensors that a step of block diffusion returns is taken for the next step's input.",
        "4.10, #25774 without its test for a tensor",
        ("pr25774", "pr25945"),
        ("serial",),
        partial(replace, conclude_blocks=broken.bridge_list),
        feature="block diffusion",
    ),
    Fault(
        "deferred-never-resolves",
        "The loop with deferred results has no relay, so that its batches have no input.",
        "5.10, #25945, fixed by #26882",
        ("pr25945",),
        ("serial",),
        partial(replace, resolve=ordering.nothing, stash=tokens.stash_nothing),
        feature="deferred",
    ),
    Fault(
        "no-barrier",
        "Nothing makes the schedule wait before it reuses a slot or rewrites a row that a forward still reads.",
        "5.13, #18746, #18744, before #26380",
        (*_RELAY_ALWAYS_ON, "pr25945-before"),
        ("overlapped",),
        partial(replace, **SWITCHES["barrier"]["off"]),
    ),
    Fault(
        "small-ring",
        "The ring's limit does not count the chunks of a long prompt: a slot is reused before it was read.",
        "5.14, #13713, #13916",
        ("pr25774", "pr25774-before"),
        ("overlapped",),
        partial(replace, futures=broken.ringed_without_chunks),
    ),
    Fault(
        "negative-ids-replaced",
        "A negative id in a prompt is taken for a placeholder and replaced by what the relay holds.",
        "5.15, up to #25945",
        ("pr25945",),
        ("overlapped", "serial"),
        partial(replace, resolve=broken.resolve_with_sentinels),
    ),
    Fault(
        "nothing-kept-alive",
        "No reference keeps what the forward reads: what the schedule replaces is freed while the forward runs.",
        "5.16, the record of two launches left out",
        _WITHOUT_BARRIER,
        ("overlapped",),
        partial(replace, keep_alive=ordering.keep_nothing),
    ),
    Fault(
        "one-launch-kept-alive",
        "Only the last launch is held, while the one before may still run.",
        "5.16, the record of two launches made one",
        _WITHOUT_BARRIER,
        ("overlapped",),
        partial(replace, keep_alive=broken.keep_one_launch),
    ),
    Fault(
        "staging-refilled",
        "All prompts are staged in one pinned buffer, refilled while the last copy from it may be under way.",
        "5.16, tokenspeed #376",
        _RELAY_ALWAYS_ON,
        ("overlapped",),
        _refilling,
    ),
    Fault(
        "gather-without-stash",
        "Sampled tokens are not stashed in the relay, from which the next step gathers them.",
        "5.17, #26108",
        _RELAY_ALWAYS_ON,
        ("overlapped", "serial"),
        partial(replace, stash=tokens.stash_nothing),
    ),
    Fault(
        "emptied-batch-merged",
        "A prefill that all its requests have left is merged with the rows they had.",
        "5.19, #28514, reverted by #28607",
        (*_RELAY_ALWAYS_ON, "pr25945-before", *_WITHOUT_BARRIER, "pr25944"),
        ("overlapped", "serial"),
        partial(replace, joins=broken.join_always),
    ),
    Fault(
        "stash-before-sampling",
        "A launch stashes the tokens it returns, though a grammar may have delayed sampling.",
        "5.21, grammar under overlap",
        _RELAY_ALWAYS_ON,
        ("overlapped",),
        partial(replace, stash=broken.stash_later, keep_alive=broken.stash_at_launch),
    ),
    Fault(
        "advance-in-place",
        "The schedule lengthens the tensor of lengths that a forward in flight reads.",
        "5.24, #26020, #30669",
        _WITHOUT_BARRIER,
        ("overlapped",),
        partial(replace, advance=lengths.advance_in_place),
    ),
    Fault(
        "dead-publish",
        "Every step publishes lengths that are never read.",
        "5.25, #26020",
        ("latest",),
        ("overlapped",),
        partial(replace, publish=tokens.publish_next_lengths),
    ),
    Fault(
        "isolation-restores-staging",
        "Leaving the isolation of a speculating forward restores a consumed prompt.",
        "5.3, before #25945 was merged",
        ("pr25945",),
        ("overlapped",),
        partial(replace, isolate=ordering.isolate_then_resolve),
        speculation="v2",
    ),
    Fault(
        "publish-ready-overwritten",
        "A prebuilt batch re-records the one event of publishing while a forward's is pending.",
        "5.12, fixed by #30435",
        ("pr26425", "pr26425-before", "pr26020"),
        ("overlapped",),
        speculation="v2",
        change_drafts=partial(replace, seed=drafts.seed_unchained),
    ),
    Fault(
        "worker-extras-not-kept",
        "Tensors of a speculating worker lose their last reference in mid-forward.",
        "5.16, speculation v2",
        ("pr26425", "pr26425-before", "pr26020"),
        ("overlapped",),
        partial(replace, keep_alive=broken.keep_no_lengths),
        speculation="v2",
    ),
    Fault(
        "accepted-tokens-stashed",
        "The accepted tokens of a v1 step, more than there are rows, are stashed by row.",
        "5.18, speculation v1",
        _RELAY_ALWAYS_ON,
        ("serial",),
        speculation="v1",
        change_drafts=partial(replace, conclude=broken.stash_accepted),
    ),
    Fault(
        "missing-host-lengths-used",
        "Filtering relies on host lengths that a device-only batch does not have.",
        "5.22, #26128, fixed by #26738",
        ("latest",),
        ("overlapped", "serial"),
        speculation="v2",
        change_drafts=partial(replace, filter=broken.filter_host_lengths),
    ),
    Fault(
        "draft-extends-lengths",
        "The draft's extend step lengthens the batch itself, and nothing restores it.",
        "5.23, up to #26020",
        ("pr25945", "pr26425"),
        ("serial",),
        partial(replace, isolate=ordering.resolve_in_place),
        speculation="v2",
        change_drafts=partial(replace, draft_lengths=lengths.draft_lengths_in_the_batch),
    ),
    Fault(
        "stage-without-stash",
        "Pipeline stages keep no token for the decodes of a mixed step.",
        "5.11, #25945 without its pipeline fix",
        ("pr25945",),
        ("pipelined",),
        partial(replace, stash=tokens.stash_nothing),
    ),
    Fault(
        "stage-tokens-unawaited",
        "The host reads a pipeline's tokens without waiting for their arrival.",
        "5.11, its second part",
        ("pr25945", "latest"),
        ("pipelined",),
        partial(replace, await_tokens=broken.await_nothing),
    ),
    Fault(
        "onebatch-never-resolves",
        "The benchmark of one batch calls the model without resolving its input.",
        "5.10, #25945, fixed by #26904",
        _RELAY_ALWAYS_ON,
        ("onebatch",),
        partial(replace, resolve=ordering.nothing),
    ),
    Fault(
        "onebatch-penalises-the-prompt",
        "The benchmark of one batch never appends tokens to requests: penalties count the last prompt token forever.",
        "5.26, #25945",
        ("pr25945",),
        ("onebatch",),
        appends=False,
    ),
)

_AWAITED = (
    Fault(
        "idle-rows-stashed",
        "A rank without rows stashes the tokens that pad it to the other ranks' length.",
        "5.20, DP attention",
        states=(),
        loops=(),
        waits_for="sampled padding of idle ranks",
    ),
)


def faults() -> Mapping[str, Fault]:
    """By name, in upstream's order."""
    return {fault.name: fault for fault in _FAULTS}


def awaited_faults() -> Mapping[str, Fault]:
    return {fault.name: fault for fault in _AWAITED}


assert (*faults(), *awaited_faults()) == FAULT_NAMES, "not the faults of names.py in their order"

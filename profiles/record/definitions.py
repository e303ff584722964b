"""Every metric of a result: its name, unit, better direction and meaning, and the tables that show it.

A new metric is a Definition here and a computation in ``profiles.measure`` (see ``measure.metrics``). The table of
definitions is read by ``explain``, by the reports and by the computations. Imports nothing but the kinds of steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, get_args

from ...sched.observe import StepKind

Direction = Literal["higher", "lower", "none"]
ReportTable = Literal[
    "summary",
    "latency",
    "counts",
    "step kinds",  # rows of counts
    "copies",
    "host waits",
    "gpu waits",
    "host ranges",  # of a capture
    "rank requests",  # rows of the table by rank, where each rank has requests of its own
    "rank device",
]


# The parts of forward idle, and what each is called in tables, pictures and sentences.
IDLE_NAMES: Final = {
    "host_late": "host late",
    "exposed_stall": "exposed stall",
    "exposed_host": "exposed host work",
    "unnamed_host": "outside any range",
    "launch_latency": "launch latency",
    "dependency": "dependency",
    "kernel_gap": "kernel gap",
    "no_work": "no work",
    "residue": "residue",
    "forward_idle": "forward idle",
}


class Definition(NamedTuple):
    """``direction`` is the better one, ``source`` names what the number is computed from. ``tables`` show it.
    ``variants``: what a suffix of the name selects, as in ``forward_ms.decode``."""

    name: str
    unit: str
    direction: Direction
    about: str
    formula: str
    source: str
    tables: tuple[ReportTable, ...]
    variants: Literal["", "kind", "position", "name", "microbatch", "budget"] = ""


_REQUESTS = "the clock of the run, at the events that the scheduler announces"
_TIMELINE = "the timeline, as recorded by the device"
_of_requests = partial(Definition, source=_REQUESTS)
_of_timeline = partial(Definition, source=_TIMELINE)

_COUNTERS = (
    _of_timeline("h2d", "copies/step", "lower",
        "Copies from host to device. Pageable and blocking ones are also counted apart, as h2d_pageable, "
        "h2d_pinned and h2d_blocking; budgets may name those.",
        "copies owned by a step; median, mean and max over all steps of a kind", tables=("counts",)),
    _of_timeline("d2h", "copies/step", "lower",
        "Copies from device to host (also d2h_pageable, d2h_pinned, d2h_blocking).",
        "as h2d", tables=("counts",)),
    _of_timeline("d2d", "copies/step", "lower",
        "Copies inside the device's memory.",
        "as h2d", tables=("counts",)),
    _of_timeline("memset", "calls/step", "none",
        "Fills of device memory with one byte. Shown in documents and CSV, and open to budgets.",
        "as h2d", tables=()),
    _of_timeline("send", "sends/step", "none",
        "Messages that a rank sends to another over the link. Shown where there are several ranks.",
        "as h2d", tables=()),
    _of_timeline("sync", "calls/step", "lower",
        "Host calls whose purpose is to wait: stream, event and device synchronisation.",
        "as h2d", tables=("counts",)),
    _of_timeline("kernel", "kernels/step", "none",
        "Kernels, those of a replayed graph included.",
        "as h2d", tables=("counts",)),
    _of_timeline("kernel_copy", "bytes", "lower",
        "A kernel that reads or writes pinned host memory. No copy counter includes it; its declared "
        "bytes are listed separately, with direction `kernel`.",
        "host bytes declared by the kernel", tables=("copies",)),
)  # fmt: skip

_TABLE = (
    # throughput
    _of_requests("output_throughput", "tokens/s", "higher",
        "Generated tokens that became known to the host, over the full window: from the first arrival to "
        "the last request's end.",
        "output tokens / (last finish - first arrival)", tables=("summary",)),
    _of_requests("input_throughput", "tokens/s", "higher",
        "Prompt tokens of finished requests over the full window, those served from the prefix cache "
        "included.",
        "prompt tokens of finished requests / full window", tables=("summary",)),
    _of_requests("total_throughput", "tokens/s", "higher",
        "Prompt and generated tokens over the full window.",
        "(input + output tokens) / full window", tables=("summary",)),
    _of_requests("request_throughput", "requests/s", "higher",
        "Finished requests over the full window. Refused, aborted and failed ones do not count.",
        "finished requests / full window", tables=("summary",)),
    _of_requests("steady_output_throughput", "tokens/s", "higher",
        "Generated tokens inside the steady window: the longest stretch in which at least half as many "
        "requests run (first scheduled, not ended) as at the peak. Start-up and drain stay outside.",
        "output tokens in the steady window / its length", tables=("summary",)),
    _of_requests("steady_request_throughput", "requests/s", "higher",
        "Requests that finished inside the steady window (see steady_output_throughput).",
        "finishes in the steady window / its length", tables=("summary",)),
    # latency
    _of_requests("ttft_ms", "ms", "lower",
        "Time to first token, from arrival: queueing included. Percentiles are over finished requests, and"
        " are not given when fewer than 1/(1-q) samples support them (p99 needs 100).",
        "first token - arrival", tables=("latency", "rank requests")),
    _of_requests("queue_ms", "ms", "lower",
        "The part of the time to first token that a request spent waiting for its first admission.",
        "first scheduled - arrival", tables=("latency", "rank requests")),
    _of_requests("prefill_ms", "ms", "lower",
        "With separate workers for prompts: from a request's first admission until its prefill worker has "
        "computed the whole prompt. Queue, prefill, transfer and decode queue make up the time to first token.",
        "prompt computed - first scheduled", tables=("latency", "rank requests")),
    _of_requests("transfer_ms", "ms", "lower",
        "With separate workers for prompts: from when the prompt has been computed until the decode worker "
        "knows that all KV has come. "
        "Chunks that were sent before are not waited for.",
        "KV there - prompt computed", tables=("latency", "rank requests")),
    _of_requests("decode_queue_ms", "ms", "lower",
        "With separate workers for prompts: from when all KV has come until the request has joined the "
        "decode worker's batch and its first token is known there.",
        "first token - KV there", tables=("latency", "rank requests")),
    _of_requests("tpot_ms", "ms", "lower",
        "Time per output token after the first. Requests with a single token have none.",
        "(E2E - TTFT) / (output tokens - 1)", tables=("latency",)),
    _of_requests("itl_ms", "ms", "lower",
        "Inter-token latency: the gap between two events at which tokens of one finished request became "
        "known. An event may carry several tokens; gaps are not divided by them.",
        "event k - event k-1, per finished request", tables=("latency",)),
    _of_requests("e2e_ms", "ms", "lower",
        "From a request's arrival to its last token.",
        "finish - arrival", tables=("latency",)),
    _of_requests("step_ms", "ms", "lower",
        "Period of the scheduler's loop: from one launch to the next. With overlap the host launches ahead of "
        "the GPU, so that a period belongs to no kind of step: see forward_ms. Periods in which the "
        "scheduler slept for lack of work are excluded.",
        "launch k+1 - launch k", tables=("latency", "rank device")),
    _of_timeline("forward_ms", "ms", "lower",
        "A step's span on the GPU: from its first to its last forward kernel, whatever the gaps between them; "
        "over all steps, and by their kind (forward_ms.decode, ...).",
        "end of the last forward kernel - start of the first, per step",
        tables=("latency", "rank device"), variants="kind"),
    _of_timeline("idle_ms", "ms", "lower",
        "Between steps: forward idle in front of one step's forward, without that in which the scheduler slept; 0 "
        "where forwards follow each other without a gap. The first step has nothing before it.",
        "start of a step's span - end of the spans before - sleep, per step",
        tables=("latency", "rank device")),
    # work and traffic that the decoder achieved
    _of_timeline("decode_batch_size", "requests/step", "none",
        "Requests in a decode step, on average.",
        "sum over decode steps of the batch / decode steps", tables=("summary",)),
    _of_timeline("decode_bandwidth", "GB/s", "higher",
        "Memory traffic of decode forwards by their span on the device: weights once a step, each running "
        "request's KV, and activations, as the kernels declare them; sampling is excluded. Positions attended "
        "to are the mean of all decoded tokens.",
        "bytes that the decoder's kernels declare for the batches that ran / sum of forward_ms.decode",
        tables=("summary",)),
    _of_timeline("decode_flops", "TFLOP/s", "higher",
        "Arithmetic of decode forwards by their span on the device: products with the weights, and attention.",
        "floating-point operations that the decoder's kernels declare / sum of forward_ms.decode", tables=("summary",)),
    _of_timeline("prefill_flops", "TFLOP/s", "higher",
        "Arithmetic of prompts' forwards by their span on the device: products with the weights for each token that "
        "was not cached, and attention. Not known where prompts are mixed with decodes or computed twice.",
        "floating-point operations that the decoder's kernels declare / sum of forward_ms.prefill",
        tables=("summary",)),
    _of_timeline("decode_roofline_ms", "ms", "none",
        "What a decode forward would take if it did nothing but move its bytes at the memory bandwidth of the "
        "hardware profile. Compare with forward_ms.decode.",
        "bytes as in decode_bandwidth / memory bandwidth / decode steps", tables=("summary",)),
    Definition("range_ms", "ms", "lower",
        "Host time inside a named range of a capture, waits included, by the range's name under the map "
        "(range_ms.prepare, ...). Nested ranges count in each other.",
        "end of the range - its start",
        tables=("host ranges",), source="NVTX or record_function ranges of a capture", variants="name"),
    # where the GPU waited
    _of_timeline("forward_occupancy", "ratio", "higher",
        "Share of the forward window (first to last forward kernel of the run) that lies inside a step's "
        "span: from its first to its last forward kernel. Forward kernels are those launched inside a "
        "forward range, on whatever stream. Occupancy says nothing of how fast the kernels are: read it "
        "with throughput.",
        "sum of step spans / forward window; overlapping spans count once", tables=("summary", "rank device")),
    _of_timeline("gpu_busy", "ratio", "higher",
        "Share of the forward window in which at least one kernel ran, on any stream. Copies are never "
        "busy time.",
        "union of kernels / forward window", tables=("summary", "rank device")),
    _of_timeline("forward_idle_us_per_step", "us/step", "lower",
        "Forward idle lies between the spans of forward kernels. It is split into host late, dependency, kernel gap "
        "and no work; the parts sum to the whole and the residue is printed. "
        "What the GPU waits inside spans is apart: forward_gap_us_per_step.",
        "(forward window - sum of step spans) / steps", tables=("gpu waits", "rank device")),
    _of_timeline("forward_gap_us_per_step", "us/step", "lower",
        "Time inside the spans of forwards in which none of their kernels ran: gaps between kernels, and "
        "waiting within a step, as for a sample that is delayed until a grammar's mask is there. No part "
        "of forward idle.",
        "(sum of step spans - union of forward kernels) / steps; overlapping spans count once",
        tables=("gpu waits", "rank device")),
    _of_timeline("host_stall_us_per_step", "us/step", "lower",
        "Host time inside calls that wait for the device. Part of it is exposed: it kept the GPU from its "
        "next forward. The rest is hidden: it was not itself the reason the GPU was idle; what the host "
        "could have done meanwhile is another question.",
        "sum of waited time / steps", tables=("host waits", "rank device")),
    _of_timeline("exposed_stall_us_per_step", "us/step", "lower",
        "Host stall during forward idle, before the next step's first forward op was enqueued and not "
        "while the scheduler slept. With exposed_host and launch latency it makes up host late.",
        "host stall within (host-late forward idle) / steps", tables=("gpu waits", "rank device")),
    _of_timeline("exposed_host_us_per_step", "us/step", "lower",
        "Host work during forward idle, before the next step's first forward op was enqueued: the host "
        "neither waited for the device nor slept. Work outside of any range is included, and also given as "
        "unnamed_host_us.",
        "time before the enqueue, outside sleep and waits, within forward idle / steps",
        tables=("gpu waits", "rank device")),
    # usage
    _of_requests("bubble_pct", "%", "lower",
        "The share of the time of all pipeline stages in which their device ran no kernel.",
        "100 x (1 - sum of the stages' busy times / (stages x window)); busy: union of kernels",
        tables=("summary", "rank device"), variants="microbatch"),
    _of_requests("idle_step_share", "ratio", "none",
        "The share of the steps of a data-parallel rank in which it had no tokens and other ranks had.",
        "idle steps / steps", tables=("rank requests",)),
    _of_requests("cache_hit_ratio", "ratio", "higher",
        "Share of prompt tokens served from the prefix cache at a request's first admission.",
        "cached prompt tokens / prompt tokens", tables=("summary", "rank requests")),
    Definition("hisparse_hit_ratio", "ratio", "higher",
        "Share of the chosen tokens that decodes found in the hot buffer, over all layers, where KV is on the host. "
        "Requests that fit into their buffer are not counted, nor is a step's newest token.",
        "1 - tokens fetched / tokens looked for",
        tables=("summary",), source="a counter of the swap-in kernel, on the device"),
    Definition("hisparse_swap_in_bytes_per_step", "bytes/step", "lower",
        "KV that decodes fetched from the host because the hot buffer lacked it. It travels by kernel: see "
        "kernel_copy.",
        "tokens fetched in all layers x bytes of a token in one / decode steps",
        tables=("summary",), source="a counter of the swap-in kernel, on the device"),
    _of_requests("retractions", "count", "lower",
        "How often a running request lost its KV to make room and went back to the queue.",
        "number of retractions", tables=("summary", "rank requests")),
    _of_requests("peak_kv_tokens", "tokens", "none",
        "Most KV tokens in use (neither free nor evictable) after a step was prepared.",
        "max over steps", tables=("summary", "rank requests")),
    # speculation
    _of_requests("accept_length", "tokens/verify", "higher",
        "Tokens that a request gets from one verify step, the bonus token included; prefills are excluded. "
        "What was verified counts, also where a request's end then cut it; verifies of requests that had "
        "ended before do not.",
        "accepted tokens / verifies of requests", tables=("summary",)),
    _of_requests("position_acceptance", "ratio", "higher",
        "Share of a request's verifies in which the draft at that position was accepted, and with it all "
        "before it: position_acceptance.1 is the first draft behind the bonus token.",
        "verifies with more than k tokens / verifies of requests", tables=("summary",), variants="position"),
    *_COUNTERS,
    # parts of forward idle, and of host waits
    _of_timeline("host_late_us", "us", "lower",
        "Forward idle until the next forward op was enqueued, and its launch latency. An identity: host "
        "late = exposed stall + exposed host + launch latency.",
        "idle before the enqueue, without sleep, + start - enqueue where nothing held the op", tables=("gpu waits",)),
    _of_timeline("launch_latency_us", "us", "lower",
        "Part of host late: from the enqueue of a forward's first op, during idle, to its start, as far as "
        "nothing held the op.",
        "start - enqueue - dependency, where the enqueue lies in forward idle", tables=("gpu waits",)),
    _of_timeline("unnamed_host_us", "us", "lower",
        "Part of host late: exposed host work outside of any range or call. It is 0 where host time is "
        "modelled; elsewhere it is the Python between the scheduler's ranges.",
        "exposed host work - (ranges and calls, without waits and sleep)", tables=("gpu waits",)),
    _of_timeline("dependency_us", "us", "lower",
        "Forward idle while the next forward op was enqueued but held: by an event of another stream, by "
        "earlier work on its own stream, or by a kernel of another stream.",
        "idle after the enqueue within waits, same-stream ops and other kernels", tables=("gpu waits",)),
    _of_timeline("kernel_gap_us", "us", "lower",
        "Forward idle although the next forward op was enqueued before the idle began and nothing held it.",
        "idle after the enqueue that is neither dependency nor launch latency", tables=("gpu waits",)),
    _of_timeline("no_work_us", "us", "none",
        "Forward idle while the scheduler slept until the next arrival.",
        "idle within sleep", tables=("gpu waits",)),
    _of_timeline("residue_us", "us", "none",
        "Forward idle minus its four parts. It is 0 unless two records claim the same time, such as a stall "
        "during sleep; then it is negative.",
        "forward idle - host late - dependency - kernel gap - no work", tables=("gpu waits",)),
    _of_timeline("hidden", "us/step", "none",
        "Host stall that was not exposed: kernels of a forward ran meanwhile, or the next forward was "
        "already enqueued. It was not itself the reason the GPU was idle; what the host could have done "
        "meanwhile is another question.",
        "(host stall - exposed stall) / steps", tables=("host waits",)),
    _of_timeline("decode.steady", "steps", "none",
        "Decode steps in which no request finished, joined or was penalised. They count as decode steps too.",
        "steps announced as steady", tables=("step kinds",)),
    Definition(
        "expect", "limit", "none",
        "The budget of a scenario for one kind of step, such as expect.decode.steady: how many copies, syncs and "
        "kernels its worst step may have. CSV names budgets that the run did not meet the condition of.",
        "count of the worst step <= limit, for each stream and counter of the budget", _TIMELINE,
        (), variants="budget",
    ),
)  # fmt: skip

KINDS: tuple[str, ...] = get_args(StepKind)
_COUNTED = frozenset(entry.name for entry in _COUNTERS)
_WITH_QUALITY, _QUALITIES = ("h2d", "d2h"), ("pinned", "pageable", "blocking")
PERCENTILES = ("p50", "p90", "p95", "p99")

# What may follow the dot behind the name of a metric with variants.
_VARIANTS: Final = {
    "": "(?!)",
    "kind": f"({'|'.join(KINDS)})",
    "budget": rf"({'|'.join(KINDS)})(\.steady)?",
    "position": r"(?!0(\.|$))\d+",
    "microbatch": r"(outside|mb\d+)",
    "name": rf"(?!({'|'.join(PERCENTILES)})(\.|$))[^.]+",
}

DEFINITIONS: Mapping[str, Definition] = MappingProxyType({entry.name: entry for entry in _TABLE})


def definition(metric: str) -> Definition:
    """The definition of a metric or counter, or of that which a kind, position, name, microbatch, percentile or kind of
    host memory is a variant of (``forward_ms.decode.p99``, ``bubble_pct.mb0``, ``h2d_pinned``). A counter may have the
    kind of step and the stream that it is of (``decode.steady.schedule.h2d``), and a budget its kind of step.

    Raises KeyError if there is none.
    """
    if metric in DEFINITIONS:
        return DEFINITIONS[metric]
    name, *rest = metric.split(".")
    if name in KINDS:
        *steady, stream, counter = rest if len(rest) > 1 else ("", "", "")
        if steady not in ([], ["steady"]) or not stream or counter.partition("_")[0] not in _COUNTED:
            raise KeyError(metric)
        return definition(counter)
    counter, _, quality = name.partition("_")
    if counter in _WITH_QUALITY and quality in _QUALITIES and not rest:
        return DEFINITIONS[counter]
    entry = DEFINITIONS[name]
    percentile = rf"(\.({'|'.join(PERCENTILES)}))?" if entry.unit == "ms" else ""
    if not re.fullmatch(rf"(\.{_VARIANTS[entry.variants]})?{percentile}", metric.removeprefix(name)):
        raise KeyError(metric)
    return entry


def shown_in(table: ReportTable, metrics: Iterable[str]) -> list[str]:
    """Those of ``metrics`` that a table shows, in the order of the definitions, followed by their variants."""
    order = {name: place for place, name in enumerate(DEFINITIONS) if table in DEFINITIONS[name].tables}
    found = [
        (bool(dot), order[name], f"{name}{dot}{rest}")
        for name, dot, rest in (m.partition(".") for m in metrics)
        if name in order
    ]
    return [metric for _, _, metric in sorted(found)]

"""Disaggregated workers with KV on the decode worker's host: the tokens of one worker with all KV on the device, and
every copy of the transfer."""

from __future__ import annotations

from functools import partial

import pytest

from schedbench.profiles.record.result import Result
from schedbench.sched.relay.states import states
from tests.acceptance.cells import SCHEDULE, Ask, has_copies_and_their_waits, place, steps, times
from tests.acceptance.runs import OUTGROWING, digest_of, ends, known_result, result_of, statuses, value
from tests.acceptance.test_disagg_cells import LATEST, PREBUILT
from tests.acceptance.test_hisparse_cells import TOKEN

PAIR = "engine.disaggregation={mode: pair}"
FOUR = "engine.disaggregation={mode: pair, prefill: 2, decode: 2}"
NONE = "device.values=none"
LAYERS = 2
wide = pytest.mark.wide


# One worker, all KV on the device.
dense = partial(
    known_result, "hisparse", *OUTGROWING, "engine.hisparse={enabled: false}", "engine.relay=latest"
)


def plain(way: tuple[str, ...]) -> tuple[str, ...]:
    return (NONE,) if NONE in way else ()


@pytest.mark.parametrize(
    "way",
    [
        ("engine.relay=latest",),
        pytest.param(("engine.relay=latest", "engine.overlap=false"), marks=wide),
        pytest.param(("engine.relay=latest", "engine.page_size=1"), marks=wide),
        pytest.param(("engine.relay=latest", "engine.chunked_prefill_size=32"), marks=wide),
        pytest.param(("engine.relay=latest", "engine.hisparse.device_buffer_size=256"), marks=wide),
        ("engine.relay=latest", "engine.hisparse.host_ratio=1.0", "engine.kv_tokens=512", NONE),
        *(
            pytest.param((f"engine.relay={state}", NONE), marks=() if state == "pr26425" else wide)
            for state in states()
        ),
        pytest.param(("engine.relay=pr25944",), marks=wide),
    ],
)
def test_the_tokens_are_those_of_one_worker_with_all_kv_on_the_device(way: tuple[str, ...]) -> None:
    result = result_of("hisparse", *OUTGROWING, PAIR, *way)
    assert statuses(result) == {"finished"}
    assert value(result, "retractions") == 0
    assert digest_of(result) == digest_of(dense(*plain(way)))


@wide
def test_the_shipped_scenario_has_these_tokens_with_several_workers() -> None:
    one, four = (result_of("disagg_hisparse", *OUTGROWING, *way) for way in ((), (FOUR,)))
    assert digest_of(one) == digest_of(four) == digest_of(dense())


@pytest.mark.parametrize("hosted", ["true", "false"])
def test_the_indexers_keys_are_transferred(hosted: str) -> None:
    """Without the indexer's keys a decode would choose other tokens, wherever KV is stored."""
    result = result_of(
        "hisparse", *OUTGROWING, PAIR, f"engine.hisparse.enabled={hosted}", "engine.overlap=false"
    )
    assert digest_of(result) == digest_of(dense())


@pytest.mark.parametrize("after", [0, pytest.param(3, marks=wide)])
def test_aborted_requests_end_as_with_one_worker(after: int) -> None:
    abort = f"workload.abort={{fraction: 0.5, after_tokens: {after}}}"
    result, alone = result_of("disagg_hisparse", *OUTGROWING, abort), dense(abort)
    assert statuses(result) == {"finished", "aborted"}
    assert ends(result) == ends(alone)


def hosted(ask: Ask, prompt: int, state: str) -> Result:
    return ask(
        [(prompt, 12, 0)] * 3,
        PAIR,
        "model.preset=tiny-sparse",
        "engine.radix_cache=false",
        "engine.hisparse={enabled: true, device_buffer_size: 48}",
        f"engine.relay={state}",
    )


def by_kernels(result: Result) -> dict[tuple[str, str, str], int]:
    """Bytes that admission moves between host and device, by place, kind of step and stream."""
    found: dict[tuple[str, str, str], int] = {}
    for row in result.copies:
        if row.direction == "kernel" and row.site is not None and row.kind in ("none", "prebuilt"):
            key = place(row.site), row.kind, row.stream
            found[key] = found.get(key, 0) + row.bytes
    return found


@pytest.mark.parametrize("state", ["pr26425", pytest.param("pr25774-before", marks=wide), "latest"])
@pytest.mark.parametrize("prompt", [40, 100])
def test_admission_writes_kv_to_the_host_directly(ask: Ask, state: str, prompt: int) -> None:
    """A prebuilt batch costs what it costs with KV on the device: there is no staging, and rows are not downloaded. KV
    that fits into a hot buffer is copied into it."""
    result = hosted(ask, prompt, state)
    wanted = times(steps(result, "prebuilt"), LATEST if state == "latest" else PREBUILT)
    has_copies_and_their_waits(result, "prebuilt", wanted)
    written = {("KVTransfer.write_host", "none", "transfer"): 3 * prompt * TOKEN * LAYERS}
    filled = {("KVTransfer.preload", "prebuilt", SCHEDULE): 3 * prompt * TOKEN * LAYERS}
    assert by_kernels(result) == (written | filled if prompt <= 48 else written)
    assert not [row for row in result.copies if row.stream == "staging"]

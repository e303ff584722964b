"""Speculation's part of the ladder's table: every copy between host and device, and every wait, of each kind of step.
As in ``test_ladder_cells`` a number is how often a step of the kind makes the copy."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest

from schedbench.profiles.record.result import Result
from tests.acceptance.cells import (
    EXTEND_LENS,
    FORWARD,
    FREED_PAGES,
    KEEP,
    LAST_LOC,
    LATEST_TOKENS,
    LEAVING,
    PROMPT_NOW,
    PROMPTS,
    SCHEDULE,
    SERIAL_PREFILL,
    STAGGERED,
    THREE,
    UPLOADS,
    Ask,
    Copies,
    Copy,
    Table,
    Waits,
    column,
    copies,
    everywhere,
    has_copies_and_their_waits,
    steps,
    times,
    waits,
    waits_of,
)

wide = pytest.mark.wide

EAGLE = ("model={preset: tiny-llama-eagle}", "engine.cuda_graph=false")
V1 = (*EAGLE, "engine.overlap=false", "engine.speculative={algorithm: eagle, mode: v1}")
V2 = (*EAGLE, "engine.speculative={algorithm: eagle, mode: v2}")

# The results of both kinds of step are downloaded together.
RESULT = Copy("_copied", FORWARD, "d2h", "pinned nb")
# The draft's forward batch sends lengths of its own.
DRAFT_LENS = Copy("lens_uploaded", FORWARD, "h2d", "pageable nb")


def on_schedule(copy: Copy) -> Copy:
    return copy._replace(stream=SCHEDULE)


def filters(result: Result, state: str) -> Copies:
    """Rows are filtered whenever a request ends before others, which depends on what was accepted."""
    kept = copies(result, "verify").get(KEEP, 0)
    return times(kept, column(LEAVING, state))


# ---- v1: all of it on one stream, and the five pull requests change nothing of a verify -----------------------------

# The sum of lengths, for the attention.
V1_DRAFT: Copies = {Copy("_draft", SCHEDULE, "d2h", "pinned B"): 1}
V1_VERIFY: Copies = {
    # accepted places, predictions, how many were accepted
    Copy("_append", SCHEDULE, "d2h", "pageable B"): 3,
    # boolean masks: which places are any, which slots are evicted
    Copy("_append", SCHEDULE, "d2h", "pinned B"): 1,
    Copy("_compact", SCHEDULE, "d2h", "pinned B"): 1,
}
# The requests that continue, where one ends.
UNFINISHED = Copy("_extend", SCHEDULE, "h2d", "pageable B")
# Lengths to rotate a prompt's ids by (#25819); a loop of small copies on the device before.
ROTATION: Table = {
    Copy("rotate_by_uploaded_lens", SCHEDULE, "h2d", "pageable B"): "0 0 1 1 1 1 1 . 1 1",
}


class TestV1:
    def test_every_kind_of_step(self, ask: Ask, state: str) -> None:
        """The draft extends after the prompt, and after each verify with a request that continues."""
        result = ask(STAGGERED, *V1, f"engine.relay={state}")
        ends, verifies = 3, steps(result, "verify")
        assert steps(result, "draft") == verifies
        unfinished = copies(result, "draft_extend")[UNFINISHED]
        assert 0 < unfinished < ends
        expected = {
            "prefill": column(SERIAL_PREFILL, state),
            "draft": times(verifies, V1_DRAFT),
            "verify": times(verifies, V1_VERIFY) | filters(result, state),
            "draft_extend": {on_schedule(DRAFT_LENS): 2 * verifies, UNFINISHED: unfinished}
            | column(ROTATION, state),
        }
        for kind, counts in expected.items():
            has_copies_and_their_waits(result, kind, counts)

    @wide
    def test_what_the_draft_adds_to_a_prefill(self, ask: Ask, state: str) -> None:
        """Requests of a single token end with their prefill, so nothing is verified."""
        result = ask([(40, 1, 0)] * 3, *V1, f"engine.relay={state}")
        assert "verify" not in result.per_step
        expected = {on_schedule(DRAFT_LENS): 2} | column(ROTATION, state)
        has_copies_and_their_waits(result, "draft_extend", expected)

    @wide
    def test_draft_and_verify_with_pages(self, ask: Ask, state: str) -> None:
        result = ask(STAGGERED, *V1, f"engine.relay={state}", "engine.page_size=16")
        verifies = steps(result, "verify")
        freed = {FREED_PAGES: copies(result, "verify").get(FREED_PAGES, 0)}
        assert steps(result, "draft") == verifies
        has_copies_and_their_waits(result, "draft", times(verifies, V1_DRAFT))
        expected = times(verifies, V1_VERIFY) | filters(result, state) | freed
        has_copies_and_their_waits(result, "verify", expected)

    @wide
    def test_penalties_cost_no_copy(self, ask: Ask, state: str) -> None:
        """The bonus tokens are on the device."""
        result = ask(THREE, *V1, f"engine.relay={state}", frequency_penalty=0.5)
        assert copies(result, "verify") == times(steps(result, "verify"), V1_VERIFY) | filters(result, state)


# ---- v2 -----------------------------------------------------------------------------------------------------

# Where slots are allocated up to, and from where: blocking copies, one for each use, until #26380.
ENDS: Table = {
    Copy("_place_blocking", SCHEDULE, "h2d", "pageable B"): "2 2 2 2 2 0 0 . 2 2",
    Copy("_place_asynchronous", SCHEDULE, "h2d", "pageable nb"): "0 0 0 0 0 2 2 . 0 0",
}
PAGED_ENDS: Table = {
    Copy("_place_blocking", SCHEDULE, "h2d", "pageable B"): "4 4 4 4 4 0 0 . 4 4",
    Copy("_place_asynchronous", SCHEDULE, "h2d", "pageable nb"): "0 0 0 0 0 2 2 . 0 0",
}
# The host's lengths: while the step is prepared, when it is launched, with the device's own, on a stream apart.
HOST_LENGTHS: Table = {
    Copy("lengths_downloaded_early", SCHEDULE, "d2h", "pageable B"): "1 1 0 0 0 0 0 . 0 0",
    Copy("lengths_downloaded", SCHEDULE, "d2h", "pageable B"): "0 0 1 0 0 0 0 . 1 0",
    Copy("lengths_gathered_and_downloaded", SCHEDULE, "d2h", "pageable B"): "0 0 0 1 1 0 0 . 0 1",
    Copy("lengths_by_private_stream", "lengths", "d2h", "pinned nb"): "0 0 0 0 0 1 1 . 0 0",
}
# What was predicted, and how much of it counts.
V2_VERIFY: Table = {**ENDS, **HOST_LENGTHS, **everywhere({RESULT: 2})}
V2_PAGED_VERIFY: Table = {**PAGED_ENDS, **HOST_LENGTHS, **everywhere({RESULT: 2})}
V2_PREFILL: Table = {
    **everywhere(UPLOADS | EXTEND_LENS | {RESULT: 1}),
    **PROMPTS,
}


def v2_waits(expected: Copies, results: int, *, reader: str) -> Waits:
    """A result is read after its event; the host waits for the private stream by name."""
    found = Counter(waits_of(expected))
    found[reader, FORWARD, "cudaEventSynchronize"] += results
    private = Copy("lengths_by_private_stream", "lengths", "d2h", "pinned nb")
    if private in expected:
        found["lengths_by_private_stream", "lengths", "cudaStreamSynchronize"] += expected[private]
    return found


class TestV2:
    def test_every_kind_of_step(self, ask: Ask, state: str) -> None:
        """Drafting makes no copy and no wait; each draft extend uploads the lengths of its forward batch."""
        result = ask(STAGGERED, *V2, f"engine.relay={state}")
        verifies = steps(result, "verify")
        expected = {
            "prefill": column(V2_PREFILL, state),
            "verify": times(verifies, column(V2_VERIFY, state)) | filters(result, state),
            "draft": {},
            "draft_extend": times(steps(result, "draft_extend"), {DRAFT_LENS: 2}),
        }
        assert {kind: copies(result, kind) for kind in expected} == expected
        assert {kind: waits(result, kind) for kind in expected} == {
            "prefill": v2_waits(expected["prefill"], 1, reader="_host_tokens"),
            "verify": v2_waits(expected["verify"], verifies, reader="_take_late"),
            "draft": {},
            "draft_extend": {},
        }

    @wide
    def test_prefill_and_verify_with_pages(self, ask: Ask, state: str) -> None:
        result = ask(THREE, *V2, f"engine.relay={state}", "engine.page_size=16")
        expected = column(V2_PREFILL, state) | {LAST_LOC: 3}
        assert copies(result, "prefill") == expected
        assert waits(result, "prefill") == v2_waits(expected, 1, reader="_host_tokens")
        freed = {FREED_PAGES: copies(result, "verify")[FREED_PAGES]}
        expected = times(steps(result, "verify"), column(V2_PAGED_VERIFY, state)) | filters(result, state)
        assert copies(result, "verify") == expected | freed

    @wide
    def test_penalties(self, ask: Ask, state: str) -> None:
        result = ask(THREE, *V2, f"engine.relay={state}", frequency_penalty=0.5)
        penalised = column(V2_VERIFY, state) | {LATEST_TOKENS: 1}
        assert copies(result, "verify") == times(steps(result, "verify"), penalised) | filters(result, state)

    @wide
    def test_grammar(self, ask: Ask, state: str) -> None:
        """Trees are downloaded in three copies, and a mask is uploaded in one; the step before is settled first."""
        spelled = ("workload.sampling={grammar: {regex: '[0-9]{6,9}'}, ignore_eos: false}",)
        result = ask([(40, 12, 0)] * 3, *V2, f"engine.relay={state}", *spelled)
        trees = {
            Copy("draft_mask", FORWARD, "d2h", "pageable B"): 3,
            Copy("draft_mask", FORWARD, "h2d", "pinned nb"): 1,
        }
        expected = column(V2_VERIFY, state) | trees
        assert copies(result, "verify") == times(steps(result, "verify"), expected) | filters(result, state)


@wide
class TestHostLengths:
    """``seq_lens_cpu``: how accepted lengths reach the host, if at all."""

    @pytest.mark.parametrize("state", ["pr26020", "pr26425", "pr25945"])
    def test_an_upper_bound_costs_nothing(self, ask: Ask, state: str) -> None:
        bound = ask(THREE, *V2, f"engine.relay={{state: {state}, seq_lens_cpu: bound}}")
        lengths = column(HOST_LENGTHS, state)
        expected = {copy: count for copy, count in column(V2_VERIFY, state).items() if copy not in lengths}
        assert copies(bound, "verify") == times(steps(bound, "verify"), expected) | filters(bound, state)
        # the draft extend of a prompt has its lengths on the host, that of a verify computes them on the device
        assert copies(bound, "draft_extend") == {DRAFT_LENS: 2}

    @pytest.mark.parametrize("value", ["blocking", "private"])
    def test_a_switch_replaces_the_policy_of_the_state(self, ask: Ask, value: str) -> None:
        result = ask(THREE, *V2, f"engine.relay={{state: pr25945, seq_lens_cpu: {value}}}")
        column_of = {"blocking": "pr26425", "private": "pr25945"}[value]
        found = copies(result, "verify")
        [(copy, count)] = column(HOST_LENGTHS, column_of).items()
        assert found[copy] == count * steps(result, "verify")


class TestLatest:
    """No copy blocks: one more pinned copy per prefill than without speculation, and one per verify."""

    packed: ClassVar[Copy] = Copy("_place_packed", SCHEDULE, "h2d", "pinned nb")
    prefill: ClassVar[Copies] = {
        PROMPT_NOW: 1,
        Copy("_upload_fused", SCHEDULE, "h2d", "pinned nb"): 1,
        RESULT: 1,
    }

    @pytest.mark.parametrize("page", [1, pytest.param(16, marks=wide)])
    def test_v2(self, ask: Ask, page: int) -> None:
        result = ask(THREE, *V2, "engine.relay=latest", f"engine.page_size={page}")
        verifies = steps(result, "verify")
        found = copies(result, "verify")
        assert copies(result, "prefill") == self.prefill
        assert {copy: n for copy, n in found.items() if copy not in (KEEP, FREED_PAGES)} == {
            self.packed: verifies,
            RESULT: 2 * verifies,
        }
        assert copies(result, "draft") == copies(result, "draft_extend") == {}

    def test_v1_differs_in_its_lengths_only(self, ask: Ask) -> None:
        result = ask(THREE, *V1, "engine.relay=latest")
        verifies = steps(result, "verify")
        found = copies(result, "draft_extend")
        assert copies(result, "draft") == times(verifies, V1_DRAFT)
        assert copies(result, "verify") == times(verifies, V1_VERIFY) | filters(result, "pr25945")
        assert found.keys() <= {Copy("lens_packed", SCHEDULE, "h2d", "pinned nb"), UNFINISHED}

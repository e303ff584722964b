"""The relay before #25945, one policy after the other: negative placeholders that a kernel replaces."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.sched.batch import ForwardMode, StepResult
from schedbench.sched.kernels.rows import assert_all, resolve_negative
from schedbench.sched.relay.context import UNSTASHED, FutureRing, ringed
from schedbench.sched.relay.row import Relay
from tests.sched.loop.cpu_engine import CPU, config
from tests.sched.relay.test_bridge import batch, ids, made

EARLY = ["pr25774-before", "pr25774", "pr25944-before", "pr25944", "pr26020", "pr26425", "pr25945-before"]
ON_INPUT = EARLY[1:]


def launch(relay: Relay, rows: list[int], tokens: list[int]) -> torch.Tensor:
    """Runs a step that samples ``tokens``; returns what the batch carries to the next one."""
    some = batch(rows, input_ids=[1] * len(rows))
    future = relay.open(some)
    relay.publish(some)
    relay.stash(future, ids(tokens))
    relay.conclude(some, StepResult(ids(tokens), future))
    carried = some.output_ids if some.output_ids is not None else some.input_ids
    assert carried is not None
    return carried


class TestResolvingNegatives:
    @given(st.lists(st.integers(-8, 50), max_size=40))
    @settings(max_examples=40)
    def test_only_negatives_are_replaced(self, values: list[int]) -> None:
        held = ids(range(100, 109))
        given_ids = ids(values)
        resolve_negative(given_ids, held)
        assert given_ids.tolist() == [100 - v if v < 0 else v for v in values]

    def test_a_failed_assertion_is_an_error(self) -> None:
        assert_all(torch.tensor(True))
        with pytest.raises(RuntimeError):
            assert_all(torch.tensor(False))


class TestCarrying:
    @pytest.mark.parametrize("state", EARLY)
    def test_placeholders_lead_to_the_tokens(self, state: str) -> None:
        relay = made(state)
        carried = launch(relay, [4, 2, 5], [44, 22, 55])
        assert (carried < 0).all()
        following = batch([4, 2, 5], lens=[7, 7, 7])
        following.input_ids = following.output_ids = carried
        relay.prepare_input(following)
        relay.resolve(following)
        assert following.input_ids is not None and following.input_ids.tolist() == [44, 22, 55]

    def test_25774_moved_the_placeholders_to_the_input(self) -> None:
        some = batch([1], input_ids=[8])
        for state, field in (("pr25774-before", "output_ids"), ("pr25774", "input_ids")):
            relay = made(state)
            some.input_ids, some.output_ids = None, None
            relay.conclude(some, StepResult(ids([9]), relay.open(some)))
            assert [name for name in ("input_ids", "output_ids") if getattr(some, name) is not None] == [
                field
            ]

    @pytest.mark.parametrize("state", EARLY)
    def test_the_serial_loop_carries_the_tokens_themselves(self, state: str) -> None:
        assert launch(made(state, overlap=False), [4, 2], [44, 22]).tolist() == [44, 22]

    @pytest.mark.parametrize("state", EARLY)
    def test_a_negative_prompt_token_is_taken_for_a_placeholder(self, state: str) -> None:
        """This is upstream's defect: a token of -3 becomes what place 3 holds."""
        relay, prefill = made(state), batch([1])
        prefill.forward_mode = ForwardMode.EXTEND
        relay.context.futures.output_tokens_buf[3] = 77
        relay.stage_prompt(prefill, [array("q", [5, -3])])
        relay.resolve(prefill)
        assert prefill.input_ids is not None and prefill.input_ids.tolist() == [5, 77]


class TestOneSidedMerging:
    @pytest.mark.parametrize("state", ON_INPUT)
    def test_both_sides_present(self, state: str) -> None:
        left, right = batch([1], input_ids=[-1]), batch([3], input_ids=[-3])
        made(state).merge(left, right)
        assert left.input_ids is not None and left.input_ids.tolist() == [-1, -3]

    @pytest.mark.parametrize("state", ON_INPUT)
    def test_joining_ids_must_be_present(self, state: str) -> None:
        with pytest.raises(TypeError, match="carries no token ids"):
            made(state).merge(batch([1], input_ids=[-1]), batch([3]))

    @pytest.mark.parametrize("state", ON_INPUT)
    def test_running_batch_without_ids_loses_the_joining_ids(self, state: str) -> None:
        left = batch([1])
        made(state).merge(left, batch([3], input_ids=[-3]))
        assert left.input_ids is None

    def test_before_25774_the_same_holds_of_the_output(self) -> None:
        relay, left, right = made("pr25774-before"), batch([1]), batch([3])
        left.output_ids, right.output_ids = ids([-1]), ids([-3])
        relay.merge(left, right)
        assert left.output_ids.tolist() == [-1, -3]
        with pytest.raises(TypeError):
            relay.merge(left, batch([4]))


class TestSentinelLengths:
    def test_ids_and_lengths_are_one_tensor_between_forwards(self) -> None:
        relay = made("pr25944")
        some = batch([4, 2], input_ids=[1, 1], lens=[7, 9])
        relay.publish(some)
        relay.conclude(some, StepResult(ids([44, 22]), relay.open(some)))
        assert some.input_ids is some.seq_lens
        assert some.seq_lens.tolist() == [-4, -2]

    def test_resolving_restores_ids_and_lengths(self) -> None:
        relay = made("pr25944")
        some = batch([4, 2], input_ids=[1, 1], lens=[7, 9])
        future = relay.open(some)
        relay.publish(some)
        relay.stash(future, ids([44, 22]))
        relay.conclude(some, StepResult(ids([44, 22]), future))
        relay.advance(some)
        relay.resolve(some)
        assert some.input_ids is not None
        assert some.seq_lens.tolist() == some.seq_lens_cpu.tolist() == [8, 10]
        assert some.input_ids.tolist() == [44, 22]

    def test_an_unpublished_length_is_an_error(self) -> None:
        with pytest.raises(RuntimeError):
            made("pr25944").resolve(batch([4], input_ids=[-4]))

    def test_a_mixed_step_keeps_its_lengths(self) -> None:
        relay, some = made("pr25944"), batch([4], input_ids=[5], lens=[7])
        some.forward_mode = ForwardMode.MIXED
        relay.resolve(some)
        assert some.seq_lens.tolist() == [7]

    def test_allocation_reads_the_mirrored_lengths(self) -> None:
        relay, some = made("pr25944"), batch([4], lens=[7])
        some.seq_lens = ids([-4])
        assert relay.allocation_lengths(some).tolist() == [7]

    def test_mixing_restores_the_running_lengths(self) -> None:
        relay, prefill, running = (
            made("pr25944"),
            batch([1], input_ids=[5, 6]),
            batch([4], input_ids=[-4], lens=[7]),
        )
        running.seq_lens = ids([-4])
        relay.mix(prefill, running)
        assert running.seq_lens.tolist() == [7]
        assert prefill.input_ids is not None and prefill.input_ids.tolist() == [5, 6, -4]


class TestRing:
    def test_its_limit_counts_the_chunks_of_every_request(self) -> None:
        ring = ringed(config(max_running_requests=4, context_len=512, chunked_prefill_size=100))
        assert isinstance(ring, FutureRing)
        assert ring.limit == 4 * (3 + 6)
        assert ring.output_tokens_buf.shape == (ring.limit + 8,)

    def test_without_chunks_it_counts_three_steps(self) -> None:
        ring = ringed(config(max_running_requests=4, chunked_prefill_size=None))
        assert isinstance(ring, FutureRing) and ring.limit == 12

    @given(st.lists(st.integers(1, 5), min_size=1, max_size=40))
    @settings(max_examples=40)
    def test_slots_are_consecutive_positive_and_inside(self, sizes: list[int]) -> None:
        ring = FutureRing(7, most=5, device=CPU)
        for size in sizes:
            future = ring.take(ids(range(size)))
            slots = future.indices.tolist()
            assert future.interval == slice(slots[0], slots[-1] + 1)
            assert slots == list(range(slots[0], slots[0] + size))
            assert 1 <= slots[0] <= ring.limit and slots[-1] < ring.output_tokens_buf.shape[0]

    def test_the_ring_overwrites_a_token_that_waits_too_long(self) -> None:
        """A request waits while another's prompt is prefilled chunk after chunk, each of which takes a slot."""
        ring = FutureRing(4, most=1, device=CPU)
        waiting = ring.take(ids([1]))
        ring.output_tokens_buf[waiting.interval] = 70
        for chunk in range(ring.limit):
            assert ring.output_tokens_buf[waiting.indices].tolist() == [70]
            ring.output_tokens_buf[ring.take(ids([2])).interval] = chunk
        assert ring.output_tokens_buf[waiting.indices].tolist() == [ring.limit - 1]

    def test_the_pool_keeps_a_token_that_waits(self) -> None:
        relay = made("pr25774", index="pool")
        waiting = launch(relay, [1], [70])
        for chunk in range(50):
            launch(relay, [2], [chunk])
        some = batch([1])
        some.input_ids = waiting
        relay.resolve(some)
        assert some.input_ids.tolist() == [70]

    def test_place_zero_is_never_used(self) -> None:
        relay = made("pr25774")
        launch(relay, [1, 2], [70, 71])
        assert relay.context.futures.output_tokens_buf[0] == UNSTASHED

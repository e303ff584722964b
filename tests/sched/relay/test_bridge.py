"""What one step leaves for the next: tokens by row, lengths, prompts, and merged batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch

from schedbench.sched.batch import ForwardMode, ScheduleBatch, StepResult
from schedbench.sched.config import SamplingParams
from schedbench.sched.model.sampling import SamplingInfo
from schedbench.sched.relay.choice import choose
from schedbench.sched.relay.context import UNSTASHED, FutureMap
from schedbench.sched.relay.row import Relay
from schedbench.sched.request import Request
from schedbench.sched.streams import Streams
from tests.sched.loop.cpu_engine import CPU, RunRecorder, config, request


@pytest.fixture(params=["latest", "pr25945"])
def relay(request: pytest.FixtureRequest) -> Relay:
    return made(request.param)


def made(state: str, *, overlap: bool = True, streams: Streams | None = None, **switches: str) -> Relay:
    engine = config(overlap=overlap)
    return Relay.of(
        choose(state, switches).row(overlap=overlap),
        engine,
        streams=streams or Streams.of(engine),
        observer=RunRecorder(),
        req_to_token=torch.arange(9 * 64, dtype=torch.int32).view(9, 64),
    )


def stash(relay: Relay, rows: Sequence[int], tokens: Sequence[int]) -> None:
    """Stashes ``tokens`` for the requests in ``rows``."""
    relay.stash(relay.open(batch(rows)), ids(tokens))


def ids(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def batch(
    rows: Sequence[int], *, input_ids: Sequence[int] | None = None, lens: Sequence[int] = ()
) -> ScheduleBatch:
    lens = lens or [10 * row for row in rows]
    reqs = [request(f"r{row}", range(row, row + 3)) for row in rows]
    made = ScheduleBatch(reqs, ForwardMode.DECODE, input_ids=None if input_ids is None else ids(input_ids))
    made.req_pool_indices, made.req_pool_indices_cpu = ids(rows), ids(rows)
    made.seq_lens, made.seq_lens_cpu = ids(lens), ids(lens)
    made.orig_seq_lens = ids(lens).to(torch.int32)
    return made


class TestFutureMap:
    def test_rows_start_without_a_token(self) -> None:
        assert FutureMap(3, CPU).output_tokens_buf.tolist() == [UNSTASHED] * 3

    def test_a_token_stays_until_the_next_stash(self) -> None:
        futures = FutureMap(5, CPU)
        futures.stash(ids([4, 2]), torch.tensor([40, 20], dtype=torch.int32))
        futures.stash(ids([2]), ids([21]))
        assert futures.output_tokens_buf.tolist() == [UNSTASHED, UNSTASHED, 21, UNSTASHED, 40]

    def test_published_lengths_leave_the_tokens_unchanged(self) -> None:
        futures = FutureMap(3, CPU)
        futures.publish(ids([1]), ids([7]))
        assert futures.new_seq_lens_buf.tolist() == [UNSTASHED, 7, UNSTASHED]
        assert futures.output_tokens_buf.tolist() == [UNSTASHED] * 3

    def test_without_rows_nothing_is_written(self) -> None:
        """The tensors of an idle step may be padded; without rows they are ignored."""
        futures = FutureMap(3, CPU)
        futures.stash(ids([]), ids([1, 2]))
        futures.publish(ids([]), ids([1, 2]))
        assert futures.output_tokens_buf.tolist() == futures.new_seq_lens_buf.tolist() == [UNSTASHED] * 3


class TestMerging:
    """If either side lacks input ids, the merged batch has none: all rows are then gathered in the merged order."""

    @pytest.mark.parametrize("left", [None, [71, 72]], ids=["left none", "left ids"])
    @pytest.mark.parametrize("right", [None, [73]], ids=["right none", "right ids"])
    def test_merging_with_and_without_input_ids(
        self, relay: Relay, left: list[int] | None, right: list[int] | None
    ) -> None:
        stash(relay, [5, 1, 3], [75, 71, 73])
        running, joining = batch([1, 5], input_ids=left), batch([3], input_ids=right)
        relay.merge(running, joining)
        running.req_pool_indices, running.seq_lens = ids([1, 5, 3]), ids([10, 50, 30])
        if left is not None and right is not None:
            assert running.input_ids is not None and running.input_ids.tolist() == [71, 72, 73]
            return
        assert running.input_ids is None
        relay.resolve(running)
        assert running.input_ids is not None and running.input_ids.tolist() == [71, 75, 73]

    @pytest.mark.parametrize("present", [None, [71, 72, 73]])
    def test_filter_follows_the_rows(self, relay: Relay, present: list[int] | None) -> None:
        some = batch([1, 2, 3], input_ids=present)
        relay.filter(some, ids([2, 0]))
        assert (None if some.input_ids is None else some.input_ids.tolist()) == (present and [73, 71])


class TestResolving:
    @pytest.mark.parametrize(
        ("state", "switches"),
        [("latest", {}), ("pr25945", {"flatten": "list"}), ("pr25945", {"flatten": "numpy"})],
    )
    def test_a_prompt_is_uploaded_once(self, state: str, switches: dict[str, str]) -> None:
        """A token of a prompt is never taken for a sentinel."""
        prefill = batch([1, 2, 3])
        relay = made(state, **switches)
        relay.stage_prompt(prefill, [array("q", [5, 6]), array("q"), array("q", [7, -3])])
        relay.resolve(prefill)
        assert prefill.input_ids is not None and prefill.input_ids.tolist() == [5, 6, 7, -3]
        assert prefill.prefill_input_ids_cpu is None

    def test_a_staged_prompt_is_uploaded_by_the_forward_only(self) -> None:
        prefill = batch([1])
        relay = made("pr25945")
        relay.stage_prompt(prefill, [array("q", [5, 6])])
        assert prefill.prefill_input_ids_cpu is not None and prefill.input_ids is None

    def test_a_staged_part_can_still_grow(self, relay: Relay) -> None:
        part = array("q", [5])
        relay.stage_prompt(batch([1]), [part])
        part.append(6)

    def test_mixed_prompts_come_before_the_running_tokens(self, relay: Relay) -> None:
        stash(relay, [4, 3], [44, 33])
        prefill, running = batch([1]), batch([3, 4])
        relay.stage_prompt(prefill, [array("q", [5, 6])])
        relay.mix(prefill, running)
        relay.resolve(prefill)
        assert prefill.input_ids is not None and prefill.input_ids.tolist() == [5, 6, 33, 44]
        assert prefill.mix_running_indices is None

    def test_present_input_is_left_alone(self, relay: Relay) -> None:
        some = batch([1], input_ids=[8])
        relay.resolve(some)
        assert some.input_ids is not None and some.input_ids.tolist() == [8]

    def test_conclude_drops_the_input(self, relay: Relay) -> None:
        some = batch([1], input_ids=[8])
        relay.conclude(some, StepResult(ids([9]), relay.open(some)))
        assert some.input_ids is None


class TestLengths:
    def test_overlapped_lengths_are_replaced(self) -> None:
        some = batch([1, 2], lens=[5, 7])
        in_flight = some.seq_lens, some.seq_lens_cpu
        made("pr25945").advance(some)
        assert [t.tolist() for t in (some.seq_lens, some.seq_lens_cpu, some.orig_seq_lens)] == [[6, 8]] * 3
        assert [t.tolist() for t in in_flight] == [[5, 7]] * 2

    def test_serial_lengths_are_changed_in_place(self) -> None:
        some = batch([1, 2], lens=[5, 7])
        same = some.seq_lens, some.seq_lens_cpu, some.orig_seq_lens
        made("pr25945", overlap=False).advance(some)
        assert all(
            now is before
            for now, before in zip((some.seq_lens, some.seq_lens_cpu, some.orig_seq_lens), same, strict=True)
        )
        assert [t.tolist() for t in same] == [[6, 8]] * 3

    def test_dead_publish_writes_the_next_length(self) -> None:
        relay = made("pr25945")
        relay.publish(batch([2, 1], lens=[5, 7]))
        assert relay.context.futures.new_seq_lens_buf[:3].tolist() == [UNSTASHED, 8, 6]

    def test_a_state_without_mirrors_downloads_rows(self) -> None:
        some = batch([2, 1])
        downloaded = made("pr26020").host_indices(some)
        assert downloaded.tolist() == [2, 1] and downloaded is not some.req_pool_indices_cpu

    def test_a_state_with_mirrors_reads_them_on_the_host(self, relay: Relay) -> None:
        some = batch([2, 1], lens=[5, 7])
        assert relay.host_indices(some) is some.req_pool_indices_cpu
        assert relay.allocation_lengths(some) is some.seq_lens


def penalised(reqs: Sequence[Request], *, exact: bool) -> SamplingInfo:
    return SamplingInfo.from_requests(reqs, config=config(), exact=exact)


class TestPenaltyTokens:
    """Upstream counts the tokens that have reached the host: a step late under overlap, and the last prompt token
    first."""

    sampling = SamplingParams(presence_penalty=1.0)

    def counted(self, info: SamplingInfo) -> list[int]:
        logits = torch.zeros(1, config().vocab_size)
        info.apply_penalties(logits)
        return sorted(logits[0].nonzero().flatten().tolist())

    def test_upstream_starts_with_the_last_prompt_token(self) -> None:
        relay, req = made("pr25945"), request("r", [300, 301], sampling=self.sampling)
        some = batch([1])
        some.reqs = [req]
        info = penalised([req], exact=False)
        relay.penalty_tokens.before_decode(some, info)
        assert self.counted(info) == [301]
        req.output_ids.append(400)
        relay.penalty_tokens.before_decode(some, info)
        assert self.counted(info) == [301, 400]
        relay.penalty_tokens.after_sampling(info, ids([401]))
        assert self.counted(info) == [301, 400]

    def test_exact_counts_only_sampled_tokens(self) -> None:
        relay, req = made("latest"), request("r", [300, 301], sampling=self.sampling)
        some = batch([1])
        some.reqs = [req]
        info = penalised([req], exact=True)
        relay.penalty_tokens.before_decode(some, info)
        assert self.counted(info) == []
        relay.penalty_tokens.after_sampling(info, ids([400]))
        assert self.counted(info) == [400]


class TestIsolation:
    def test_a_failing_forward_leaves_the_batch_whole(self, relay: Relay) -> None:
        some = batch([1], input_ids=[8])
        kept = some.sampling_info = penalised(some.reqs, exact=relay.penalty_tokens.exact)
        with pytest.raises(ZeroDivisionError), relay.isolate(some):
            _ = 1 // 0
        assert some.sampling_info is kept

    def test_a_forward_samples_with_its_own_copy_and_consumes_its_prompt_once(self, relay: Relay) -> None:
        """Resolving comes before isolating, so the end of the isolation cannot restore the prompt."""
        some = batch([1])
        kept = some.sampling_info = penalised(some.reqs, exact=relay.penalty_tokens.exact)
        relay.stage_prompt(some, [array("q", [5])])
        with relay.isolate(some):
            assert some.sampling_info is not kept and some.prefill_input_ids_cpu is None
        assert some.sampling_info is kept and some.prefill_input_ids_cpu is None

    def test_two_launches_are_kept_alive(self, relay: Relay) -> None:
        batches = [batch([row]) for row in (1, 2, 3)]
        for some in batches:
            relay.keep_alive(some, StepResult(None, relay.open(some), extra_keep_alive_refs=["extra"]))
        held = [entry[0] for entry in relay.context.kept_alive]
        assert sorted(map(batches.index, held)) == [1, 2]
        for entry in relay.context.kept_alive:
            assert any(item is entry[0].seq_lens for item in entry) and "extra" in entry

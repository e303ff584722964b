"""The order of the waiting queue, the order of retraction, and the new-token ratio that limits admission."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from schedbench.sched.admission import IN_BATCH_PREFIX_TOKENS, LPM_FALLBACK_WAITING, WaitingOrder
from schedbench.sched.config import Policy, SamplingParams
from schedbench.sched.loop.retract import NewTokenRatio, retraction_order
from schedbench.sched.request import Request


def req(
    name: str, prompt: Sequence[int] = (1,), *, new: int = 10, output: int = 0, committed: int = 0
) -> Request:
    made = Request(name, array("q", prompt), SamplingParams(max_new_tokens=new), arrival=0)
    made.output_ids.extend(range(output))
    made.kv_committed_len = committed
    return made


def order(
    policy: Policy, waiting: list[Request], matches: dict[str, int] | None = None, seed: int = 0
) -> str:
    """Returns the names in the order of ``policy``; ``matches`` are cached prefix lengths, None without a tree."""
    match = None if matches is None else lambda r: matches.get(r.id, 0)
    WaitingOrder(policy, seed=seed, match=match).sort(waiting)
    return "".join(r.id for r in waiting)


def test_first_come_first_served() -> None:
    assert order("fcfs", [req("b"), req("a"), req("c")]) == "bac"


def test_longest_output_first_and_stable() -> None:
    assert order("lof", [req("a", new=5), req("b", new=9), req("c", new=5), req("d", new=7)]) == "bdac"


def test_longest_prefix_first_and_stable() -> None:
    assert order("lpm", [req("a"), req("b"), req("c"), req("d")], {"b": 8, "d": 16, "c": 8}) == "dbca"


def test_lpm_says_that_it_has_matched() -> None:
    assert WaitingOrder("lpm", seed=0, match=lambda _: 0).sort([req("a")])
    assert not WaitingOrder("fcfs", seed=0, match=lambda _: 0).sort([req("a")])


def test_lpm_without_a_tree_is_first_come() -> None:
    assert order("lpm", [req("b"), req("a")]) == "ba"
    assert not WaitingOrder("lpm", seed=0, match=None).sort([req("a")])


@pytest.mark.parametrize(
    ("waiting", "gives_up"), [(LPM_FALLBACK_WAITING, False), (LPM_FALLBACK_WAITING + 1, True)]
)
def test_lpm_falls_back_to_fcfs_for_long_queues(waiting: int, gives_up: bool) -> None:
    queue = [req(str(i)) for i in range(waiting)]
    assert WaitingOrder("lpm", seed=0, match=lambda r: int(r.id)).sort(queue) is not gives_up
    assert (queue[0].id == "0") is gives_up


HEAD = range(IN_BATCH_PREFIX_TOKENS)


class TestRepeatedHeads:
    """Of several uncached prompts with a common head, the first goes ahead and fills the tree for the others."""

    def test_the_second_with_a_head_waits(self) -> None:
        waiting = [req("a", [*HEAD, 1]), req("b", [*HEAD, 2]), req("c", [9] * 40)]
        assert order("lpm", waiting, {}) == "acb"

    def test_it_waits_behind_shorter_matches(self) -> None:
        waiting = [req("a", [*HEAD, 1]), req("b", [*HEAD, 2]), req("c", [9] * 40)]
        assert order("lpm", waiting, {"b": IN_BATCH_PREFIX_TOKENS, "c": 4}) == "cab"

    def test_a_cached_head_does_not_wait(self) -> None:
        waiting = [req("a", [*HEAD, 1]), req("b", [*HEAD, 2])]
        assert order("lpm", waiting, {"a": 33, "b": 33}) == "ab"
        assert order("lpm", waiting[::-1], {"a": 33, "b": 33}) == "ba"

    def test_a_short_head_does_not_wait(self) -> None:
        waiting = [req("a", HEAD), req("b", HEAD), req("c", [9])]
        assert order("lpm", waiting, {"c": 1}) == "cab"


def test_random_order_follows_from_the_seed() -> None:
    names = [chr(ord("a") + i) for i in range(20)]
    orders = {order("random", [req(name) for name in names], seed=seed) for seed in (1, 1, 2)}
    assert len(orders) == 2 and all(sorted(o) == names for o in orders)


def test_random_order_differs_from_round_to_round() -> None:
    policy = WaitingOrder("random", seed=1, match=None)
    queue = [req(chr(ord("a") + i)) for i in range(20)]
    rounds = []
    for _ in range(3):
        policy.sort(queue)
        rounds.append(tuple(r.id for r in queue))
    assert len(set(rounds)) == 3


@pytest.mark.parametrize(
    ("policy", "waiting", "free", "examined"),
    [("fcfs", 10, 3, 4), ("fcfs", 2, 8, 2), ("lpm", 100, 3, 100), ("lpm", 200, 3, 4), ("random", 10, 3, 4)],
)
def test_number_of_requests_examined_in_a_round(
    policy: Policy, waiting: int, free: int, examined: int
) -> None:
    assert WaitingOrder(policy, seed=0, match=lambda _: 0).examined(waiting, free) == examined


def test_fewest_outputs_are_retracted_first_then_the_longest_prompt() -> None:
    batch = [
        req("a", [1] * 5, output=3),
        req("b", [1] * 9, output=1),
        req("c", [1] * 4, output=1),
        req("d", output=7),
    ]
    kept_to_victims = [batch[i].id for i in retraction_order(batch)]
    assert kept_to_victims == ["d", "a", "c", "b"]


class TestNewTokenRatio:
    """Upstream's numbers: the ratio starts at 0.7, falls to 0.098 in 600 steps, and expects 20 more tokens of each
    request after a retraction."""

    def test_it_starts_at_seven_tenths_of_the_conservativeness(self) -> None:
        assert NewTokenRatio(1.0).value == 0.7
        assert NewTokenRatio(0.3).value == pytest.approx(0.21)
        assert NewTokenRatio(2.0).value == 1.0

    def test_it_decays_to_its_floor(self) -> None:
        ratio = NewTokenRatio(1.0)
        ratio.decay()
        assert ratio.value == pytest.approx(0.7 - (0.7 - 0.098) / 600)
        for _ in range(598):
            ratio.decay()
        assert ratio.value > 0.098 + 1e-6
        for _ in range(9):
            ratio.decay()
        assert ratio.value == pytest.approx(0.098)

    def test_it_jumps_after_a_retraction(self) -> None:
        ratio = NewTokenRatio(1.0)
        ratio.after_retraction([req("a", new=100, output=30), req("b", new=60, output=6)])
        assert ratio.value == (36 + 20 * 2) / (160 + 1)

    def test_it_never_expects_more_than_the_limits(self) -> None:
        ratio = NewTokenRatio(1.0)
        ratio.after_retraction([req("a", new=10, output=9)])
        assert ratio.value == 1.0

    def test_idle_resets_it(self) -> None:
        ratio = NewTokenRatio(0.5)
        ratio.after_retraction([req("a", new=10, output=9)])
        ratio.reset()
        assert ratio.value == 0.35

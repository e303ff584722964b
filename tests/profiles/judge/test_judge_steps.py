"""The content of a step's fingerprint, and the comparison of steps of two runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedbench.profiles.judge.engagement import (
    DifferingShare,
    Fingerprints,
    StepEngagement,
    StepPrint,
    engagement,
    from_totals,
    total,
)
from schedbench.profiles.judge.likeness import TokenSteps, first_divergence
from schedbench.profiles.record.timeline import Call, Op, Range, Site, Window
from schedbench.sched.observe import StepInfo
from tests.profiles.judge.conftest import OTHER_TOKENS, rows


@dataclass
class FakeNames:
    """Two source lines whose numbers can change."""

    line: int = 1
    streams: dict[int, str] = field(default_factory=lambda: {0: "schedule", 1: "forward"})

    @property
    def sites(self):
        return [Site("a.py", "f", self.line, "x.to(d)"), Site("b.py", "g", self.line, "e.wait()")]


@dataclass
class FakeRequest:
    id: str


def copy(step, *, start=0, bytes=8, site=0, blocking=False, memory="pinned", stream=0) -> Op:
    return Op(
        "h2d", "n", stream, start, start + 5, bytes, 0, memory, blocking, "prepare", False, step, site, start
    )


def sync(step, *, start=0, waited=3, site=1) -> Call:
    return Call("sync", "cudaEventSynchronize", start, start + 4, waited, 0, "settle", step, site)


def window(ops=(), calls=(), ranges=(), steps=(0,), kind="decode") -> Window:
    infos = [StepInfo(step, kind, 4, 4, False) for step in steps]
    return Window(0, 100, list(ranges), list(ops), list(calls), [], infos, infos)


def prints(*windows, names=None) -> tuple[StepPrint, ...]:
    sink = Fingerprints()
    for one in windows:
        sink.feed(one)
    sink.finish(names or FakeNames())
    return sink.steps


PLAIN = prints(window([copy(0)], [sync(0)]))


@pytest.mark.parametrize(
    "same",
    [
        window([copy(0, start=50)], [sync(0, start=60)]),
        window([copy(0)], [sync(0, waited=0)]),
        window([copy(0), copy(-1)], [sync(0), sync(-1)]),
        window([copy(0)], [sync(0), Call("launch", "l", 0, 1, 0, 0, "model", 0, 0)]),
    ],
    ids=["times", "time waited", "no step's", "launches"],
)
def test_times_and_launches_are_not_part_of_a_fingerprint(same):
    assert prints(same) == PLAIN


def test_line_numbers_are_not_part_of_a_fingerprint():
    assert prints(window([copy(0)], [sync(0)]), names=FakeNames(line=99)) == PLAIN


@pytest.mark.parametrize(
    "other",
    [
        window([copy(0, site=1)], [sync(0)]),
        window([copy(0, blocking=True)], [sync(0)]),
        window([copy(0, memory="pageable")], [sync(0)]),
        window([copy(0, stream=1)], [sync(0)]),
        window([copy(0)]),
        window([copy(0)], [sync(0)], [Range("flatten", 0, 3, 0, 9)]),
    ],
    ids=["site", "blocking", "memory", "stream", "sync", "phase"],
)
def test_other_operations_change_the_fingerprint(other):
    (step,) = prints(other)
    assert step.rows != PLAIN[0].rows
    assert step.shape != PLAIN[0].shape


@pytest.mark.parametrize("other", [[copy(0, bytes=16)], [copy(0), copy(0)]], ids=["bytes", "number"])
def test_bytes_and_counts_change_rows_but_not_the_shape(other):
    (step,) = prints(window(other, [sync(0)]))
    assert step.rows != PLAIN[0].rows
    assert step.shape == PLAIN[0].shape


def test_fingerprints_do_not_depend_on_the_windows():
    steps = range(12)
    whole = prints(window([copy(s) for s in steps], [sync(s) for s in steps], steps=steps))
    parts = [window([copy(s)], [sync(s)], steps=[s]) for s in steps]
    assert prints(*parts) == whole == PLAIN * 12


def test_a_new_pass_starts_anew():
    sink = Fingerprints()
    sink.feed(window([copy(0)], steps=range(3)))
    sink.begin()
    sink.feed(window([copy(0)], [sync(0)]))
    sink.finish(FakeNames())
    assert sink.steps == PLAIN


def step(kind="decode", rows="r", shape="s", batch=4) -> StepPrint:
    return StepPrint(kind, batch, batch, rows, shape)


def test_equal_batches_are_compared_step_by_step():
    a = [step("prefill"), *[step()] * 8]
    b = [step("prefill"), *[step()] * 6, *[step(rows="other")] * 2]
    found = engagement(a, b)
    assert found.basis == "steps"
    assert found.kinds == {"decode": DifferingShare(2, 8), "prefill": DifferingShare(0, 1)}
    assert (found.engaged, found.percent) == (DifferingShare(2, 8), 25.0)


def test_other_batches_are_compared_by_kind():
    a = [step(shape="s")] * 80 + [step(shape="t")] * 20
    b = [step(shape="s", batch=5)] * 150 + [step(shape="u", batch=5)] * 50
    found = engagement(a, b)
    assert found.basis == "kinds"
    assert found.kinds["decode"] == (pytest.approx(100 * 0.25), 100)


def test_differences_explained_by_batches_do_not_count():
    a = [step(shape="s")] * 90 + [step(shape="t")] * 10
    b = [step(shape="s", batch=5)] * 94 + [step(shape="t", batch=5)] * 6
    assert engagement(a, b).kinds == {"decode": DifferingShare(0, 100)}


def test_few_steps_count_when_all_of_them_differ():
    assert engagement([step("mixed")], [step("mixed", shape="u", batch=5)]).kinds["mixed"] == DifferingShare(
        1, 1
    )


def test_other_batches_alone_are_not_engaged():
    found = engagement([step(rows="r4")] * 8, [step(rows="r5", batch=5)] * 6)
    assert (found.basis, found.percent) == ("kinds", 0.0)


def test_a_kind_on_one_side_only_differs_in_all_steps():
    assert engagement([step()], [step(), step("mixed")]).kinds["mixed"] == DifferingShare(1, 1)


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc")))
def test_engagement_is_symmetric_and_a_share(left, right):
    a, b = ([step(shape=x, rows=x) for x in side] for side in (left, right))
    there, back = engagement(a, b), engagement(b, a)
    assert there.percent == pytest.approx(back.percent)
    assert -1e-9 <= there.percent <= 100 + 1e-9
    assert engagement(a, a).percent == 0


def test_runs_add_up_and_the_weakest_basis_is_named():
    parts = [
        StepEngagement("steps", {"decode": DifferingShare(1, 4)}),
        StepEngagement("kinds", {"decode": DifferingShare(2, 4)}),
    ]
    assert total(parts) == StepEngagement("kinds", {"decode": DifferingShare(3, 8)})
    assert total([]).percent == 0.0


def test_stored_results_are_compared_by_their_totals(result):
    a = result()
    more = a.syncs[0].model_copy(update={"site": None, "call": "new", "count": 70})
    b = a.model_copy(update={"syncs": (*a.syncs, more)})
    found = from_totals(a, b)
    assert found.basis == "totals"
    assert found.percent == pytest.approx(100 * 70 / a.per_step["decode"].steps)
    assert from_totals(a, a).percent == 0
    elsewhere = [row.model_dump(mode="json") for row in a.syncs]
    for row in elsewhere:
        row["site"] = row["site"] and row["site"] | {"function": "other"}
    assert from_totals(a, result({"syncs": elsewhere})).percent == 0
    kernels = {"max": 303, "mean": 303.0, "median": 303.0, "steps_with": 700}
    launched = from_totals(a, result({"per_step.decode.forward.kernel": kernels}))
    assert launched.kinds["decode"].percent == 100
    rarely = from_totals(a, result({"per_step.decode.forward.kernel": kernels | {"median": 302.0}}))
    assert rarely.percent == 0


@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)])
def test_engagement_is_unknown_where_source_lines_were_not_recorded(result, sides):
    nothing = {"copies": [], "syncs": [], "idle": {"abstained": "clocks of their own"}}
    found = total([from_totals(*(result(nothing if lacks else None) for lacks in sides))])
    assert (found.basis, dict(found.kinds)) == ("nothing", {})


def test_the_first_divergence_is_the_earliest_step(result):
    a = result({"requests": rows(r0=[1, 2, 3], r1=[4, 5])})
    b = result({"requests": rows(r0=[1, 2, 9], r1=[4]), **OTHER_TOKENS})
    steps = {"r0": [0, 1, 8], "r1": [2, 3]}
    found = first_divergence(a, b, seed=7, steps_a=steps, steps_b=steps)
    assert (found.seed, found.request, found.position, found.token_a, found.token_b) == (7, "r1", 1, 5, None)
    assert (found.step_a, found.step_b) == (3, 3)
    unknown = first_divergence(a, b, seed=7)
    assert (unknown.request, unknown.step_a) == ("r0", None)


def test_digests_without_tokens_have_no_position_of_divergence(result):
    found = first_divergence(result(), result(OTHER_TOKENS), seed=3)
    assert (found.seed, found.request) == (3, None)
    assert first_divergence(result(), result(), seed=3) is None


def test_tokens_belong_to_the_step_that_settles_them():
    log = TokenSteps()
    for at in (5, 6):
        log.launched(StepInfo(at, "decode", 1, 1, False))
    for at, count in ((5, 1), (6, 2)):
        log.tokens([FakeRequest("r")], count)
        log.settled(StepInfo(at, "decode", 1, 1, False))
    assert list(log.steps["r"]) == [0, 1, 1]

"""Comparison of captures: counts are compared exactly, times only where there are repeats."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from schedbench.profiles.judge.compare import Comparison, judge
from schedbench.profiles.judge.conclusion import conclusion
from schedbench.profiles.judge.likeness import LikenessError
from schedbench.profiles.judge.reasons import Reason
from schedbench.profiles.judge.sides import opened, parse
from schedbench.profiles.judge.trials import TrialPlan, TrialRequest, conduct
from schedbench.profiles.judge.worker import SideError
from tests.profiles.captures.exports import Export, looped, own_loop


def compared(a: Path, b: Path) -> Comparison:
    with opened(None, parse(str(a)), parse(str(b)), TrialRequest()) as sides:
        return judge(conduct(*sides, TrialPlan(), lambda *_: None))


def capture(path: Path, **more: float | bool) -> Path:
    path.parent.mkdir(exist_ok=True)
    return looped(steps=12, model=True, **more).write(path)


def several(folder: Path, seed: int, *, slow: float = 0.0) -> Path:
    random = Random(seed)
    for number in range(8):
        capture(folder / f"{number}.sqlite", slow=slow + random.uniform(0, 0.4))
    return folder


def test_single_captures_give_counts_and_no_verdict(tmp_path):
    a, b = capture(tmp_path / "a.sqlite"), capture(tmp_path / "b.sqlite", blocking=False, slow=30)
    found = compared(a, b)
    changed = {
        (c.kind, c.stream, c.counter): (c.a.mean, c.b.mean) for c in found.counts if c.change != "equal"
    }
    assert changed["decode", "schedule", "sync"] == (1, 0)
    assert changed["decode", "schedule", "h2d_blocking"] == (1, 0)
    assert ("decode", "forward", "d2h") not in changed
    assert (found.verdict, found.reasons) == ("inconclusive", (Reason.LOW_N,))
    assert found.headline == ("step_ms", "forward_idle_us_per_step")


def test_several_captures_give_intervals(tmp_path):
    """Both sides do the same on the device, so the change cannot be shown to have been engaged."""
    a, b = several(tmp_path / "a", 1), several(tmp_path / "b", 2, slow=40)
    found = compared(a, b)
    assert len(found.trials.a) == len(found.trials.b) == 8
    assert found.reasons == (Reason.NOT_ENGAGED,)
    assert "same engine" not in conclusion(found, a="a", b="b"), "a capture does not say which engine made it"
    assert found.metrics["step_ms"].interval.low > 15
    assert found.metrics["step_ms"].n == 8


def test_noise_gives_no_difference(tmp_path):
    found = compared(several(tmp_path / "a", 1), several(tmp_path / "b", 2))
    assert abs(found.metrics["step_ms"].delta) < 0.5


@pytest.mark.parametrize("kinds", [("KERNEL", "MEMCPY", "RUNTIME", "SYNCHRONIZATION"), ("RUNTIME",)])
def test_captures_with_and_without_a_gpu_or_calls_are_not_compared(tmp_path, kinds):
    tables = [f"CUPTI_ACTIVITY_KIND_{kind}" for kind in kinds]
    without = looped(model=True).write(tmp_path / "b.sqlite", without=tuple(tables))
    with pytest.raises(LikenessError, match=r"device\.recorded: True against False"):
        compared(capture(tmp_path / "a.sqlite"), without)


@pytest.mark.parametrize(
    ("version", "without", "key"),
    [("middle", "KERNEL", "device.cuda_graph_trace"), ("new", "MEM_KIND", "device.memory_kinds")],
    ids=["graphs traced whole", "no kinds of memory"],
)
def test_counts_that_only_one_capture_can_have_are_not_compared(tmp_path, version, without, key):
    """They would read as copies and kernels that B no longer makes."""
    a, b = looped(version), looped(version)
    b.rows["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"] = b.rows["CUPTI_ACTIVITY_KIND_KERNEL"] * (without == "KERNEL")
    tables = [table for table in b.rows if table.endswith(without)]
    b.write(tmp_path / "b.sqlite", without=tuple(tables))
    with pytest.raises(LikenessError, match=key):
        compared(a.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite")


def test_managed_memory_is_a_kind_that_is_known(tmp_path):
    managed = looped()
    managed.put("ENUM_CUDA_MEM_KIND", id=4, label="Managed")
    for row in managed.rows["CUPTI_ACTIVITY_KIND_MEMCPY"]:
        row |= {"srcKind": 4, "dstKind": 4}
    assert compared(looped().write(tmp_path / "a.sqlite"), managed.write(tmp_path / "b.sqlite")).counts


def test_copies_that_neither_capture_has_recorded_are_not_called_equal(tmp_path):
    export = Export()
    own_loop(export)
    kinds = tuple(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("RUNTIME", "KERNEL", "SYNCHRONIZATION"))
    paths = [export.write(tmp_path / f"{name}.sqlite", without=kinds) for name in "ab"]
    assert "copies and syncs per step not recorded" in conclusion(compared(*paths), a="a", b="b")


def test_a_folder_prefers_exports_to_the_reports_beside_them(tmp_path):
    capture(tmp_path / "x.sqlite")
    (tmp_path / "x.nsys-rep").write_bytes(b"")
    assert [path.name for path in parse(str(tmp_path)).stored] == ["x.sqlite"]


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(SideError, match="no results in this folder, and no captures"):
        parse(str(tmp_path))

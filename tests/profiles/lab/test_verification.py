"""Three counts of one run, from synthetic documents: agreement, explained differences and findings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schedbench.profiles.lab.single_run import CountedLine
from schedbench.profiles.lab.verification import (
    EXPLANATIONS,
    SOURCES,
    Document,
    main,
    row_of,
    verify,
)
from schedbench.profiles.record.result import CopyRow, CountSummary, KindCounts, Result, SitePart, SyncRow

SAMPLE = Path(__file__).parents[1] / "sample_result.json"
UP = CountedLine("decode", "schedule", "prepare", "sched/x.py", "f", "x.to(device)", "h2d pinned")
SYNC = CountedLine(
    "decode", "forward", "settle", "sched/x.py", "f", "done.synchronize()", "cudaEventSynchronize"
)

Make = Callable[..., Result]


def site(line: CountedLine) -> SitePart:
    return SitePart(file=line.file, function=line.function, line=1, statement=line.statement)


def copied(line: CountedLine, count: int, size: int) -> CopyRow:
    direction, memory, *blocking = [*line.what.split(), ""][:3] if " " in line.what else (line.what, "", "")
    return CopyRow(
        site=site(line), range=line.range, kind=line.kind, stream=line.stream, direction=direction,
        host_memory=memory, blocking=any(blocking), count=count, steady=0, bytes=size, host_us=0, exposed_us=0,
    )  # fmt: skip


def synced(line: CountedLine, count: int) -> SyncRow:
    return SyncRow(
        site=site(line), range=line.range, kind=line.kind, stream=line.stream, call=line.what, sync=True,
        count=count, steady=0, host_us=0, exposed_us=0,
    )  # fmt: skip


def kinds(steps: int, **streams: dict[str, float]) -> dict[str, Any]:
    tallies = {
        stream: {
            name: CountSummary(median=mean, mean=mean, max=round(mean), steps_with=steps)
            for name, mean in counters.items()
        }
        for stream, counters in streams.items()
    }
    return {"decode": KindCounts.model_validate({"steps": steps, **tallies})}


@pytest.fixture
def result() -> Make:
    sample = Result.from_json(SAMPLE.read_text())

    def make(*, up: int = 6, size: int = 48, waits: int = 3, per_step: Any = None, more: Any = ()) -> Result:
        copies = (*((copied(UP, up, size),) if up else ()), *more)
        update = {
            "copies": copies,
            "syncs": (synced(SYNC, waits),),
            "per_step": kinds(3) if per_step is None else per_step,
            "run": sample.run.model_copy(update={"cancelled": False}),
        }
        return sample.model_copy(update=update)

    return make


def counts(*, up: int = 6, size: int = 48, waits: int = 3, steps: int = 3) -> dict[str, Any]:
    rows = [(UP, up, size), (SYNC, waits, 0)]
    listed = [{**line._asdict(), "count": count, "bytes": held} for line, count, held in rows if count]
    return {"steps": {"decode": steps}, "rows": listed}


def lines(found: Document) -> list[tuple[str, float, float | None, float]]:
    return [
        (row["what"], *(row[source] and row[source]["count"] for source in SOURCES))
        for row in found["unexplained"]
    ]


def test_three_equal_counts_agree(result: Make) -> None:
    found = verify(result(), counts(), result())
    assert found["agrees"]
    assert len(found["rows"]) == 2
    assert found["explained"] == found["unexplained"] == []


FEW, MANY = kinds(3, forward={"kernel": 20.0}), kinds(3, forward={"kernel": 31.5})


@pytest.mark.parametrize(
    ("predicted", "announced", "recorded", "line"),
    [
        ({"up": 7}, {}, {}, ("h2d pinned", 7, 6, 6)),
        ({}, {"up": 7}, {}, ("h2d pinned", 6, 7, 6)),
        ({}, {}, {"up": 7}, ("h2d pinned", 6, 6, 7)),
        ({"up": 0}, {}, {}, ("h2d pinned", 0, 6, 6)),
        ({}, {"up": 0}, {}, ("h2d pinned", 6, 0, 6)),
        ({}, {}, {"up": 0}, ("h2d pinned", 6, 6, 0)),
        ({}, {}, {"size": 96}, ("h2d pinned", 6, 6, 6)),  # in bytes
        ({"waits": 4}, {}, {}, ("cudaEventSynchronize", 4, 3, 3)),
        ({"per_step": MANY}, {}, {"per_step": FEW}, ("kernel per step", 31.5, None, 20.0)),
        # outside of a forward
        ({}, {}, {"more": (copied(UP._replace(what="d2d"), 3, 24),)}, ("d2d", 0, None, 3)),
    ],
)
def test_a_deviating_count_is_found(
    result: Make, predicted: Any, announced: Any, recorded: Any, line: Any
) -> None:
    found = verify(result(**predicted), counts(**announced), result(**recorded))
    assert lines(found) == [line]
    assert not found["agrees"]


@pytest.mark.parametrize(
    ("few", "many", "why"),
    [
        (FEW, MANY, "kernels of one op"),
        (kinds(3, schedule={"kernel": 20.0}), kinds(3, schedule={"kernel": 60.0}), "kernels of one op"),
        (kinds(3, schedule={"kernel": 20.0}), kinds(3, schedule={"kernel": 60.1}), ""),
        (kinds(3), kinds(3, schedule={"kernel": 1.0}), ""),  # one op may be several, but not none
        (kinds(3), kinds(3, forward={"d2d": 2.0}), "copies inside a forward"),
        (kinds(3), kinds(3, forward={"d2d": 8.5}), ""),
    ],
)
def test_more_kernels_and_copies_in_a_forward_are_explained_up_to_a_bound(
    result: Make, few: Any, many: Any, why: str
) -> None:
    found = verify(result(per_step=few), counts(), result(per_step=many))
    (row,) = [row for row in found["rows"] if not row["agrees"]]
    assert (row["why"], row["announced"]) == (why, None)
    assert found["explained"] == ([row] if why else []) and found["agrees"] == bool(why)


def test_different_numbers_of_steps_are_a_difference(result: Make) -> None:
    found = verify(result(), counts(steps=4), result())
    assert found["steps"] == {"decode": [3, 4, 3]}
    assert not found["agrees"]


def test_an_incomplete_trace_does_not_agree(result: Make) -> None:
    broken = result(per_step={}).model_copy(
        update={"environment": {"passes": {"abstained": "buffers ran full"}}}
    )
    found = verify(result(), counts(), broken)
    assert found["trouble"] == ["the recorded run counted nothing: buffers ran full"]
    assert not found["agrees"]


def test_an_interrupted_run_does_not_agree(result: Make) -> None:
    run = result().run.model_copy(update={"cancelled": True})
    found = verify(result().model_copy(update={"run": run}), counts(), result())
    assert found["trouble"] == ["the predicted run was interrupted"]


def written(result: Make, folder: Path, **announced: int) -> None:
    """Write what the three stages write."""
    result().write(folder / "predicted.json")
    (folder / "announced.json").write_text(json.dumps(counts(**announced)))
    result().write(folder / "recorded.json")


def test_the_document_lists_unexplained_differences(
    result: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(result, tmp_path)
    assert main([str(tmp_path)]) == 0
    capsys.readouterr()
    written(result, tmp_path, up=7)
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("unexplained differences: 1; kinds of steps")
    found = json.loads((tmp_path / "verify.json").read_text())
    assert found == verify(result(), counts(up=7), result())
    assert (found["agrees"], found["compared"], found["steps"]) == (False, 2, {"decode": [3, 3, 3]})
    (differing,) = found["unexplained"]
    assert differing["announced"] == {"count": 7, "bytes": 48}
    assert differing["statement"] == "x.to(device)"


def why(what: str, **counts: float) -> str:
    line = CountedLine("decode", "forward", "model", "", "", "", what)
    given = {source: {"count": count, "bytes": 0} for source, count in counts.items()}
    two = {"count": 2, "bytes": 0}
    found: str = row_of(line, **({"predicted": two, "announced": None, "recorded": two} | given))["why"]
    return found


def test_agreeing_counts_need_no_explanation() -> None:
    assert not why("kernel per step")


def test_differences_of_copies_and_syncs_are_never_explained() -> None:
    for what in ("h2d pinned", "d2h pageable blocking", "cudaStreamSynchronize", "cudaEventSynchronize"):
        for source in ("predicted", "announced", "recorded"):
            assert not why(what, **{"announced": 2.0, source: 1.0})


def test_every_explanation_has_a_unique_name_and_a_reason() -> None:
    assert len({one.name for one in EXPLANATIONS}) == len(EXPLANATIONS)
    assert all(len(one.reason) > 40 for one in EXPLANATIONS)

"""Programs on two streams with one edge missing, and the same programs with the edge. They return a tensor whose values
depend on it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from schedbench.profiles.record.result import HazardFinding
from schedbench.profiles.vgpu.tensor import wrap
from schedbench.sched.kernels.declare import Access, Work, kernel, reads
from tests.profiles.vgpu.conftest import Scene


@pytest.fixture
def scene(opened: Any) -> Iterator[Scene]:
    with opened(hazards=True) as bench:
        yield Scene(bench.gpu)


def one(scene: Scene) -> HazardFinding:
    assert len(scene.found) == 1, [finding.missing for finding in scene.found]
    return scene.found[0]


def test_a_finding_has_the_lines_that_called_its_later_one(scene: Scene) -> None:
    raw(scene, edge=False)
    later = one(scene).second
    assert later is not None
    assert [site.statement for site in later.callers] == ["raw(scene, edge=False)"]


# ---- between streams ---------------------------------------------------------------------------------------


def raw(scene: Scene, edge: bool) -> torch.Tensor:
    lengths = scene.zeros(4)
    with scene.on(scene.schedule):
        lengths.add_(1)
    if edge:
        scene.forward.wait_stream(scene.schedule)
    with scene.on(scene.forward):
        return lengths * 2


def war(scene: Scene, edge: bool) -> torch.Tensor:
    lengths = scene.zeros(4)
    with scene.on(scene.forward):
        doubled = lengths * 2
        event = scene.module.Event()
        event.record()
    if edge:
        event.wait(scene.schedule)
    with scene.on(scene.schedule):
        lengths.add_(1)
    return doubled


def waw(scene: Scene, edge: bool) -> torch.Tensor:
    buffer = scene.zeros(4)
    with scene.on(scene.forward):
        buffer.fill_(1)
    if edge:
        scene.forward.synchronize()
    with scene.on(scene.schedule):
        buffer.fill_(2)
    return buffer


def overlapping_views(scene: Scene, edge: bool) -> torch.Tensor:
    """Views with different starts, neither of which covers the whole tensor."""
    buffer = scene.zeros(100)
    with scene.on(scene.forward):
        doubled = buffer[10:60] * 2
    if edge:
        scene.schedule.wait_stream(scene.forward)
    with scene.on(scene.schedule):
        buffer[59:].fill_(1)
    return doubled


def same_rows(scene: Scene, edge: bool) -> torch.Tensor:
    table, rows = scene.zeros(8, 16), torch.tensor([1, 3, 5]).to(scene.device)
    others = torch.tensor([5, 6]).to(scene.device)
    scene.module.synchronize()
    with scene.on(scene.forward):
        read = table[rows]
    if edge:
        scene.schedule.wait_stream(scene.forward)
    with scene.on(scene.schedule):
        table[others] = 7
    return read


def index_that_changed(scene: Scene, edge: bool) -> torch.Tensor:
    """The read covers the rows that the index selected at the launch, not those that it selects later."""
    table, rows = scene.zeros(8, 16), torch.tensor([1, 3, 5]).to(scene.device)
    other = torch.tensor([3]).to(scene.device)
    scene.module.synchronize()
    with scene.on(scene.forward):
        read = table[rows]
        rows.fill_(0)
    if edge:
        scene.schedule.wait_stream(scene.forward)
    with scene.on(scene.schedule):
        table[other] = 7
    return read


def replayed_graph(scene: Scene, edge: bool) -> torch.Tensor:
    """The graph's inputs are refilled while it still reads them."""
    inputs = scene.zeros(4)
    graph = scene.module.CUDAGraph()
    with scene.module.graph(graph, stream=scene.forward):
        outputs = inputs * 2 + 1
    with scene.on(scene.forward):
        graph.replay()
    if edge:
        scene.schedule.wait_stream(scene.forward)
    with scene.on(scene.schedule):
        inputs.fill_(3)
    return outputs


def memory_that_grows(scene: Scene, edge: bool) -> torch.Tensor:
    """What the memory holds is copied to new memory, which all views have from then on."""
    lengths = scene.zeros(4)
    with scene.on(scene.schedule):
        lengths.add_(1)
    if edge:
        scene.forward.wait_stream(scene.schedule)
    with scene.on(scene.forward):
        return lengths.resize_(4096)


def memory_that_has_grown(scene: Scene, edge: bool) -> torch.Tensor:
    lengths = scene.zeros(4)
    last = lengths[3:]
    with scene.on(scene.schedule):
        lengths.resize_(4096)
    if edge:
        scene.forward.wait_stream(scene.schedule)
    with scene.on(scene.forward):
        return last * 2


def result_after_its_size(scene: Scene, edge: bool) -> torch.Tensor:
    """The host waits for the number of indices; a kernel that is launched afterwards writes them."""
    with scene.on(scene.schedule):
        found = torch.ones(4, device=scene.device).nonzero()
    if edge:
        scene.forward.wait_stream(scene.schedule)
    with scene.on(scene.forward):
        return found + 1


def running_mean(scene: Scene, edge: bool) -> torch.Tensor:
    with scene.on(scene.schedule):
        x, mean, variance = torch.ones(3, 8, 8, device=scene.device)[:, :8]
        torch.nn.functional.batch_norm(x, mean[0], variance[0], training=True)
    if edge:
        scene.forward.wait_stream(scene.schedule)
    with scene.on(scene.forward):
        return mean[0] * 2


# ---- the host ----------------------------------------------------------------------------------------------


def pinned_overwritten(scene: Scene, edge: bool) -> torch.Tensor:
    staging = torch.zeros(4, dtype=torch.int64, pin_memory=True)
    with scene.on(scene.forward):
        sent = staging.to(scene.device, non_blocking=True)
    if edge:
        scene.forward.synchronize()
    staging.fill_(1)
    return sent


def read_before_sync(scene: Scene, edge: bool) -> torch.Tensor:
    with scene.on(scene.forward):
        tokens = torch.zeros(4, dtype=torch.int64, device=scene.device).to("cpu", non_blocking=True)
        done = scene.module.Event()
        done.record()
    if edge:
        done.synchronize()
    return torch.tensor(tokens.tolist())


def read_through_numpy(scene: Scene, edge: bool) -> None:
    with scene.on(scene.forward):
        tokens = torch.zeros(4, device=scene.device).to("cpu", non_blocking=True).numpy()
    if edge:
        scene.forward.synchronize()
    tokens.tolist()


def mapped_overwritten(scene: Scene, edge: bool) -> None:
    """A kernel reads memory of the host by its address, as under unified virtual addressing."""
    staging = torch.zeros(4, pin_memory=True)
    lengths = staging.numpy()
    with scene.on(scene.forward):
        _ = wrap(staging) + 1
    if edge:
        scene.forward.synchronize()
    lengths[1:3] = 7


# ---- freed blocks ------------------------------------------------------------------------------------------


def freed_without_record(scene: Scene, edge: bool) -> torch.Tensor:
    indices = scene.zeros(4)
    with scene.on(scene.forward):
        more = indices + 1
    if edge:
        indices.record_stream(scene.forward)
    del indices
    with scene.on(scene.schedule):
        torch.ones(4, dtype=torch.int64, device=scene.device)
    return more


def freed_before_the_wait(scene: Scene, edge: bool) -> torch.Tensor:
    indices = scene.zeros(4)
    with scene.on(scene.forward):
        more = indices + 1
    kept = indices[1:] if edge else None  # a view holds the block
    del indices
    with scene.on(scene.schedule):
        torch.ones(4, dtype=torch.int64, device=scene.device)
    del kept
    return more


Program = Callable[[Scene, bool], object]
BETWEEN_STREAMS = [raw, war, waw, overlapping_views, same_rows, index_that_changed, replayed_graph]
OPERATORS = {
    memory_that_grows: ("add_", "resize_"),
    memory_that_has_grown: ("resize_", "mul"),
    result_after_its_size: ("nonzero", "add"),
    running_mean: ("native_batch_norm", "mul"),
}
AT_THE_HOST = [pinned_overwritten, read_before_sync, read_through_numpy, mapped_overwritten]
FREED = [freed_without_record, freed_before_the_wait]


@pytest.mark.parametrize("program", [*BETWEEN_STREAMS, *AT_THE_HOST, *FREED, *OPERATORS])
def test_a_present_edge_gives_no_finding(scene: Scene, program: Program) -> None:
    program(scene, True)
    assert scene.found == []


@pytest.mark.parametrize("program", BETWEEN_STREAMS)
def test_a_missing_edge_between_streams_gives_one_finding(scene: Scene, program: Program) -> None:
    program(scene, False)
    finding = one(scene)
    assert finding.kind == "race"
    assert {finding.first.stream, finding.second.stream} == {"schedule", "forward"}
    assert finding.first.write or finding.second.write
    for touch in (finding.first, finding.second):
        assert touch.site is not None and touch.site.function == program.__name__
        assert f"{touch.op} at vgpu/test_hazards.py:{touch.site.line}" in finding.missing
    assert "no wait_stream or event between them" in finding.missing


@pytest.mark.parametrize(("program", "ops"), OPERATORS.items())
def test_an_operator_is_found_at_all_memory_that_it_accesses(
    scene: Scene, program: Program, ops: tuple[str, str]
) -> None:
    program(scene, False)
    assert ops in [(finding.first.op, finding.second.op) for finding in scene.found if finding.second]


def test_a_result_is_named_once_where_its_own_write_is_the_first_access(scene: Scene) -> None:
    with scene.on(scene.schedule):
        lengths = torch.ones(4, device=scene.device)
    with scene.on(scene.forward):
        _ = lengths * 2
    finding = one(scene)
    assert finding.first.site is not None
    assert finding.resource == f"result of fill_ at vgpu/test_hazards.py:{finding.first.site.line}"
    assert finding.missing.startswith(
        "the schedule stream's write must come before the forward stream's read (mul"
    )


@pytest.mark.parametrize("program", AT_THE_HOST)
def test_the_host_must_wait_for_pinned_memory(scene: Scene, program: Program) -> None:
    program(scene, False)
    finding = one(scene)
    assert (finding.kind, finding.first.stream, finding.second.stream) == ("pinned", "forward", "host")
    assert finding.second.site is not None and finding.second.site.function == program.__name__
    assert finding.missing.endswith("the host did not wait for it")


@pytest.mark.parametrize("program", FREED)
def test_a_freed_block_may_be_reused_at_once(scene: Scene, program: Program) -> None:
    program(scene, False)
    finding = one(scene)
    assert (finding.kind, finding.first.op, finding.second.op) == ("freed", "add", "fill_")
    assert finding.resource.startswith("freed block of result of zero_ at vgpu/conftest.py:")
    assert "no record_stream(forward)" in finding.missing


# ---- which edges are needed --------------------------------------------------------------------------------


def needed(scene: Scene, function: str) -> dict[str, bool]:
    """Returns whether each place in that function is needed, by statement."""
    places = scene.gpu.watcher.places()
    return {place.site.statement: place.needed for place in places if place.site.function == function}


@pytest.mark.parametrize("program", [*BETWEEN_STREAMS, *AT_THE_HOST, freed_without_record])
def test_an_edge_whose_absence_gives_a_finding_is_needed(scene: Scene, program: Program) -> None:
    program(scene, True)
    assert set(needed(scene, program.__name__).values()) == {True}


def twice(scene: Scene) -> None:
    lengths = scene.zeros(4)
    with scene.on(scene.schedule):
        lengths.add_(1)
    event = scene.schedule.record_event()
    scene.forward.wait_event(event)
    scene.forward.wait_stream(scene.schedule)
    with scene.on(scene.forward):
        _ = lengths * 2


def waited_and_recorded(scene: Scene) -> None:
    indices = scene.zeros(4)
    with scene.on(scene.forward):
        _ = indices + 1
    indices.record_stream(scene.forward)
    del indices
    scene.schedule.wait_stream(scene.forward)
    with scene.on(scene.schedule):
        torch.zeros(4, dtype=torch.int64, device=scene.device)


def without_shared_memory(scene: Scene) -> None:
    """The two streams share no memory."""
    first, second = scene.zeros(4), scene.zeros(4)
    with scene.on(scene.forward):
        first.add_(1)
    scene.schedule.wait_stream(scene.forward)
    with scene.on(scene.schedule):
        second.add_(1)


@pytest.mark.parametrize("program", [twice, waited_and_recorded, without_shared_memory])
def test_an_edge_that_another_implies_is_not_needed(scene: Scene, program: Callable[[Scene], None]) -> None:
    program(scene)
    found = needed(scene, program.__name__)
    assert found and not any(found.values())
    assert scene.found == []


def test_a_late_wait_is_not_needed(scene: Scene) -> None:
    """The accesses before it race already, so the wait orders nothing new."""
    raw(scene, False)
    scene.forward.wait_stream(scene.schedule)
    assert needed(scene, "test_a_late_wait_is_not_needed") == {
        "scene.forward.wait_stream(scene.schedule)": False
    }


# ---- what is no hazard -------------------------------------------------------------------------------------


def test_order_is_transitive(scene: Scene) -> None:
    buffer, third = scene.zeros(4), scene.module.Stream()
    with scene.on(scene.forward):
        buffer.add_(1)
    third.wait_stream(scene.forward)
    scene.schedule.wait_stream(third)
    with scene.on(scene.schedule):
        buffer.add_(1)
    assert scene.found == []


def test_an_event_orders_only_work_before_its_record(scene: Scene) -> None:
    buffer, early = scene.zeros(4), scene.module.Event()
    with scene.on(scene.forward):
        early.record()
        buffer.add_(1)
    early.wait(scene.schedule)
    with scene.on(scene.schedule):
        _ = buffer * 2
    assert one(scene).first.op == "add_"


def test_a_host_wait_orders_all_later_launches(scene: Scene) -> None:
    buffer = scene.zeros(4)
    with scene.on(scene.forward):
        buffer.add_(1)
        buffer[0].item()
    with scene.on(scene.schedule):
        buffer.add_(1)
    assert scene.found == []


@pytest.mark.parametrize(
    ("first", "second"),
    [(([1, 2],), ([0, 3],)), (([1, 1], [0, 1]), ([1, 2], [2, 1])), (([-1],), ([0, 1, 2],))],
    ids=["rows", "columns of one row", "from the end"],
)
def test_disjoint_rows_of_a_pool_give_no_finding(scene: Scene, first: Any, second: Any) -> None:
    table = scene.zeros(4, 4)
    reads, writes = ([torch.tensor(i).to(scene.device) for i in index] for index in (first, second))
    scene.module.synchronize()
    with scene.on(scene.forward):
        _ = table[tuple(reads)]
    with scene.on(scene.schedule):
        table[tuple(writes)] = 5
    assert scene.found == []


def _reading(table: torch.Tensor, rows: torch.Tensor, selected: torch.Tensor) -> tuple[Access, ...]:
    return (*reads(rows), Access(table, write=False, rows=selected))


@kernel(cost=lambda: Work(1), footprint=lambda table, rows: _reading(table, rows, rows))
def hazards_test_given(table: torch.Tensor, rows: torch.Tensor) -> None:
    """Reads the rows of the table."""


@kernel(cost=lambda: Work(1), footprint=lambda table, rows: _reading(table, rows, rows[:1]))
def hazards_test_viewed(table: torch.Tensor, rows: torch.Tensor) -> None:
    """Reads the first of the rows, which a view selects."""


@kernel(cost=lambda: Work(1), footprint=lambda table, rows: _reading(table, rows, rows + 0))
def hazards_test_computed(table: torch.Tensor, rows: torch.Tensor) -> None:
    """Reads the rows of the table, which are computed."""


@pytest.mark.parametrize("read", [hazards_test_given, hazards_test_viewed, hazards_test_computed])
@pytest.mark.parametrize(("row", "found"), [(1, 1), (3, 0)])
def test_a_kernels_rows_are_those_of_its_launch(scene: Scene, read: Any, row: int, found: int) -> None:
    """Row 1 is read; 3 is written over the number later, on the same stream."""
    table, rows, target = scene.zeros(4, 4), scene.settled([1]), scene.settled([row])
    with scene.on(scene.forward):
        read(table, rows)
        rows.fill_(3)
    with scene.on(scene.schedule):
        table[target] = 5
    assert len(scene.found) == found


def test_a_second_replays_read_is_not_hidden_by_an_eager_read(scene: Scene) -> None:
    """An event covers the first replay and an eager read of the same bytes, but not the second replay's read."""
    inputs, graph, event = scene.zeros(4), scene.module.CUDAGraph(), scene.module.Event()
    with scene.module.graph(graph, stream=scene.forward):
        _ = inputs * 2 + 1
    with scene.on(scene.forward):
        graph.replay()
        _ = inputs * 3
        event.record()
        graph.replay()
    event.wait(scene.schedule)
    with scene.on(scene.schedule):
        inputs.add_(1)
    assert len(scene.found) == 1


def test_a_replays_read_is_not_hidden_by_a_read_that_came_after_the_last_replay(scene: Scene) -> None:
    inputs, graph = scene.zeros(4), scene.module.CUDAGraph()
    with scene.module.graph(graph, stream=scene.forward):
        _ = inputs * 2 + 1
    for _ in range(3):
        with scene.on(scene.forward):
            graph.replay()
        scene.schedule.wait_stream(scene.forward)
        with scene.on(scene.schedule):
            _ = inputs * 3
    with scene.on(scene.forward):
        graph.replay()
    with scene.on(scene.schedule):
        inputs.add_(1)
    assert (one(scene).first.op, one(scene).second.op) == ("graph", "add_")


@pytest.mark.parametrize("in_graph", [False, True])
def test_an_event_in_a_graph_covers_what_precedes_it(scene: Scene, in_graph: bool) -> None:
    table, graph, event = scene.zeros(4), scene.module.CUDAGraph(), scene.module.Event(external=True)
    rows = scene.zeros(4)
    before, after = scene.zeros(4), scene.zeros(4)
    with scene.module.graph(graph, stream=scene.forward):
        before.add_(1)
        event.record()
        after.add_(1)
        _ = (table if in_graph else rows) * 2
    with scene.on(scene.forward):
        rows.copy_(table)
        graph.replay()
    event.wait(scene.schedule)
    with scene.on(scene.schedule):
        before.add_(1)
        table.add_(1)
        assert len(scene.found) == in_graph
        after.add_(1)
    assert len(scene.found) == in_graph + 1


@pytest.mark.parametrize(
    "read",
    [
        lambda pinned: pinned.sum(),
        lambda pinned: pinned + 1,
        lambda pinned: pinned == 1,
        lambda pinned: torch.ones(4) + pinned,
        lambda pinned: torch.ones(4).copy_(pinned),
        lambda pinned: int(pinned.max()),
        list,
        lambda pinned: pinned[1:3].tolist(),
        lambda pinned: pinned.numpy()[1],
        lambda pinned: pinned.numpy()[[0, 2]],
        lambda pinned: pinned.numpy() + 1,
        lambda pinned: pinned.numpy()[1:].astype(float),
        lambda pinned: np.concatenate([np.zeros(1), pinned.numpy()]),
        lambda pinned: pinned.numpy().argmax(),
        lambda pinned: np.sum(pinned.numpy()),
        lambda pinned: np.zeros(4).view(type(pinned.numpy())).searchsorted(pinned.numpy()),
        pickle.dumps,
        deepcopy,
    ],
)
def test_an_early_read_by_the_host_is_found(scene: Scene, read: Any) -> None:
    with scene.on(scene.forward):
        landed = torch.zeros(4, device=scene.device).to("cpu", non_blocking=True)
    _ = landed[1:], landed.numpy()[1:], np.split(landed.numpy(), 2)  # a view reads nothing
    assert not scene.found
    read(landed)
    assert one(scene).resource == "pinned memory"


@pytest.mark.parametrize(
    "write",
    [
        lambda staging: staging[1].fill_(3),
        lambda staging: np.copyto(staging.numpy()[1:2], 3),
        lambda staging: np.concatenate([np.ones((1, 2), np.float32)], out=staging.numpy()[1:2]),
    ],
)
def test_the_host_may_write_a_part_that_no_copy_reads(scene: Scene, write: Any) -> None:
    staging = torch.zeros(4, 2, pin_memory=True)
    with scene.on(scene.forward):
        _ = staging[1].to(scene.device, non_blocking=True)
    staging[0], staging[2:], staging[3, 1] = 1, torch.ones(2), 2
    np.copyto(staging.numpy()[2:], 1)
    assert scene.found == []
    write(staging)
    assert one(scene).resource == "pinned memory"


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_along_a_dimension_are_compared_by_their_indices(scene: Scene, dim: int) -> None:
    table, rows = scene.zeros(4, 4), scene.zeros(4, 4)
    ours, theirs = torch.tensor([0, 1], device=scene.device), torch.tensor([2, 3], device=scene.device)
    with scene.on(scene.forward):
        table.index_select(dim, ours)
    with scene.on(scene.schedule):
        table.index_copy_(dim, theirs, rows.narrow(dim, 0, 2))
        table.index_fill_(dim - 2, theirs, 1)
        assert scene.found == []
        table.index_add_(dim, theirs - 1, rows.narrow(dim, 0, 2))
    assert one(scene).second.op == "index_add_"


@pytest.mark.parametrize("in_graph", [False, True])
def test_parts_of_a_table_that_share_no_byte_do_not_race(scene: Scene, in_graph: bool) -> None:
    """The part of a graph lies on both sides of the other stream's."""
    table, graph = scene.zeros(4, 9), scene.module.CUDAGraph()
    if in_graph:
        with scene.module.graph(graph, stream=scene.forward):
            table[:, :3].add_(1)
            table[:, 6:].add_(1)
    with scene.on(scene.forward):
        graph.replay() if in_graph else table[:, :3].add_(1)
    with scene.on(scene.schedule):
        table[:, 3:6].add_(1)
        assert scene.found == []
        table[:, 2:4].add_(1)
    assert one(scene).second.op == "add_"


def test_reads_do_not_race(scene: Scene) -> None:
    buffer = scene.zeros(4)
    for stream in (scene.schedule, scene.forward):
        with scene.on(stream):
            _ = buffer * 2
    assert scene.found == []


def test_the_host_may_read_memory_that_a_copy_reads(scene: Scene) -> None:
    staging = torch.zeros(4, pin_memory=True)
    with scene.on(scene.forward):
        _ = staging.to(scene.device, non_blocking=True)
    staging.tolist()
    assert scene.found == []


def test_a_block_is_reused_by_its_own_stream_without_a_finding(scene: Scene) -> None:
    indices = scene.zeros(4)
    with scene.on(scene.forward):
        _ = indices + 1
        del indices
        torch.zeros(4, device=scene.device)
    assert scene.found == []


def test_a_race_is_reported_once(scene: Scene) -> None:
    lengths = scene.zeros(4)
    for _ in range(3):
        with scene.on(scene.forward):
            lengths * 2
        with scene.on(scene.schedule):
            lengths.add_(1)
    kinds = [(finding.first.op, finding.second.op) for finding in scene.found]
    assert kinds == [("mul", "add_"), ("add_", "mul")]


def test_layers_of_a_pool_are_one_resource(scene: Scene) -> None:
    layers = [scene.zeros(4) for _ in range(3)]
    for k, layer in enumerate(layers):
        scene.gpu.watcher.name(layer, f"k_cache[{k}]")
    for layer in layers:
        with scene.on(scene.forward):
            _ = layer * 2
    for layer in layers:
        with scene.on(scene.schedule):
            layer.add_(1)
    assert one(scene).resource == "k_cache[0]"


def test_accesses_are_pruned_while_a_stream_is_idle(scene: Scene) -> None:
    """A stream without work must not keep every access in memory."""
    table, _idle = scene.zeros(64, 4), scene.module.Stream()
    rows = [torch.tensor([k]).to(scene.device) for k in range(64)]
    for _ in range(20):
        for row in rows:
            with scene.on(scene.forward):
                _ = table[row]
        scene.forward.synchronize()
    shadow = table.block.shadow  # type: ignore[attr-defined]
    assert max(len(history.accesses) for history in shadow.reads.values()) < 300


def test_the_checker_is_off_by_default(opened: Any) -> None:
    with opened() as bench:
        scene = Scene(bench.gpu)
        raw(scene, False)
        assert scene.found == [] and bench.gpu.watcher.spent == 0
    assert torch.Tensor.tolist is torch._C.TensorBase.tolist

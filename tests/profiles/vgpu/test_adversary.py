"""Programs on two streams with one edge missing have another result under an adversary; with the edge they never do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.programs.triton_kernels import TritonKernel
from schedbench.profiles.vgpu.adversary.executor import POISON, POISONED
from schedbench.profiles.vgpu.adversary.order import STRATEGIES, described
from schedbench.profiles.vgpu.custom import launch_interpreted
from schedbench.profiles.vgpu.device import VirtualGpu
from schedbench.profiles.vgpu.gpu import open_vgpu
from schedbench.profiles.vgpu.tensor import wrap
from tests.profiles.vgpu.conftest import Scene
from tests.profiles.vgpu.test_hazards import BETWEEN_STREAMS, FREED, pinned_overwritten, read_before_sync

SEEDS = range(len(STRATEGIES) + 8)


Program = Callable[[Scene, bool], torch.Tensor]


def recorded_in_graph(stage: Scene, edge: bool) -> torch.Tensor:
    inputs, graph = stage.settled([1, 2]), stage.module.CUDAGraph()
    read = stage.module.Event(external=True)
    with stage.module.graph(graph, stream=stage.forward):
        doubled = inputs * 2
        read.record()
        outputs = doubled + 1
    with stage.on(stage.forward):
        graph.replay()
    if edge:
        read.wait(stage.schedule)
    with stage.on(stage.schedule):
        inputs.fill_(7)
    return outputs


PROGRAMS = [*BETWEEN_STREAMS, recorded_in_graph, pinned_overwritten, read_before_sync, *FREED]


def outcome(program: Program, *, edge: bool, seed: int | None, values: str = "real") -> list[int]:
    with open_vgpu(load("h200"), adversary=seed, values=values) as gpu:  # type: ignore[arg-type]
        stage = Scene(gpu)
        result = program(stage, edge)
        stage.module.synchronize()
        values_found: list[int] = result.tolist()
        return values_found


@pytest.fixture
def late() -> Iterator[Scene]:
    """Streams whose work is done as late as possible."""
    with open_vgpu(load("h200"), adversary=0) as gpu:
        yield Scene(gpu)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("values", ["real", "none"])
def test_with_its_edge_a_program_has_one_result(program: Program, values: str) -> None:
    plain = outcome(program, edge=True, seed=None, values=values)
    assert [outcome(program, edge=True, seed=seed, values=values) for seed in SEEDS] == [plain] * len(SEEDS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_its_edge_some_strategy_changes_the_result(program: Program) -> None:
    plain = outcome(program, edge=True, seed=None)
    found = [outcome(program, edge=False, seed=seed) for seed in range(len(STRATEGIES))]
    assert any(values != plain for values in found)


def test_memory_before_its_copy_is_poisoned() -> None:
    assert outcome(read_before_sync, edge=False, seed=0) == [POISON] * 4


def test_strategies_come_first_and_are_named() -> None:
    assert [described(seed) for seed in (0, 1, len(STRATEGIES))] == [
        "all work as late as possible",
        "the schedule stream first",
        f"random order {len(STRATEGIES)}",
    ]


def test_an_error_in_deferred_work_names_the_op_and_its_line(late: Scene) -> None:
    table, rows = late.settled([1, 2]), late.settled([5])
    _ = table[rows]
    with pytest.raises(IndexError) as error:
        late.module.synchronize()
    assert error.value.__notes__ == ["in index, done late"]


@pytest.mark.parametrize(
    ("index", "explained"),
    [
        (POISON, True),
        (POISON + 8204, True),
        ((POISON << 32) | (POISON & 0xFFFFFFFF), True),
        (-5, False),
        (-POISON, False),
        (10 * POISON, False),
    ],
)
def test_an_index_that_is_poison_is_explained(index: int, explained: bool) -> None:
    with pytest.raises(IndexError) as error, open_vgpu(load("h200"), adversary=0) as gpu:
        stage = Scene(gpu)
        _ = stage.settled([1, 2])[stage.settled([index])]
        stage.module.synchronize()
    notes = error.value.__notes__
    assert notes[1:] == ([f"{index} {POISONED}"] if explained else [])


def test_a_mask_is_read_in_program_order(late: Scene) -> None:
    values = late.settled([1, 2, 3, 4])
    with late.on(late.schedule):
        values.add_(1)
        assert values[values > 3].tolist() == [4, 5]
        values[values > 3] = 0
        assert values.tolist() == [2, 3, 0, 0]


def test_a_pinned_buffer_may_be_sent_and_filled_in_one_stream(late: Scene) -> None:
    source, buffer = late.settled([1, 2]), torch.tensor([7, 7]).pin_memory()
    with late.on(late.schedule):
        sent = buffer.to(late.device, non_blocking=True)
        buffer.copy_(source, non_blocking=True)
    late.schedule.synchronize()
    assert (sent.tolist(), buffer.tolist()) == ([7, 7], [1, 2])


def test_memory_of_the_host_has_no_other_owner(late: Scene) -> None:
    pinned = torch.tensor([3, 4]).pin_memory()
    summed = wrap(pinned)[:1] + 1  # the view ends here, and the memory does not
    torch.zeros(4, device=late.device)
    assert (summed.tolist(), pinned.tolist()) == ([4], [3, 4])


def test_a_new_geometry_does_not_change_what_is_pending(late: Scene) -> None:
    pinned = torch.tensor([3, 4]).pin_memory()
    sent = pinned.to(late.device, non_blocking=True).unsqueeze_(1)
    summed = (sent.squeeze(1) + 1).unsqueeze_(1)
    assert (sent.tolist(), summed.tolist()) == ([[3], [4]], [[4], [5]])


class PointerKernel(TritonKernel):
    """Reads memory through its address only."""

    def run(self) -> None:
        assert [len(storage) for storage in self.storages()] == [24]


def test_memory_whose_address_pending_work_has_outlives_its_tensor(late: Scene) -> None:
    addresses, pointed = late.gpu.addresses, torch.zeros(3, dtype=torch.int64, device=late.device)
    pointed.data_ptr()
    launch_interpreted(PointerKernel("pointed", lambda _: None, addresses, (), {}), ())
    del pointed
    late.module.synchronize()
    assert addresses.given() == []


def test_hazards_and_an_adversary_exclude_each_other() -> None:
    with pytest.raises(AssertionError), open_vgpu(load("h200"), hazards=True, adversary=0):
        pass


# ---- random programs ------------------------------------------------------------------------------

BUFFERS = 3
Step = tuple[str, int, int, int]
steps = st.tuples(
    st.sampled_from(["add", "add", "add", "record", "wait", "sync", "upload", "fill", "download", "renew"]),
    st.integers(0, 1),
    st.integers(0, BUFFERS - 1),
    st.integers(0, BUFFERS - 1),
)


def interpret(program: Sequence[Step], gpu: VirtualGpu) -> list[int]:
    """Runs the program on two streams over a few buffers and one pinned one. Values are integers, and every effect is
    read at the end."""
    stage = Scene(gpu)
    streams = (stage.schedule, stage.forward)
    buffers = [stage.settled([k + 1, 10 * k]) for k in range(BUFFERS)]
    event, pinned = stage.module.Event(), torch.tensor([5, 6]).pin_memory()
    landed = [torch.zeros(2, dtype=torch.int64).pin_memory() for _ in range(BUFFERS)]
    seen = []
    for name, stream, a, b in program:
        with stage.on(streams[stream]):
            if name == "add":
                buffers[a].add_(buffers[b])
            elif name == "record":
                event.record()
            elif name == "wait":
                event.wait()
            elif name == "sync":
                streams[stream].synchronize()
                seen += landed[a].tolist()
            elif name == "upload":
                buffers[a].copy_(pinned, non_blocking=True)
            elif name == "fill":
                pinned.fill_(b)
            elif name == "download":
                landed[a].copy_(buffers[b], non_blocking=True)
            else:
                buffers[a] = buffers[a] + 1
    stage.module.synchronize()
    return seen + [value for tensor in (*buffers, *landed) for value in tensor.tolist()]


@pytest.mark.wide
@settings(max_examples=60, derandomize=True)
@given(program=st.lists(steps, min_size=2, max_size=14))
def test_every_result_changed_by_an_adversary_has_a_hazard(program: list[Step]) -> None:
    """Two independent models of the same order: footprints with clocks, and values that are really wrong."""
    with open_vgpu(load("h200"), hazards=True) as gpu:
        plain, findings = interpret(program, gpu), gpu.findings
    for seed in range(len(STRATEGIES) + 3):
        with open_vgpu(load("h200"), adversary=seed) as gpu:
            differs = interpret(program, gpu) != plain
        assert not differs or findings, described(seed)

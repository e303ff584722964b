"""The checker that is fed from inside the program finds what it finds when the virtual GPU itself feeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.profiles.check.faults import fault_scenarios
from schedbench.profiles.cuda.hazards import HazardWatch
from schedbench.profiles.platform.hardware import load
from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.result import Abstained, HazardFinding, Hazards, Result
from schedbench.profiles.run import document
from schedbench.profiles.vgpu.device import CURRENT
from schedbench.profiles.vgpu.gpu import open_vgpu
from schedbench.profiles.vgpu.hazards import declared, footprints
from schedbench.sched.relay.faults import faults
from schedbench.sched.relay.states import states
from tests.acceptance.runs import SMALL, resolved
from tests.profiles.cuda import vgpu_as_cuda
from tests.profiles.vgpu import test_hazards as programs
from tests.profiles.vgpu.conftest import Scene
from tests.profiles.vgpu.test_adversary import Step, interpret, steps

HERE = Path(__file__).parent
LINES = [HERE.parent / "vgpu"]


class WatchedScene(Scene):
    """Two named streams of a virtual GPU that is watched from inside."""

    def __init__(self, gpu: object, hazards: HazardWatch) -> None:
        super().__init__(gpu)  # type: ignore[arg-type]
        self.hazards = hazards
        hazards.stream("schedule", self.schedule)
        hazards.stream("forward", self.forward)

    @property
    def found(self) -> list[HazardFinding]:
        hazards = self.hazards
        return list(hazards.checker.found(hazards.sites, hazards.streams))


@contextmanager
def opened() -> Iterator[WatchedScene]:
    with open_vgpu(load("h200")) as gpu, vgpu_as_cuda.watched(LINES) as hazards:
        yield WatchedScene(gpu, hazards)


@pytest.fixture
def watched_scene() -> Iterator[WatchedScene]:
    with opened() as scene:
        yield scene


def own(program: Callable[[Scene], object]) -> list[HazardFinding]:
    with open_vgpu(load("h200"), hazards=True, watch=LINES) as gpu:
        scene = Scene(gpu)
        program(scene)
        return scene.found


ALL = [*programs.BETWEEN_STREAMS, *programs.AT_THE_HOST, *programs.FREED]


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("program", ALL)
def test_a_missing_edge_gives_the_same_finding_and_a_present_one_none(
    program: programs.Program, present: bool
) -> None:
    with opened() as scene:
        program(scene, present)
        found = scene.found
    assert len(found) == (not present)
    assert found == own(lambda scene: program(scene, present))


SCENES = [
    programs.test_order_is_transitive,
    programs.test_an_event_orders_only_work_before_its_record,
    programs.test_a_host_wait_orders_all_later_launches,
    programs.test_a_second_replays_read_is_not_hidden_by_an_eager_read,
    programs.test_reads_do_not_race,
    programs.test_the_host_may_read_memory_that_a_copy_reads,
    programs.test_a_block_is_reused_by_its_own_stream_without_a_finding,
    programs.test_a_race_is_reported_once,
]


@pytest.mark.parametrize("scene", SCENES)
def test_scenes_of_the_virtual_gpus_own_checker_pass(
    watched_scene: WatchedScene, scene: Callable[[Scene], None]
) -> None:
    scene(watched_scene)


WAITS = [
    lambda t: t[t > 0],
    lambda t: t.nonzero(),
    lambda t: t[[0, 1]],
    lambda t: t.tolist(),
    lambda t: torch.unique(t),
    lambda t: t.to("cpu", non_blocking=True),
    lambda t: torch.tensor([1, 2], device=t.device),
    lambda t: t.copy_(torch.zeros(4, dtype=torch.int64)),
    lambda t: t.masked_fill_(t > 0, 1),
]


@pytest.mark.parametrize("waits", WAITS)
def test_a_wait_inside_an_operator_orders_later_launches(waits: Callable[[torch.Tensor], object]) -> None:
    """Operations that are launched afterwards on another stream are ordered after the wait's stream, and after nothing
    else."""

    def program(scene: Scene) -> None:
        buffer = scene.zeros(4)
        with scene.on(scene.forward):
            buffer.add_(1)
            waits(buffer)
        with scene.on(scene.schedule):
            buffer.fill_(1)

    with opened() as scene:
        program(scene)
        found = scene.found
    assert [shape(finding) for finding in found] == [shape(finding) for finding in own(program)]


def test_peeking_orders_nothing(watched_scene: WatchedScene) -> None:
    buffer = watched_scene.zeros(4)
    with watched_scene.on(watched_scene.forward):
        buffer.add_(1)
    assert watched_scene.hazards.peek(buffer).tolist() == [1, 1, 1, 1]
    with watched_scene.on(watched_scene.schedule):
        buffer.add_(1)
    assert [finding.first.op for finding in watched_scene.found] == ["add_"]


def test_a_failing_capture_ends(watched_scene: WatchedScene) -> None:
    buffer, graph = watched_scene.zeros(4), watched_scene.module.CUDAGraph()
    with pytest.raises(ZeroDivisionError), watched_scene.module.graph(graph, stream=watched_scene.forward):
        raise ZeroDivisionError
    with watched_scene.on(watched_scene.forward):
        buffer.add_(1)
    with watched_scene.on(watched_scene.schedule):
        buffer.add_(1)
    assert len(watched_scene.found) == 1


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA forbids reads during a capture."""

    def outside(function: Callable[..., object]) -> Callable[..., object]:
        def checked(*args: object) -> object:
            assert CURRENT.get().runtime.capture is None
            return function(*args)

        return checked

    reads = (footprints, "copied"), (declared, "copied"), (declared, "_form"), (declared, "_evaluated")
    for module, name in reads:
        monkeypatch.setattr(module, name, outside(getattr(module, name)))
    vgpu_as_cuda.install(monkeypatch)
    question = resolved("faults/mixing", "engine.relay=latest", "engine.cuda_graph=true")
    assert run(question, "cuda").hazards == Hazards()
    with opened() as scene:
        table, rows, graph = scene.zeros(8, 4), scene.zeros(2), scene.module.CUDAGraph()
        with scene.module.graph(graph, stream=scene.forward):
            _ = table[rows]
        graph.replay()


def test_torch_is_replaced_while_watching() -> None:
    with opened():
        assert torch.Tensor.tolist is not torch._C.TensorBase.tolist
    assert torch.Tensor.tolist is torch._C.TensorBase.tolist


@settings(max_examples=60, derandomize=True)
@given(program=st.lists(steps, min_size=2, max_size=14))
def test_random_programs_give_the_same_findings(program: list[Step]) -> None:
    with open_vgpu(load("h200"), hazards=True, watch=LINES) as gpu:
        values, expected = interpret(program, gpu), gpu.findings
    with open_vgpu(load("h200"), watch=LINES) as gpu, vgpu_as_cuda.watched(LINES) as hazards:
        hazards.stream("default", torch.get_device_module(gpu.device).current_stream())
        again = interpret(program, gpu)
        found = hazards.checker.found(hazards.sites, {})
    assert again == values
    assert sorted(map(shape, found)) == sorted(map(shape, expected))


def shape(finding: HazardFinding) -> tuple[object, ...]:
    """Returns a finding without stream names, which these programs do not have."""
    touches = (finding.first, finding.second)
    return finding.kind, *((t.op, t.write, t.site and t.site.line) for t in touches if t)


# ---- whole runs --------------------------------------------------------------------------------------------


def run(question: Resolved, device: str) -> Result:
    return execute(question, Options(device=device, hazards=True, save_tokens=True))  # type: ignore[arg-type]


def both(question: Resolved, monkeypatch: pytest.MonkeyPatch) -> tuple[Hazards, Hazards]:
    """Returns the virtual GPU's own findings and those from inside, declared or not."""
    attributed = document.hazards
    monkeypatch.setattr(document, "hazards", lambda machine, _, **about: attributed(machine, (), **about))
    expected = run(question, "vgpu")
    vgpu_as_cuda.install(monkeypatch)
    found = run(question, "cuda")
    assert found.outputs == expected.outputs
    assert isinstance(expected.hazards, Hazards) and isinstance(found.hazards, Hazards)
    return expected.hazards, found.hazards


SMALLER = (*SMALL, "workload.requests=6", "workload.output_tokens={dist: uniform, min: 8, max: 14}")
IN_TIME = ("pr25774-before", "pr25945", "latest")


@pytest.mark.parametrize(
    "state", [pytest.param(s, marks=[] if s in IN_TIME else [pytest.mark.wide]) for s in sorted(states())]
)
def test_every_state_gives_the_same_findings(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = both(resolved("mixed", *SMALLER, f"engine.relay={state}"), monkeypatch)
    assert found == expected
    assert bool(found.findings) == (state != "latest")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scenario", "more"),
    [
        ("penalties", ("engine.relay={state: pr25945, barrier: off}", "workload.requests=12")),
        ("hisparse", ("workload.requests=6",)),
        ("faults/mixing", ("engine.relay={state: latest, barrier: off}", "engine.cuda_graph=false")),
        ("faults/mixing", ("engine.relay=pr25945", "engine.page_size=16", "engine.radix_cache=false")),
    ],
)
def test_every_feature_gives_the_same_findings(
    scenario: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = both(resolved(scenario, *more), monkeypatch)
    assert found == expected


# The faults that the hazard checker finds on one device: docs/check.md.
CAUGHT = (
    "no-barrier",
    "nothing-kept-alive",
    "staging-refilled",
    "one-launch-kept-alive",
    "advance-in-place",
    "dead-publish",
    "worker-extras-not-kept",
)


@pytest.mark.wide
@pytest.mark.parametrize("name", CAUGHT)
def test_a_fault_gives_the_same_findings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = fault_scenarios()[name]
    expected, found = both(scenario.question(), monkeypatch)
    assert found == expected and found.findings


def test_times_and_counts_of_a_watched_run_abstain(monkeypatch: pytest.MonkeyPatch) -> None:
    vgpu_as_cuda.install(monkeypatch)
    result = run(resolved("mixed", *SMALLER, "workload.requests=2"), "cuda")
    assert all(isinstance(metric, Abstained) for metric in result.metrics.values())
    assert isinstance(result.idle, Abstained) and (result.per_step, result.copies, result.syncs) == (
        {},
        (),
        (),
    )


def test_every_fault_that_hazards_find_is_covered() -> None:
    page = (HERE.parents[2] / "docs" / "check.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    by_hazards = {row[0].strip("`") for row in rows if len(row) > 3 and "hazards" in row[3].split(", ")}
    several = {name for name in by_hazards if fault_scenarios()[name].question().scenario.engine.ranks > 1}
    assert by_hazards - several == set(CAUGHT) and by_hazards <= set(faults())

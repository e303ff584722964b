"""``torch.cuda`` answered by the virtual GPU: programs written for CUDA compute what they compute on the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.programs.cuda_program import CudaProgram
from schedbench.profiles.programs.torch_cuda import cuda_answered
from schedbench.profiles.vgpu.gpu import open_vgpu
from tests.profiles.recorders import WindowRecorder


@pytest.fixture
def program() -> Iterator[CudaProgram]:
    with open_vgpu(load("h200"), gradients=True) as gpu, cuda_answered(gpu, load("h200")) as program:
        yield program


def losses(device: str) -> list[float]:
    """Returns the losses of three training steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, y = torch.randn(4, 8).to(device), torch.randint(0, 4, (4,)).to(device)
    found = []
    for _ in range(3):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_training_step_computes_what_the_cpu_computes(program: CudaProgram) -> None:
    assert losses("cuda") == losses("cpu")
    assert program.defaults == set()


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_an_optimizer_updates_all_parameters_at_once(options: dict[str, bool]) -> None:
    """As on CUDA, one kernel does one operation for all parameters, or the whole update."""
    sink = WindowRecorder()
    with open_vgpu(load("h200"), sink=sink, gradients=True) as gpu, cuda_answered(gpu, load("h200")):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **options)
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        gpu.flush()
        sink.windows.clear()
        optimizer.step()
        gpu.flush()
    updates = {name for name in sink.names if name.startswith(("_foreach", "_fused"))}
    assert set(sink.names) == updates
    assert ("_fused_adamw_" in updates) is bool(options)


def test_a_composition_that_is_a_kernel_on_cuda_counts_as_one() -> None:
    sink, norm = WindowRecorder(), nn.RMSNorm(8)
    with open_vgpu(load("h200"), sink=sink, gradients=True) as gpu, cuda_answered(gpu, load("h200")):
        q = torch.randn(1, 2, 4, 8)
        on_cuda, norm_on_cuda = q.cuda(), nn.RMSNorm(8).cuda()
        gpu.flush()
        sink.windows.clear()
        attended = F.scaled_dot_product_attention(on_cuda, on_cuda, value=on_cuda, is_causal=True)
        with torch.inference_mode():
            normed = norm_on_cuda(on_cuda)
        gpu.flush()
        names = [op.name for window in sink.windows for op in window.ops if op.kind == "kernel"]
        assert torch.allclose(attended.cpu(), F.scaled_dot_product_attention(q, q, q, is_causal=True))
        assert torch.equal(normed.cpu(), norm(q))
    assert names == ["scaled_dot_product_attention", "rms_norm"]


def test_gradients_of_a_collective_are_not_uploaded() -> None:
    sink = WindowRecorder()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with open_vgpu(load("h200"), sink=sink, gradients=True) as gpu, cuda_answered(gpu, load("h200")):
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).cuda(), device_ids=[0])
            for _ in range(3):  # the second step sends the order of the gradients
                gpu.flush()
                sink.windows.clear()
                model(torch.ones(1, 2, device="cuda")).sum().backward()
            gpu.flush()
    finally:
        torch.distributed.destroy_process_group()
    assert "allreduce_" in sink.names
    assert not [op for window in sink.windows for op in window.ops if op.kind in ("h2d", "d2h")]


@pytest.mark.usefixtures("program")
def test_tensors_say_that_they_are_on_cuda() -> None:
    made = torch.zeros(3, device="cuda")
    assert (made.device, made.is_cuda, made.get_device()) == (torch.device("cuda", 0), True, 0)
    assert made.data_ptr() == made[:2].data_ptr() != torch.zeros(3, device="cuda").data_ptr()
    host = torch.zeros(3)
    assert (host.device.type, host.is_cuda, host.cuda().is_cuda, host.to(0).is_cuda) == (
        "cpu",
        False,
        True,
        True,
    )
    assert nn.Linear(2, 2).cuda().weight.is_cuda
    with torch.device("cuda"):
        assert torch.ones(2).is_cuda
    generator = torch.Generator(device="cuda")
    assert isinstance(generator, torch.Generator)
    assert torch.rand(2, device="cuda", generator=generator).is_cuda
    for second in (
        lambda: torch.zeros(1, device="cuda:1"),
        lambda: host.cuda(1),
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.device(1),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            second()


def test_streams_events_and_queries(program: CudaProgram) -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        event.record()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)
    end.record()
    torch.cuda.synchronize()
    assert event.query() and 1 <= event.elapsed_time(end) < 1.1
    assert (torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.current_device()) == (True, 1, 0)
    assert torch.cuda.get_device_name() == "h200 (virtual)"
    assert program.defaults == set()
    assert torch.cuda.memory_allocated() == 0
    assert program.defaults == {"torch.cuda.memory_allocated"}
    for unanswered in (
        lambda: torch.cuda.cudart().cudaHostRegister(0, 1, 0),
        torch.cuda.current_blas_handle,
        lambda: torch.cuda.ExternalStream(0),
        torch.cuda.MemPool,
    ):
        with pytest.raises(AttributeError, match="is not answered by the virtual GPU"):
            unanswered()
    with pytest.raises(RuntimeError, match="no sparse tensors"):
        torch.eye(2, device="cuda").to_sparse()
    first, second = map(torch.cuda.nvtx.range_start, "ab")
    torch.cuda.nvtx.range_end(first), torch.cuda.nvtx.range_end(second)
    assert [span.name for span in program.ranges] == ["a", "b"]


def test_the_functions_of_a_cuda_build_do_not_reach_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentBlasHandle", time.time, raising=False)
    refused = pytest.raises(AttributeError, match="_cuda_getCurrentBlasHandle is not answered")
    with open_vgpu(load("h200")) as gpu, cuda_answered(gpu, load("h200")), refused:
        torch.cuda.current_blas_handle()


@pytest.mark.usefixtures("program")
def test_a_checkpoint_is_loaded_onto_cuda(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"model": nn.Linear(2, 2).state_dict(), "steps": [torch.ones(1)], "rate": 0.1}, file)
    for location in ("cuda", torch.device("cuda", 0)):
        found = torch.load(file, map_location=location)
        assert found["model"]["weight"].is_cuda and found["steps"][0].is_cuda and found["rate"] == 0.1
        nn.Linear(2, 2).cuda().load_state_dict(found["model"])
    assert not torch.load(file)["steps"][0].is_cuda


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_a_checkpoint_of_cuda_copies_each_memory_once(tmp_path: Path, options: dict[str, bool]) -> None:
    file, sink = tmp_path / "model.pt", WindowRecorder()
    with open_vgpu(load("h200"), sink=sink, gradients=True) as gpu, cuda_answered(gpu, load("h200")):
        rows, layer = torch.arange(6.0).cuda().view(2, 3), nn.Linear(2, 2).cuda()
        gpu.flush()
        sink.windows.clear()
        torch.save({"rows": rows, "last": rows[1], "layer": layer}, file, **options)
        found = torch.load(file, map_location="cuda" if options else None, weights_only=False)
        on_host = torch.load(file, map_location=lambda storage, _: storage, weights_only=False)
        gpu.flush()
        copies = [op.kind for window in sink.windows for op in window.ops if op.kind in ("h2d", "d2h")]
        assert found["last"].is_cuda and found["rows"].zero_().any() == found["last"].any()
        assert isinstance(found["layer"].weight, nn.Parameter) and found["layer"].weight.requires_grad
        assert torch.equal(found["layer"].weight, layer.weight)
        assert on_host["last"].tolist() == [3, 4, 5] and not on_host["last"].is_cuda
    assert copies == ["d2h"] * 3 + ["h2d"] * 3


@pytest.mark.usefixtures("program")
def test_views_of_ordinary_tensors_are_ordinary_in_inference_mode() -> None:
    made = torch.zeros(2, 3, device="cuda")
    with torch.inference_mode():
        views = [made[0], made.t(), *made.split(1), made.detach(), made.data, *made.unbind()]
        made[0] += 1
        made.unsqueeze_(0)
        assert (made + 1)[0].is_inference()
    assert not any(view.is_inference() for view in views)
    assert made.tolist() == [[[1, 1, 1], [0, 0, 0]]]


@pytest.mark.usefixtures("program")
def test_threads_have_the_device_and_their_own_current_stream() -> None:
    side, seen = torch.cuda.Stream(), []

    def work() -> None:
        seen.append((torch.ones(2, device="cuda").sum().item(), torch.cuda.current_stream() == side))

    with torch.cuda.stream(side):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() == side
    assert seen == [(2.0, False)]


@pytest.mark.usefixtures("program")
def test_a_loader_pins_in_a_thread() -> None:
    rows = torch.utils.data.TensorDataset(torch.arange(8.0).view(8, 1))
    loaded = list(torch.utils.data.DataLoader(rows, batch_size=4, pin_memory=True))
    assert [batch.is_pinned() for (batch,) in loaded] == [True, True]
    assert [batch.to("cuda", non_blocking=True).sum().item() for (batch,) in loaded] == [6.0, 22.0]


def test_torch_compile_returns_its_argument_unchanged(program: CudaProgram) -> None:
    @torch.compile(dynamic=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    layer = nn.Linear(2, 2).cuda()
    layer.compile()
    assert torch.compile(layer) is layer
    assert doubled(torch.ones(2, device="cuda")).tolist() == [2, 2]
    assert [note.split()[2] for note in program.notes()] == [
        "Linear",
        "test_torch_compile_returns_its_argument_unchanged.<locals>.doubled",
    ]


@pytest.mark.usefixtures("program")
def test_torch_treats_the_virtual_gpu_as_cuda() -> None:
    assert torch.get_device_module() is torch.get_device_module("cuda") is torch.cuda
    assert int(str(torch.version.cuda).split(".")[0]) >= 12
    stream, event = torch.Stream("cuda"), torch.Event("cuda", enable_timing=True)
    assert isinstance(stream, torch.cuda.Stream) and isinstance(event, torch.cuda.Event)
    assert isinstance(torch.cuda.current_stream(), torch.Stream)
    assert (stream.device, event.device) == (torch.device("cuda", 0),) * 2
    assert isinstance(torch.Stream("cpu"), torch.Stream)
    with stream:
        assert torch.accelerator.current_stream() == stream
        with torch.cuda.StreamContext(torch.cuda.default_stream()):
            assert torch.cuda.current_stream().cuda_stream != stream.cuda_stream
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    torch.accelerator.synchronize()
    with torch.accelerator.device_index(0), torch.cuda.device_of(torch.ones(1, device="cuda")):
        torch._assert_async(torch.ones(1, device="cuda").bool())
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).is_cuda and torch.get_default_device() == torch.device("cuda", 0)
    finally:
        torch.set_default_device(None)
    made = torch.ones(2).type("torch.cuda.HalfTensor")
    assert (made.type(), made.dtype) == ("torch.cuda.HalfTensor", torch.float16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.logspace(0, 1, 2, device="cuda"),
        lambda: torch.linspace(0, 1, 2, device="cuda"),
        lambda: torch.hann_window(4, device="cuda"),
        lambda: torch.scalar_tensor(2, device="cuda"),
        lambda: torch.empty_permuted((2, 2), (1, 0), device="cuda"),
        lambda: torch.ones(2).new_tensor([2], device="cuda"),
        lambda: torch.randint_like(torch.ones(2), 3, device="cuda"),
        lambda: torch.tril_indices(2, 2, device="cuda"),
        lambda: torch.asarray([1], device="cuda"),
        lambda: torch.normal(0.0, 1.0, (2,), device="cuda"),
        lambda: torch.ones(2, pin_memory=True).cuda(non_blocking=True),
        lambda: torch.ones(2).to(torch.ones(1, device="cuda")),
        lambda: nn.Embedding(2, 2, device="cuda").weight,
        lambda: torch.fft.fftfreq(4, device="cuda"),
    ],
)
@pytest.mark.usefixtures("program")
def test_every_factory_makes_tensors_on_cuda(make: Callable[[], torch.Tensor]) -> None:
    made = make()
    assert (made.is_cuda, made.device) == (True, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("name", "total", "capability"), [("a100", 80, (8, 0)), ("h100", 79.2, (9, 0)), ("h200", 139.8, (9, 0))]
)
def test_the_properties_are_those_of_the_hardware(
    name: str, total: float, capability: tuple[int, int]
) -> None:
    with open_vgpu(load(name)) as gpu, cuda_answered(gpu, load(name)) as program:
        found = torch.cuda.get_device_properties(0)
        assert found.name == torch.cuda.get_device_name() == f"{name} (virtual)"
        assert (found.major, found.minor) == torch.cuda.get_device_capability() == capability
        assert found.total_memory / (1 << 30) == pytest.approx(total, abs=0.05)
        assert torch.cuda.mem_get_info() == (found.total_memory, found.total_memory)
        assert found.shared_memory_per_block_optin < found.shared_memory_per_multiprocessor
        for attribute in ("regs_per_multiprocessor", "L2_cache_size", "uuid", "is_integrated"):
            assert hasattr(found, attribute)
        assert (
            torch.cuda.memory_stats()["allocated_bytes.all.current"]
            == torch.accelerator.memory_allocated()
            == 0
        )
        assert torch.cuda.ipc_collect() is None
        assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()
    assert {"torch.cuda.ipc_collect", "torch.accelerator.memory_allocated"} <= program.defaults


def test_torch_is_restored_afterwards() -> None:
    names = ("Stream", "is_available", "synchronize")
    before = [getattr(torch.cuda, name) for name in names], torch.Generator, threading.Thread.start
    with open_vgpu(load("h200")) as gpu, cuda_answered(gpu, load("h200")):
        assert torch.cuda.is_available()
    assert ([getattr(torch.cuda, name) for name in names], torch.Generator, threading.Thread.start) == before


def test_a_default_device_does_not_apply_to_delayed_operations() -> None:
    hardware = load("h200")
    with open_vgpu(hardware, adversary=1) as gpu, cuda_answered(gpu, hardware):
        torch.set_default_device("cuda")
        try:
            for _ in range(3):  # memory is used again, and its contents are destroyed first
                found = (torch.arange(8) + 1).float().sum()
            torch.cuda.synchronize()
            assert found.item() == 36
        finally:
            torch.set_default_device(None)

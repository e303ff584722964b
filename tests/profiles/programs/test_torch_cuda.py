"""``torch.cuda`` answered by the virtual GPU: programs written for CUDA compute what they compute on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from schedbench.profiles.platform.hardware import load
from schedbench.profiles.programs.torch_cuda import CudaProgram, cuda_answered
from schedbench.profiles.vgpu import open_vgpu


@pytest.fixture
def program() -> Iterator[CudaProgram]:
    with open_vgpu(load("h200"), gradients=True) as gpu, cuda_answered(gpu, name="h200") as program:
        yield program


def losses(device: str) -> list[float]:
    """Of three training steps."""
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
    assert event.query()
    assert (torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.current_device()) == (True, 1, 0)
    assert torch.cuda.get_device_name() == "h200 (virtual)"
    assert program.defaults == set()
    assert torch.cuda.memory_allocated() == 0
    assert program.defaults == {"torch.cuda.memory_allocated"}


@pytest.mark.usefixtures("program")
def test_threads_have_the_device_and_a_current_stream_of_their_own() -> None:
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


@pytest.mark.usefixtures("program")
def test_autocast_is_refused() -> None:
    with pytest.raises(RuntimeError, match="autocast is not available"), torch.autocast("cuda"):
        pass


def test_everything_is_torchs_own_again_afterwards() -> None:
    names = ("Stream", "is_available", "synchronize")
    before = [getattr(torch.cuda, name) for name in names], torch.Generator, threading.Thread.start
    with open_vgpu(load("h200")) as gpu, cuda_answered(gpu, name="h200"):
        assert torch.cuda.is_available()
    assert ([getattr(torch.cuda, name) for name in names], torch.Generator, threading.Thread.start) == before

"""Partitions of the virtual GPU's multiprocessors: kernels take longer there and overlap those of other partitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def partition(num_sms: int) -> Any:
    context = torch.get_device_module("vgpu").green_contexts.GreenContext.create(num_sms=num_sms)
    return context.Stream()


def test_a_kernel_in_a_partition_takes_longer(bench: Any) -> None:
    large = torch.zeros(1 << 22, device=bench.gpu.device)
    total, gap = bench.gpu.runtime.multiprocessors, bench.gpu.runtime.costs.gap
    half = partition(total // 2)

    def body() -> None:
        large.neg_()
        with torch.get_device_module("vgpu").stream(half):
            large.neg_()

    whole, shared = (op for op in bench.observe(body).ops if op.name == "neg_")
    assert shared.end - shared.start == 2 * (whole.end - whole.start) + gap


def test_two_partitions_run_in_parallel(bench: Any) -> None:
    large = [torch.zeros(1 << 24, device=bench.gpu.device) for _ in range(2)]
    streams = [partition(bench.gpu.runtime.multiprocessors // 2) for _ in range(2)]

    def body() -> None:
        for stream, tensor in zip(streams, large, strict=True):
            with torch.get_device_module("vgpu").stream(stream):
                tensor.neg_()

    first, second = (op for op in bench.observe(body).ops if op.name == "neg_")
    assert second.start < first.end


def test_a_partition_is_no_larger_than_the_gpu(bench: Any) -> None:
    with pytest.raises(RuntimeError, match="multiprocessors, not"):
        partition(bench.gpu.runtime.multiprocessors + 1)

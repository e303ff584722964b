"""Small programs for torch's CUDA sanitizer: ``python -m schedbench.profiles.lab.probes.sanitized CASE``."""

from __future__ import annotations

import sys
from typing import Any

import torch


def main(case: str) -> None:  # cuda-only
    module: Any = torch.cuda
    side = module.Stream()
    if case == "pinned_overwrite":
        _overwrite()
        return
    x = torch.ones(1 << 20, device="cuda")
    x.add_(1)
    if case == "correct":
        side.wait_stream(module.current_stream())
    with module.stream(side):
        x.mul_(2)
    module.synchronize()


def _overwrite() -> None:  # cuda-only
    """The host writes a buffer that a copy may still read."""
    host = torch.zeros(1 << 20, pin_memory=True)
    torch.cuda._sleep(20_000_000)
    device = host.to("cuda", non_blocking=True)
    host.fill_(1)
    torch.cuda.synchronize()
    device.sum().item()


if __name__ == "__main__":
    main(sys.argv[1])

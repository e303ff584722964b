"""What the tests of sampling share: rows to draw for, requests, and a record of dispatched ops."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from schedbench.sched.config import Capabilities, EngineConfig, SamplingParams
from schedbench.sched.kernels.sampling import Draw, row_seed
from schedbench.sched.model.penalties import PenalizerOrchestrator
from schedbench.sched.model.sampling import SamplingInfo
from schedbench.sched.request import Request

VOCAB = 301
CONFIG = EngineConfig(
    torch.device("cpu"),
    Capabilities(pinned_memory=False),
    vocab_size=VOCAB,
    eos_token_ids=(2, 7),
    seed=5,
)


class OpRecord(TorchDispatchMode):
    """Names of the ops that were dispatched; an op that would wait for a device is an error."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "multinomial", "item")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} waits for the device"
        if name.startswith("index") and isinstance(args[1], list | tuple):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), "indexed by a mask"
        self.names.append(name)
        return func(*args, **(kwargs or {}))


def requests(
    params: Sequence[SamplingParams], outputs: Sequence[Sequence[int]] | None = None
) -> list[Request]:
    outputs = outputs or [()] * len(params)
    return [
        Request(str(i), array("q", [1, 2, 3]), p, arrival=0, index=i, output_ids=array("q", done))
        for i, (p, done) in enumerate(zip(params, outputs, strict=True))
    ]


def info_of(params: Sequence[SamplingParams], config: EngineConfig = CONFIG, **how: Any) -> SamplingInfo:
    return SamplingInfo.from_requests(requests(params), config=config, **how)


def penalties_of(
    params: Sequence[SamplingParams], outputs: Sequence[Sequence[int]] | None = None, *, exact: bool = False
) -> PenalizerOrchestrator:
    return PenalizerOrchestrator.from_requests(requests(params, outputs), config=CONFIG, exact=exact)


def draw_of(
    logits: torch.Tensor,
    *,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    min_p: float | list[float] = 0.0,
    positions: torch.Tensor | None = None,
    vocab_mask: torch.Tensor | None = None,
    filtered: bool | None = None,
) -> Draw:
    """A draw over given logits: scalars stand for all rows, and rows differ by request unless seeds are given."""
    b, vocab = logits.shape

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(value if isinstance(value, list) else [value] * b, dtype=dtype)

    top_ks = column(top_k, torch.int32)
    return Draw(
        logits=logits,
        temperatures=column(temperature, torch.float32).unsqueeze(1),
        top_ks=torch.where(top_ks > 0, top_ks, vocab),
        top_ps=column(top_p, torch.float32),
        min_ps=column(min_p, torch.float32),
        seeds=torch.tensor([row_seed(0, i) for i in range(b)]),
        positions=torch.arange(b) if positions is None else positions,
        vocab_mask=vocab_mask,
        filtered=(top_k, top_p, min_p) != (0, 1.0, 0.0) if filtered is None else filtered,
    )

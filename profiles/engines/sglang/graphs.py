"""Graphs of the stub's decodes, which read no page table, as SGLang's read the metadata of its attention backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....sched.config import EngineConfig
from ....sched.kernels.allocation import copy_rows, page_bytes
from ....sched.kernels.declare import Work, Written, kernel, kernels
from ....sched.kernels.rows import DecodeInputs, stage_decode
from ....sched.model.runner import GraphInput, ModelRunner
from ..model import EngineModel


class GraphRunner(ModelRunner):
    """Graphs find KV slots in a copy of the requests' rows, which the kernel makes that stages their inputs; what runs
    eagerly finds them in the table ``pages``. ``staged`` is called between that kernel and a graph's replay."""

    def __init__(
        self,
        model: EngineModel,
        pages: Tensor,
        config: EngineConfig,
        proxies: Sequence[GraphInput],
        staged: Callable[[], None],
    ) -> None:
        self._pages, self._slots, self._staged = pages, torch.zeros_like(pages), staged
        super().__init__(model.decoder(self._slots), config, proxies)
        self._model = model.decoder(pages)

    def _stage(self, inputs: DecodeInputs, size: int) -> None:
        stage_with_slots(self._static, *inputs, size, self._slots, self._pages)
        self._staged()


_STAGE = kernels()[stage_decode]


def _cost(static: Tensor, inputs: DecodeInputs, padded: int, pages: Tensor) -> Work:
    assert _STAGE.cost is not None
    staged = _STAGE.cost(static, *inputs, padded)
    return staged._replace(bytes=staged.bytes + page_bytes(pages, inputs.seq_lens))


@kernel(cost=_cost, rows=dict.fromkeys(("pages", "slots"), "req_pool_indices, seq_lens"), fixed_cost=False)
def stage_with_slots(
    static: Written, inputs: DecodeInputs, padded: int, slots: Written, pages: Tensor
) -> None:
    """``stage_decode``, and a copy to ``slots`` of the first ``inputs.seq_lens`` entries of each row of ``pages``."""
    _STAGE.impl(static, *inputs, padded)
    copy_rows(slots, pages, inputs.req_pool_indices, inputs.seq_lens, pages.shape[1])

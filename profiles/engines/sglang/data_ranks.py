"""What SGLang's data-parallel ranks send each other before each step, over the link of the run. Each rank has the
whole MLP: the layers of other ranks are not computed."""

from __future__ import annotations

from importlib import import_module
from math import isclose
from typing import Any, Final

import torch

from ....sched.config import EngineConfig
from ....sched.data_parallel.sync import RankShare
from ...run.system import SystemParts
from ..model import another_group_of_one
from ..names import EngineError
from .edge import LocalGroup, replace_attribute

_MODULE: Final = "sglang.srt.managers.scheduler_components.dp_attn"
# Functions that they gather by, from old to new.
_GATHERS: Final = ("all_gather_single", "exchange_sync_rows")
_TAG: Final = "step"


def synchronised(parts: SystemParts, share: RankShare) -> None:
    """Gather the rows in which ranks say what they are about to run (``MLPSyncBatchInfo.all_gather``). Raises
    EngineError."""
    link = parts.context.link
    assert link is not None

    def gather(rows: torch.Tensor, row: torch.Tensor, *_: Any, **__: Any) -> None:
        """``row`` of every rank, by rank."""
        for rank in share.others:
            link.send(rank, _TAG, row.tolist())
        own = row.flatten().tolist()
        found = [own if rank == share.rank else link.receive(rank, _TAG).value for rank in range(share.ranks)]
        rows.view(-1).copy_(torch.tensor(found, dtype=rows.dtype).view(-1))

    gathers = [replace_attribute(_MODULE, name, gather) for name in _GATHERS]
    if not any(gathers):
        raise EngineError("this SGLang has no data-parallel attention (MLPSyncBatchInfo.all_gather)")
    # Each rank has the seed already.
    replace_attribute("sglang.srt.managers.tp_worker", "broadcast_pyobj", lambda data, *_, **__: data)


def require_shares(scheduler: Any, args: Any, config: EngineConfig) -> None:
    """Raises EngineError where a rank of SGLang does not have the sizes that the scenario gives each rank."""
    context: Any = import_module("sglang.srt.runtime_context")
    schedule = context.get_schedule() if hasattr(context, "get_schedule") else args
    chunk, kept = scheduler.chunked_prefill_size, schedule.schedule_conservativeness
    if chunk != config.chunked_prefill_size or not isclose(kept, config.schedule_conservativeness):
        raise EngineError(
            f"a rank of SGLang has chunks of {chunk} tokens and a conservativeness of {kept}; the scenario"
            f" needs {config.chunked_prefill_size} and {config.schedule_conservativeness}"
            " (ServerArgs._handle_data_parallelism)"
        )


def group_of_ranks(share: RankShare, defaults: set[str]) -> LocalGroup:
    """SGLang's group of the ranks that share layers; nothing is sent in it but by ``synchronised``."""
    group = LocalGroup(another_group_of_one(), defaults, rank=share.rank, size=share.ranks)
    active = torch.ones(share.ranks, dtype=torch.int32)
    vars(group).update(active_ranks=active, active_ranks_cpu=active)
    return group

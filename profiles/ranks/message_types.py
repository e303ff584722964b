"""The type of the value that each tag of a message between ranks has. A link between processes refuses all others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from ...sched.data_parallel.mlp import COLUMNS, OWN, ROWS
from ...sched.data_parallel.sync import ROUND, RankStatus
from ...sched.disagg.layout import ENDED, HANDSHAKE, KV, REQUEST, Chunk, Dropped, Failed, Preallocated
from ...sched.loop.chunk_sizes import CHUNKS
from ...sched.loop.pipelined import OUTPUT, PROXY
from ...sched.pipeline import REQUESTS, Curve
from ...sched.request import Request
from ..run.rank_context import ALIGN
from .join import Report

RESULT: Final = "result"
_SIZES: Final = tuple[int, ...]
MESSAGE_TYPES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        ALIGN: int,
        REQUEST: Request | None,
        ENDED: str,
        HANDSHAKE: Preallocated | Dropped,
        KV: Chunk | Failed,
        REQUESTS: tuple[int, list[Request] | None],
        PROXY: int,
        OUTPUT: int,
        CHUNKS: Curve,
        ROUND: RankStatus,
        ROWS: _SIZES,
        COLUMNS: _SIZES,
        OWN: _SIZES,
        RESULT: Report,
    }
)

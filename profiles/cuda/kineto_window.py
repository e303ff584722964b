"""A window of Kineto: CUPTI's rows between start and stop, from torch.profiler's Chrome trace."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ..record.files import packed_whole
from .kineto import API, GPU, KinetoRow, rows
from .log import StreamTable


class KinetoWindow:  # cuda-only
    """One window; its trace is kept in the file ``keep``, if given. The device is idle at both ends, because work that
    began before the window is lost."""

    def __init__(self, keep: Path | None = None) -> None:
        self._keep = keep

    def start(self) -> None:
        torch.cuda.synchronize()
        options: Any = torch._C._profiler._ExperimentalConfig
        self.profile: Any = profile(
            activities=[ProfilerActivity.CUDA],
            # Sync events and their metadata are off by default.
            experimental_config=options(enable_cuda_sync_events=True, expose_kineto_event_metadata=True),
            acc_events=True,  # there is one cycle; without this, torch 2.11 warns that others would be lost
        )
        self.profile.__enter__()

    def stop(self) -> list[KinetoRow]:
        return rows(self.trace())

    def trace(self) -> dict[str, Any]:
        """End the window and return its Chrome trace."""
        torch.cuda.synchronize()
        self.profile.__exit__(None, None, None)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self.profile.export_chrome_trace(str(path))
            content = path.read_bytes()
        if self._keep is not None:
            with packed_whole(self._keep) as file:
                file.write(content)
        found: dict[str, Any] = json.loads(content)
        return found


def identify(streams: StreamTable) -> frozenset[int]:  # cuda-only
    """Find CUPTI's numbers of the named streams, by one small operation on each in turn.

    Returns the numbers under which this thread's calls were listed. This window also contains CUPTI's start, which
    takes hundreds of milliseconds, so that no measured window does.
    """
    handles = streams.handles()
    external: Any = torch.cuda.ExternalStream
    capture = KinetoWindow()
    capture.start()
    for handle in handles:
        with torch.cuda.stream(external(handle) if handle else torch.cuda.default_stream()):
            torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    found = capture.stop()
    for cupti, handle in zip(streams_in_order(found), handles, strict=False):
        streams.identify(cupti, handle)
    return frozenset(row.thread for row in found if row.category in API)


def streams_in_order(found: Iterable[KinetoRow]) -> list[int]:
    """CUPTI's numbers of the streams with operations, in order of first use."""
    return list(dict.fromkeys(row.stream for row in found if row.category in GPU))


def this_thread() -> frozenset[int]:
    """Numbers under which Kineto may list calls of this thread: the kernel's thread id, or the low word of the C
    library's, signed or unsigned."""
    low = threading.get_ident() & 0xFFFFFFFF
    return frozenset({threading.get_native_id(), low, low - (1 << 32), (1 << 32) - low})

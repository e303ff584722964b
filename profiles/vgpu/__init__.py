"""A virtual GPU: a device of torch whose time is simulated and whose every operation is recorded.

Importing this registers nothing with torch; opening a virtual GPU does.
"""

from .gpu import VirtualGpu, open_vgpu
from .runtime import GraphCaptureError

__all__ = ["GraphCaptureError", "VirtualGpu", "open_vgpu"]

"""A virtual GPU: a torch device whose time is simulated and whose every operation is recorded.

Importing the package registers nothing with torch; opening a virtual GPU does.
"""

from .device import VirtualGpu
from .gpu import open_vgpu
from .runtime import GraphCaptureError

__all__ = ["GraphCaptureError", "VirtualGpu", "open_vgpu"]

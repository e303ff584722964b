"""A virtual GPU: a torch device whose time is simulated and whose every operation is recorded.

Importing the package registers nothing with torch, and imports none; opening a virtual GPU (``gpu.open_vgpu``) does.
"""

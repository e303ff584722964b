"""Finds accesses that nothing orders on a CUDA device, from inside the process."""

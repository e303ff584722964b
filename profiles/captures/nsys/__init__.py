"""Nsight Systems: where it is, how it is started, and what its exports say."""

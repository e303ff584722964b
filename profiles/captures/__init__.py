"""Captures made elsewhere, by Nsight Systems or torch's profiler, read into the one timeline and judged like a run."""

"""Questions: scenario files, their schema, the workloads they describe and the traces they replay."""

from .shipped import catalog

__all__ = ["catalog"]

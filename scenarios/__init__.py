"""Questions: scenario files, their schema, the workloads they describe and the traces they replay."""

from .shipped import case_catalog, catalog

__all__ = ["case_catalog", "catalog"]

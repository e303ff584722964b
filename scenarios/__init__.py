"""Scenario files: their schema, the workloads that they describe, and the traces that they replay."""

from .shipped import case_catalog, catalog

__all__ = ["case_catalog", "catalog"]

"""Scenario files: their schema, the workloads that they describe, and the traces that they replay."""

"""Imported by the process from which those of a pool are forked: what every run needs, in memory that they share."""

from __future__ import annotations

from importlib import import_module

from .own_process import claim_process, freeze_heap

claim_process()
import_module("schedbench.profiles.ranks.execute")  # by name, since this package is below that one
freeze_heap()

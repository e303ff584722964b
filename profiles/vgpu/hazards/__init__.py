"""Which accesses to memory nothing orders: vector clocks over host and streams, footprints, freed blocks."""

from .checker import Checker

__all__ = ["Checker"]

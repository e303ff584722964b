"""Measure and judge changes to an LLM inference scheduler."""

__version__ = "0.1.0"

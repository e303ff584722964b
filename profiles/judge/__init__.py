"""Comparison of two sides: equality of tokens, engagement of the change, and a verdict on performance."""

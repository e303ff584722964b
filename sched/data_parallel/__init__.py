"""Ranks that have a part of the requests each, and step together (upstream's DP attention)."""

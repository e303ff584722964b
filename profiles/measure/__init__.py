"""Measurements from records: streaming sinks over the windows of a timeline, and observers of requests.

Independent of devices, files and terminals. The memory of a sink depends on the number of distinct
source lines, kinds and streams, never on the length of the run.
"""

"""Answers from records: streaming sinks over the windows of a timeline, and listeners for requests.

Knows nothing of devices, files or terminals. A sink's memory depends on the number of distinct
source lines, kinds and streams, never on the length of the run.
"""

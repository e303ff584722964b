"""Where Nsight Systems is installed: one real capture on this machine, imported and reported."""

from __future__ import annotations

import os

import pytest

from schedbench.profiles.captures.nsys.record import Nsys, RecordingRequest, find, recorded
from schedbench.profiles.platform.machine import MachineError
from tests.acceptance.runs import result_of

FEW = ("workload.requests=6", "workload.arrival=burst", "measure.warmup_requests=2")


@pytest.fixture
def nsys() -> Nsys:
    try:
        return find(None, os.environ)
    except MachineError as error:
        pytest.skip(str(error))


def test_a_real_capture_has_the_steps_of_the_run(nsys, tmp_path):
    """Without a GPU the capture holds the scheduler's ranges of the measured workload, and no others."""
    order = RecordingRequest(["mixed", *(f"--set={text}" for text in FEW)], "vgpu")
    try:
        captured, report = recorded(nsys, order, tmp_path, {**os.environ, "MY_API_KEY": "hunter2"})
    except MachineError as error:
        if "receives no ranges of nvtx" not in str(error):
            raise
        pytest.skip(str(error))
    expected = result_of("mixed", *FEW).per_step
    found = {kind: counts.steps for kind, counts in captured.per_step.items()}
    assert found == {kind: counts.steps for kind, counts in expected.items()}
    assert report.is_file()
    assert b"hunter2" not in (tmp_path / "capture.sqlite").read_bytes()
    capture = captured.environment["capture"]
    assert isinstance(capture, dict) and capture["versions"]

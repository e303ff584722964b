"""Where Nsight Systems is looked for, and in which order."""

from __future__ import annotations

import pytest

from schedbench.profiles.captures.nsys.record import VARIABLE, find
from schedbench.profiles.platform.machine import MachineError


def test_search_order_is_option_variable_path_and_usual_folders(fake, tmp_path):
    usual = fake("opt/nvidia/nsight-systems/2024.5.1/bin/nsys", version="2024.5.1")
    newer = fake("opt/nvidia/nsight-systems/2025.1.1/bin/nsys", version="2025.1.1")
    on_path = fake("path/nsys", version="2023.4.4.54-1v0")
    variable = fake("elsewhere/nsys", version="2022.4.2")
    named = fake("named/nsys", version="2021.5")
    path = {"PATH": f"{on_path.parent}:/usr/bin:/bin"}
    plain = {"PATH": str(tmp_path)}
    assert find(str(named), {**path, VARIABLE: str(variable)}, root=tmp_path).path == named
    assert find(None, {**path, VARIABLE: str(variable)}, root=tmp_path).path == variable
    assert find(None, path, root=tmp_path) == (on_path, "2023.4.4.54-1v0")
    assert find(None, plain, root=tmp_path).path == newer
    newer.unlink()
    assert find(None, plain, root=tmp_path).path == usual


def test_a_named_tool_is_used_or_refused_never_replaced(fake, tmp_path):
    on_path = fake("path/nsys")
    with pytest.raises(MachineError, match=r"/nowhere/nsys is not an nsys that runs: install Nsight Systems"):
        find("/nowhere/nsys", {"PATH": str(on_path.parent)}, root=tmp_path)
    with pytest.raises(MachineError, match="is not an nsys that runs"):
        find("/bin/true", {}, root=tmp_path)


def test_a_missing_tool_is_reported_with_what_to_install(tmp_path):
    with pytest.raises(
        MachineError, match=r"no Nsight Systems on this machine: install .* --nsys or SCHEDBENCH_NSYS"
    ):
        find(None, {"PATH": str(tmp_path)}, root=tmp_path)


def test_a_tool_that_does_not_run_is_named(fake, tmp_path):
    broken = fake("opt/nvidia/nsight-systems/2025.1.1/bin/nsys")
    broken.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(MachineError, match=r"nsys would not run"):
        find(None, {"PATH": str(tmp_path)}, root=tmp_path)

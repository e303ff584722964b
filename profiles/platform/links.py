"""The connection by which the hardware joins the ranks of a run."""

from __future__ import annotations

from ...scenarios.combinations import routed
from ...scenarios.schema import Scenario
from .hardware import LinkName, LinkProfile
from .machine import MachineError
from .resolve import Resolved


def link_profile(resolved: Resolved) -> LinkProfile:
    """Raises MachineError where the emulated hardware has no such link."""
    hardware, name = resolved.hardware, _link_name(resolved.scenario)
    if name not in hardware.links:
        raise MachineError(f"device.hardware: {hardware.name} has no link '{name}' to join ranks by")
    return hardware.links[name]


def _link_name(scenario: Scenario) -> LinkName:
    far = routed(scenario) and scenario.engine.disaggregation.transfer == "distributed"
    return "rdma" if far else "nvlink"

"""A scenario whose times follow one constant of the hardware: what a Python list costs per token of a prompt."""

from __future__ import annotations

import json
from pathlib import Path

from schedbench.profiles.judge.draws import uncertain
from schedbench.profiles.platform.hardware import load

_SCENARIO = """
name: long-prompts
model: {{preset: tiny-llama, dtype: float32}}
device: {{values: none, hardware: {hardware}}}
engine: {{overlap: false, relay: pr25945, max_running_requests: 1, kv_tokens: 8192}}
measure: {{warmup_requests: 0}}
workload:
  requests: 1
  arrival: burst
  prompt_tokens: {{dist: fixed, value: 2000}}
  output_tokens: {{dist: fixed, value: 1}}
"""


def long_prompts(
    folder: Path, *, slope: tuple[float, float], numpy: tuple[float, float] = (2000.0, 25.0)
) -> Path:
    """On an h200 with every range a tenth as wide, but for the cost of a list: ``slope`` ns per token. NumPy is given
    ``numpy`` ns per call and per token."""
    hardware = load("h200")
    found = hardware.model_dump(mode="json", exclude={"sha256"}, exclude_defaults=True)
    for name, quantity in uncertain(hardware).items():
        inner = found
        for key in name.split("."):
            inner = inner[key]
        for end in ("low", "high"):
            inner[end] = quantity.value + (getattr(quantity, end) - quantity.value) / 10
    phases = found["phases"]
    phases["flatten"]["b"] |= {"value": sum(slope) / 2, "low": slope[0], "high": slope[1]}
    for part, ns in zip("ab", numpy, strict=True):
        phases["flatten_numpy"][part] |= {"value": ns, "low": ns, "high": ns}
    profile, scenario = folder / "here.yaml", folder / "scenario.yaml"
    profile.write_text(json.dumps(found))
    scenario.write_text(_SCENARIO.format(hardware=profile))
    return scenario

"""A verdict whose sign depends on one constant of the hardware is none, and names the constant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedbench.profiles.judge.compare import Comparison, VerdictRules, judge
from schedbench.profiles.judge.draws import uncertain
from schedbench.profiles.judge.sides import opened, parse
from schedbench.profiles.judge.trial import Question, TrialRequest
from schedbench.profiles.judge.trials import TrialPlan, conduct, conduct_draws
from schedbench.profiles.judge.verdict import Reason
from schedbench.profiles.platform.hardware import load

SCENARIO = """
name: long-prompts
model: {{preset: tiny-llama, dtype: float32}}
device: {{values: none, hardware: {hardware}}}
engine: {{overlap: false, relay: pr25945, max_running_requests: 4, kv_tokens: 16384}}
workload:
  requests: 6
  arrival: burst
  prompt_tokens: {{dist: fixed, value: 2000}}
  output_tokens: {{dist: fixed, value: 2}}
"""


def profile(path: Path, *, slope: tuple[float, float]) -> Path:
    """h200 with every range a tenth as wide, but for what a Python list costs per token: that lies in ``slope``, on
    either side of the 25 ns that NumPy is given here."""
    found = load("h200").model_dump(mode="json", exclude={"sha256"}, exclude_defaults=True)
    for name, quantity in uncertain(load("h200")).items():
        inner = found
        for key in name.split("."):
            inner = inner[key]
        for end in ("low", "high"):
            inner[end] = quantity.value + (getattr(quantity, end) - quantity.value) / 10
    phases = found["phases"]
    phases["flatten"]["b"] |= {"value": sum(slope) / 2, "low": slope[0], "high": slope[1]}
    phases["flatten_numpy"]["b"] |= {"value": 25.0, "low": 25.0, "high": 25.0}
    path.write_text(json.dumps(found))
    return path


def compared(folder: Path, slope: tuple[float, float]) -> Comparison:
    hardware = profile(folder / "here.yaml", slope=slope)
    scenario = folder / "scenario.yaml"
    scenario.write_text(SCENARIO.format(hardware=hardware))
    a, b = parse("flatten=numpy"), parse("flatten=list")
    plan = TrialPlan(varied=a.varied | b.varied)
    with opened(Question.of(str(scenario)), a, b, TrialRequest(device="vgpu")) as sides:
        trials = conduct(*sides, plan, lambda *_: None)
        drawn = conduct_draws(*sides, trials, plan, 16)
    return judge(trials, VerdictRules(headline=("input_throughput",)), drawn)


@pytest.mark.parametrize(
    ("slope", "verdict"), [((20.0, 60.0), "inconclusive"), ((60.0, 100.0), "worse"), ((0.0, 10.0), "better")]
)
def test_a_sign_stands_only_where_the_constant_cannot_turn_it(
    tmp_path: Path, slope: tuple[float, float], verdict: str
) -> None:
    found = compared(tmp_path, slope)
    firmness = found.metrics["input_throughput"].judgement.firmness
    assert firmness is not None and firmness.draws == 16
    assert found.verdict == verdict
    assert (Reason.CONSTANTS in found.reasons) == (verdict == "inconclusive") == firmness.flips
    if firmness.flips:
        assert firmness.constant == "phases.flatten.b" and firmness.correlation < -0.9
    else:
        assert firmness.holding == 16

"""Lookups are counted from the start of the measurement, without calls on the device's streams."""

from __future__ import annotations

import torch

from schedbench.profiles.measure.collector import LookupCount, RunCollector
from schedbench.profiles.record.result import Abstained, Metric
from schedbench.sched.observe import LogicalClock
from tests.profiles.measure.test_answers import NAMES


def lookups() -> torch.Tensor:
    return torch.tensor([100, 40])


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def test_metrics_exist_only_with_hot_buffers() -> None:
    plain = RunCollector(LogicalClock()).finish(NAMES).metrics
    assert not any(name.startswith("hisparse") for name in plain)
    counted = lookups()
    answers = RunCollector(LogicalClock(), LookupCount(counted, unchanged, token_bytes=8))
    counted += torch.tensor([4, 1])
    answers.counts.steps["decode"] = 2
    found = answers.finish(NAMES).metrics
    ratio, fetched = found["hisparse_hit_ratio"], found["hisparse_swap_in_bytes_per_step"]
    assert isinstance(ratio, Metric) and ratio.values == (0.75,)
    assert isinstance(fetched, Metric) and fetched.values == (4.0,)


def test_metrics_abstain_without_a_long_request() -> None:
    answers = RunCollector(LogicalClock(), LookupCount(lookups(), unchanged, token_bytes=8))
    found = answers.finish(NAMES).metrics["hisparse_hit_ratio"]
    assert found == Abstained(abstained="no decoding request was longer than its hot buffer")

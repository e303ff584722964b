"""Probes as far as they run without a GPU: their evaluation of what they measure."""

from __future__ import annotations

import json

import pytest
import torch

from schedbench.profiles.lab import probes
from schedbench.profiles.lab.probes import attention_call, host_ns, measured, spread, waited
from schedbench.profiles.record.environment import version


def test_a_failing_group_has_its_reason():
    def failing(small):
        raise RuntimeError(f"no kernel for {small.device}")

    assert measured(lambda: failing(torch.zeros(1))) == {"error": "RuntimeError: no kernel for cpu"}
    assert measured(lambda: {"n": 3}) == {"n": 3}


def test_a_call_that_lasts_while_the_stream_is_busy_waited():
    assert waited(19e6)
    assert not waited(30e3)


def test_samples_are_summarised():
    assert spread([3, 1, 2]) == {"n": 3, "min": 1, "p10": 1, "median": 2, "p90": 3}


def test_host_time_excludes_earlier_work():
    before = []
    assert host_ns(lambda: None, repeat=4, before=lambda: before.append(1))["n"] == 4
    assert len(before) == 4


def test_versions_of_installed_packages_are_listed():
    assert version("no-such-package") is None
    assert version("pytest")


@pytest.mark.parametrize(("new", "before"), [(1, 40), (24, 0), (8, 16)])
def test_the_attention_probe_computes_attention(new: int, before: int) -> None:
    """Each request attends to its own pages, causally."""
    torch.manual_seed(5)
    action = attention_call(2, new, before, device="cpu", dtype=torch.float32)
    q, keys, values = action.args[:3]
    whole = [
        t.view(2, before + new, 8, 128).repeat_interleave(4, dim=2).transpose(1, 2) for t in (keys, values)
    ]
    mask = torch.ones(new, before + new, dtype=torch.bool).tril(before)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.view(2, new, 32, 128).transpose(1, 2), *whole, attn_mask=mask
    )
    assert torch.allclose(action().view(2, new, 32, 128).transpose(1, 2), expected, atol=1e-5)


def test_a_probe_writes_what_it_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(probes, "facts", lambda device: {"gpu": str(device)})
    output = tmp_path / "environment.json"
    assert probes.main("environment", str(output)) == 0
    assert json.loads(output.read_text())["gpu"] == "cuda:0"

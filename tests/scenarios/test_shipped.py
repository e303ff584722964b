"""The scenarios that come with the package."""

from __future__ import annotations

from dataclasses import fields

import pytest

from schedbench.scenarios.loader import load
from schedbench.scenarios.problems import ScenarioError
from schedbench.scenarios.schema import EngineSection
from schedbench.scenarios.shipped import catalog, names
from schedbench.scenarios.workload import build
from schedbench.scenarios.workload_schema import Sampling
from schedbench.sched.config import EngineConfig, HiSparseConfig, SamplingParams

GIVEN = {"trace_mooncake": "workload.trace=FILE", "checkpoint": "model.path=DIR"}


def test_the_catalog_has_every_scenario_with_a_sentence() -> None:
    assert [entry["name"] for entry in catalog(names())] == names()
    assert all(entry["about"].endswith(".") for entry in catalog(names()))


@pytest.mark.parametrize("name", names())
def test_a_shipped_scenario_is_valid_and_has_its_files_name(name: str) -> None:
    scenario = load(name, [GIVEN[name]] if name in GIVEN else [])

    assert scenario.name == name
    if scenario.workload.trace is None:
        workload = build(scenario, vocab_size=512, context_len=131072, seed=0)
        assert workload.achieved.clipped == 0


@pytest.mark.parametrize(("name", "override"), GIVEN.items())
def test_values_required_from_the_user_are_asked_for(name: str, override: str) -> None:
    with pytest.raises(ScenarioError, match=f"{override.split('=')[0]}: has to be given: --set {override}$"):
        load(name)


def test_the_overlap_pair_differs_in_overlap_only() -> None:
    on, off = load("overlap_on").expanded(), load("overlap_off", ["engine.overlap=true"]).expanded()

    own = ("name", "about", "expect")
    assert {key: on[key] for key in on if key not in own} == {key: off[key] for key in off if key not in own}


@pytest.mark.parametrize("name", ["mixed", "overlap_on"])
def test_shipped_budgets_allow_no_copy_or_sync_in_a_steady_decode(name: str) -> None:
    assert load(name).expanded()["expect"]["decode.steady"] == {
        "schedule": {"h2d": 0, "d2h": 0, "sync": 0},
        "when": {"overlap": True},
    }


def test_the_schema_has_the_defaults_of_the_engine() -> None:
    engine = {
        field.name: field.default
        for field in fields(EngineConfig)
        if field.name in EngineSection.model_fields
    }
    sampling = {
        field.name: field.default for field in fields(SamplingParams) if field.name in Sampling.model_fields
    }

    # decided, and put together, from what the schema has
    other = ("overlap", "speculative", "hisparse", "split_prefill")
    assert {name: getattr(EngineSection(), name) for name in engine if name not in other} == {
        name: default for name, default in engine.items() if name not in other
    }
    assert engine["hisparse"] is None and not EngineSection().hisparse.enabled
    assert engine["split_prefill"] is None and not EngineSection().split_prefill.enabled
    assert HiSparseConfig(1).host_ratio == EngineSection().hisparse.host_ratio
    assert Sampling(ignore_eos=False).model_dump() == sampling

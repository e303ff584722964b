"""The whole program on small runs with unusual settings: a documented exit code, and never a defect."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from schedbench.cli.app import app
from schedbench.cli.errors import exit_code
from schedbench.scenarios.overrides import keys
from tests.robustness.hostile import FUZZED, VALUES, as_json, mutated, rounds, time_limit

pytestmark = [pytest.mark.wide, *FUZZED]

PROFILE = yaml.safe_load(resources.files("schedbench.profiles.hardware").joinpath("h200.yaml").read_bytes())
# What does not fit a pool this small is refused, so that no request is long.
SMALL = ("device.values=none", "engine.kv_tokens=256", "workload.requests=3", "workload.arrival=burst",
         "measure.warmup_requests=1", "workload.prompt_tokens=20", "workload.output_tokens=4")  # fmt: skip
HOW_MANY = ("workload.requests", "measure.warmup_requests", "engine.kv_tokens")
KEYS = [".".join(path) for path in keys() if ".".join(path) not in HOW_MANY]
LIKELY = st.sampled_from((1, 2, 3, 16, 64, 0.25, 1.5, 100.0, True, False, "fcfs", "lof", "latest", "pr25945"))
FORMS = ("table", "json", "md", "csv", "html")


def code_of(*arguments: str) -> int:
    """Runs the command line in this process and returns the exit code that ``main`` gives, without the message."""
    with time_limit():
        done = CliRunner().invoke(app, arguments)
    if done.exception is None or isinstance(done.exception, SystemExit):
        return done.exit_code
    code = exit_code(done.exception)
    if code is None:
        raise done.exception
    return code


def assert_exit_code(*overrides: str, form: str = "json") -> None:
    settings = [word for override in (*SMALL, *overrides) for word in ("--set", override)]
    assert code_of("run", "mixed", *settings, "--format", form) in range(5)


@rounds(12)
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), LIKELY | VALUES), min_size=1, max_size=2),
    st.sampled_from(FORMS),
)
@example([("workload.prompt_tokens", {"dist": "lognormal", "mean": 1e-6, "std": 2.0**24})], "json")
@example([("engine.page_size", 2**40)], "json")
@example([("workload.sampling", {"temperature": 5e-324, "top_k": 2**40, "top_p": 5e-324})], "json")
@example([("workload.sampling.stop_token_ids", [2**40])], "table")
@example([("workload.arrival", {"process": "gamma", "rate": 1e-3, "burstiness": 1e-3})], "table")
def test_runs(changes: list[tuple[str, Any]], form: str) -> None:
    assert_exit_code(*(f"{key}={as_json(value)}" for key, value in changes), form=form)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hardware") / "mine.yaml"


@rounds(8)
@given(
    number=st.sampled_from((0, 1e-3, 1, 1e6, 1e9, 1e12, 1e18, 1e24)),
    document=st.just(PROFILE) | mutated(PROFILE, most=1),
)
def test_hardware_profiles_at_the_limits(profile: Path, number: float, document: Any) -> None:
    """Every quantity of a unit is as small, or as large, as the unit allows."""
    extreme = _with_values(document, number)
    profile.write_text(as_json(extreme))
    assert_exit_code(f"device.hardware={profile}", form="json")


def _with_values(node: Any, number: float) -> Any:
    if not isinstance(node, dict):
        return node
    if "unit" in node and "value" in node:
        low, high = BOUNDS.get(str(node["unit"]), (0, 1))
        return node | {"value": min(max(number, low), high)}
    return {key: _with_values(inner, number) for key, inner in node.items()}


BOUNDS = {"ns": (0, 1e9), "B": (0, 2.0**40), "B/s": (1e6, 1e18), "FLOP/s": (1e9, 1e24), "1": (1e-3, 1)}


@rounds(40)
@given(
    st.lists(
        st.sampled_from(
            ("run", "compare", "sweep", "list", "explain", "--set", "--a", "--over", "--gate", "x")
        )
        | st.text(max_size=10),
        max_size=5,
    )
)
def test_any_words(words: list[str]) -> None:
    """Commands that start a run of full size are left out."""
    assume(not {"bench", "doctor", "check"} & set(words) and "mixed" not in " ".join(words))
    assert code_of(*words) in range(5)

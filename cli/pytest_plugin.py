"""The pytest plugin: the fixture ``schedbench``, and a marker that holds its runs against a stored baseline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from .answers import RunAnswer

MARKER = "schedbench_baseline"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("schedbench")
    group.addoption(
        "--schedbench-baselines",
        default=".schedbench/baselines",
        metavar="DIR",
        help="where baselines are kept (schedbench baseline)",
    )
    group.addoption(
        "--schedbench-save",
        action="store_true",
        help="save the runs of marked tests as baselines, compare nothing",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{MARKER}(name, gates=[], seeds=5): compare what the test runs with the stored baseline of that name",
    )


class HeldBaseline(NamedTuple):
    """The arguments of the marker. ``seeds``: of so many workload seeds the baseline is saved; fewer than five give no
    verdict."""

    name: str
    gates: Sequence[str] = ()
    seeds: int = 5


class ScheduleBench:
    """``run``, and every other function of ``schedbench``. In a test with the marker, ``run`` fails where tokens are
    not those of the baseline, a gate does not pass, or the verdict is worse."""

    def __init__(self, held: HeldBaseline | None, folder: Path, *, saving: bool) -> None:
        self._baseline = held
        self._folder = folder
        self._saving = saving

    def __getattr__(self, name: str) -> Any:
        from . import api

        return getattr(api, name)

    def run(self, scenario: str | Path, **options: Any) -> RunAnswer:
        from . import api

        if self._baseline is None:
            return api.run(scenario, **options)
        return self._held(self._baseline, scenario, {"save_tokens": True, **options})

    def _held(self, baseline: HeldBaseline, scenario: str | Path, options: dict[str, Any]) -> RunAnswer:
        from . import api
        from .baseline import stored

        name, gates, seeds = baseline
        count = seeds if self._saving else len(stored(self._folder, name))
        runs = [api.run(scenario, **options)]
        first = runs[0].result.scenario.seed or 0
        others = range(first + 1, first + count)
        runs += [api.run(scenario, **{**options, "measure.seed": seed}) for seed in others]
        if self._saving:
            self._save(name, runs)
            return runs[0]
        found = api.compare(self._folder / name, runs, gates=gates)
        if not found.passed or found.verdict == "worse":
            gated = found.document["comparison"]["gates"]
            failed = [
                f"gate {gate['gate']}: {gate['outcome']}" for gate in gated if gate["outcome"] != "passed"
            ]
            pytest.fail("\n".join((f"baseline {name}: {found.conclusion}", *failed)), pytrace=False)
        return runs[0]

    def _save(self, name: str, runs: Sequence[RunAnswer]) -> None:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("*.json"):
            stale.unlink()
        for number, run in enumerate(runs):
            run.save(folder / f"run-{number:03d}.json")


@pytest.fixture
def schedbench(request: pytest.FixtureRequest) -> ScheduleBench:
    """Runs scenarios: ``schedbench.run("mixed").assert_budget("decode.steady", schedule={"sync": 0})``."""
    option = request.config.getoption
    marker = request.node.get_closest_marker(MARKER)
    return ScheduleBench(
        HeldBaseline(*marker.args, **marker.kwargs) if marker else None,
        Path(option("--schedbench-baselines")),
        saving=option("--schedbench-save"),
    )

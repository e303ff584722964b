"""The pytest plugin: the fixture ``schedbench``, and a marker that holds its runs against a stored baseline."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from .answers import RunAnswer

MARKER = "schedbench_baseline"
_BENCH = pytest.StashKey["ScheduleBench"]()
_SAVED = pytest.StashKey[set[str]]()


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
    name: str
    gates: Sequence[str]
    seeds: int


def schedbench_baseline(name: str, gates: Sequence[str] = (), seeds: int = 5) -> HeldBaseline:
    """The arguments of the marker. ``seeds``: of so many workload seeds the baseline is saved; fewer than five give no
    verdict. Raises UsageError and GateError for what ``schedbench baseline`` and ``compare`` refuse."""
    from ..profiles.judge.gates import parse
    from .baseline import place_of
    from .command import require_allowed
    from .compare import compare

    place_of(Path(), name)
    require_allowed(compare, {"gates": gates, "seeds": seeds})
    for gate in gates:
        parse(gate)
    return HeldBaseline(name, gates, seeds)


class ScheduleBench:
    """``run``, and every other function of ``schedbench``. In a test with the marker, ``run`` fails where tokens are
    not those of the baseline, a gate does not pass, or the verdict is worse. ``saved`` are the baselines that this
    session has saved; None where it compares."""

    def __init__(self, held: HeldBaseline | None, folder: Path, *, saved: set[str] | None) -> None:
        self.has_run = False
        self._baseline = held
        self._folder = folder
        self._saved = saved

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("schedbench"), name)

    def run(self, scenario: str | Path, **options: Any) -> RunAnswer:
        """Raises UsageError where a baseline would be saved a second time."""
        from . import api

        self.has_run = True
        if self._baseline is None:
            return api.run(scenario, **options)
        return self._held(self._baseline, scenario, {"save_tokens": True, **options})

    def _held(self, baseline: HeldBaseline, scenario: str | Path, options: dict[str, Any]) -> RunAnswer:
        from . import api
        from .baseline import keep, stored
        from .errors import UsageError

        name, gates, seeds = baseline
        if self._saved is not None and name in self._saved:
            raise UsageError(f"baseline {name}: a second run would replace the first: name one for each")
        count = len(stored(self._folder, name)) if self._saved is None else seeds
        runs = [api.run(scenario, **options)]
        first = runs[0].result.scenario.seed or 0
        others = range(first + 1, first + count)
        runs += [api.run(scenario, **{**options, "measure.seed": seed}) for seed in others]
        if self._saved is not None:
            self._saved.add(name)
            keep(self._folder / name, [run.result for run in runs])
            return runs[0]
        found = api.compare(self._folder / name, runs, gates=gates)
        if not found.passed or found.verdict == "worse":
            gated = found.document["comparison"]["gates"]
            failed = [
                f"gate {gate['gate']}: {gate['outcome']}" for gate in gated if gate["outcome"] != "passed"
            ]
            pytest.fail("\n".join((f"baseline {name}: {found.conclusion}", *failed)), pytrace=False)
        return runs[0]


@pytest.fixture
def schedbench(request: pytest.FixtureRequest) -> ScheduleBench:
    """Runs scenarios: ``schedbench.run("mixed").assert_budget("decode.steady", schedule={"sync": 0})``."""
    option = request.config.getoption
    marker = request.node.get_closest_marker(MARKER)
    bench = request.node.stash[_BENCH] = ScheduleBench(
        schedbench_baseline(*marker.args, **marker.kwargs) if marker else None,
        Path(option("--schedbench-baselines")),
        saved=request.config.stash.setdefault(_SAVED, set()) if option("--schedbench-save") else None,
    )
    return bench


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test with the marker that passes without a run fails."""
    result = yield
    bench = item.stash.get(_BENCH, None)
    if item.get_closest_marker(MARKER) and not (bench and bench.has_run):
        pytest.fail(f"{MARKER}: the test has not called schedbench.run", pytrace=False)
    return result

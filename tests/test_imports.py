"""What is imported, and when: asked of one process, which imports one part of the program after the other."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest

from schedbench.cli.list import _entries
from schedbench.profiles.engines.adapter import adapter_named
from tests.json_programs import ROOT

PROGRAM = """
import json, sys, torch
found = {}

import schedbench.profiles.vgpu
found["backend"] = torch._C._get_privateuse1_backend_name()

from schedbench.sched.kernels.dense import rms_norm
rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)
found["triton"] = "triton" in sys.modules

optional = ("scipy", "typer", "rich")
sys.modules.update(dict.fromkeys(optional))  # whose import fails from now on
try:
    from schedbench.profiles.lab import gpu, prediction_runs
    found["missing"] = None
except ImportError as error:
    found["missing"] = str(error)
for name in optional:
    del sys.modules[name]

from schedbench.cli.app import console
sys.argv = ["schedbench", "run", "mixed", "--set", "workload.requests=2", "--hazards", "on", "--format", "csv"]
try:
    console()
finally:
    found["heavy"] = [name for name in ("torch.distributed.tensor", "sympy") if name in sys.modules]
    print(json.dumps(found), file=sys.stderr)
"""

# What a run that computes no values on one virtual GPU has no use for.
NEEDLESS = (
    "torch.distributed.tensor",
    "torch._dynamo",
    "sympy",
    "numba",
    "scipy",
    "triton",
    "jinja2",
    "vl_convert",
    "perfetto",
    "schedbench.profiles.cuda.machine",
    "schedbench.profiles.engines.client",
    "schedbench.profiles.ranks.processes",
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert len(done.stderr.splitlines()) == 1 and done.stdout, done.stderr
    answer: dict[str, object] = json.loads(done.stderr)
    return answer


@pytest.mark.wide
def test_importing_the_virtual_gpu_registers_no_device(found: dict[str, object]) -> None:
    assert found["backend"] == "privateuseone"


def test_triton_is_imported_when_a_kernel_is_first_called_on_cuda(found: dict[str, object]) -> None:
    assert found["triton"] is False


def test_the_plan_of_make_gpu_needs_neither_scipy_nor_packages_of_the_command_line(
    found: dict[str, object],
) -> None:
    assert found["missing"] is None


def test_a_run_of_the_command_line_does_not_import_distributed_tensors(found: dict[str, object]) -> None:
    assert found["heavy"] == []


@pytest.mark.wide
def test_a_run_without_values_imports_nothing_that_it_has_no_use_for() -> None:
    program = (
        "import sys; sys.modules.update(nvtx=None, triton=None)  # as on macOS, which has neither\n"
        "from schedbench.cli.app import console\n"
        "sys.argv = ['schedbench', 'run', 'start', '--set', 'workload.requests=2']\n"
        "try: console()\n"
        f"finally: print([name for name in {NEEDLESS} if sys.modules.get(name)], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def printed(program: str) -> str:
    """What a program prints in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("statements", "heavy"),
    [
        ("import schedbench", ("torch", "typer", "pydantic")),
        (
            "import schedbench.cli.app",
            ("torch", "numpy", "triton", "pydantic", "yaml", "rich.table", "rich.progress"),
        ),
        (f"import {PROJECT['entry-points']['pytest11']['schedbench']}", ("torch", "rich", "typer")),
        (
            "from schedbench.scenarios.shipped import catalog, names; catalog(names())",
            ("torch", "numpy", "pydantic"),
        ),
    ],
)
def test_a_first_import_loads_nothing_heavy(statements: str, heavy: tuple[str, ...]) -> None:
    program = f"import sys; {statements}; print([name for name in {heavy} if name in sys.modules])"
    assert printed(program) == "[]\n"


def test_listing_engines_names_the_packages_of_the_adapters() -> None:
    named = {entry["name"]: entry["package"] for entry in _entries("engines")}
    assert named == {name: adapter_named(name).package for name in named} and len(named) == 4


@pytest.mark.wide
def test_a_run_after_a_list_loads_the_modules_that_the_list_has_not_loaded() -> None:
    program = (
        "import sys; from schedbench.cli.app import app\n"
        "app(['list', 'relays'], standalone_mode=False); print(len(vars(sys.modules['torch'])) < 20)\n"
        "app(['run', 'start', '--set', 'workload.requests=2'], standalone_mode=False)"
    )
    said = printed(program)
    assert "\nTrue\n" in said and "\nstart" in said


@pytest.mark.wide
def test_collections_are_rare_while_a_process_of_the_command_line_imports() -> None:
    program = (
        "import gc; from schedbench.profiles.platform.own_process import between_runs, claim_process, is_frozen\n"
        "claim_process(); before = gc.get_stats()[2]['collections']\n"
        "import torch; print(gc.get_stats()[2]['collections'] - before, is_frozen())\n"
        "between_runs(); imported = gc.get_freeze_count(); cycle = []; cycle.append(cycle); del cycle\n"
        "kept = [[] for _ in range(1000)]; collected = gc.get_stats()[2]['collected']\n"
        "between_runs(); print(imported > 100_000, gc.get_freeze_count() >= imported + 1000)\n"
        "print(gc.get_stats()[2]['collected'] > collected, is_frozen())"
    )
    assert printed(program).split() == ["0", "False", "True", "True", "True", "True"]


@pytest.mark.wide
def test_garbage_is_collected_in_the_process_of_a_rank() -> None:
    program = (
        "import gc; from types import SimpleNamespace; from schedbench.profiles.ranks import processes\n"
        "processes.end_with_parent = lambda: None; processes._run_rank = lambda *_: print(gc.isenabled())\n"
        "processes._run_child(None, None, SimpleNamespace(release=int))"
    )
    assert printed(program) == "True\n"

"""Rules of the source tree that no linter checks; ``make check`` checks the layers."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("cli", "profiles", "scenarios", "sched")
# Modules that sched must not import: the wall clock, the environment, processes, measuring.
FORBIDDEN_IN_SCHED = {
    "time",
    "datetime",
    "os",
    "subprocess",
    "threading",
    "nvtx",
    "rich",
    "typer",
    "pydantic",
    "yaml",
}


def modules(room: str) -> Iterator[Path]:
    yield from sorted((ROOT / room).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level names of absolute imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").split(".")[0])
    return names


def functions() -> Iterator[tuple[str, int]]:
    for room in ROOMS:
        for path in modules(room):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    assert node.end_lineno is not None
                    yield f"{path.relative_to(ROOT)}:{node.name}", node.end_lineno - node.lineno + 1


def test_every_package_on_disk_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    on_disk = [
        ".".join(["schedbench", *init.parent.relative_to(ROOT).parts])
        for room in ROOMS
        for init in (ROOT / room).rglob("__init__.py")
        if init.parent.name != "_root"
    ]
    assert sorted(listed) == sorted([*on_disk, "schedbench"])


def test_the_scheduler_imports_no_clock_process_or_measuring_library() -> None:
    offenders = {
        str(path.relative_to(ROOT)): forbidden
        for path in modules("sched")
        if (forbidden := imported(path) & FORBIDDEN_IN_SCHED)
    }
    assert offenders == {}


def test_packages_are_imported_relatively() -> None:
    """Two spellings of one module would be two modules to a type checker; only the root package is absolute."""
    absolute = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in modules(room)
        if "schedbench" in path.read_text() and "schedbench" in imported(path)
    }
    assert absolute <= {"cli/_root/__main__.py", "cli/app.py", "profiles/record/environment.py"}


def test_functions_are_short() -> None:
    found = list(functions())
    lengths = sorted(length for _, length in found)
    too_long = [f"{name} ({length})" for name, length in found if length > 60]
    assert not too_long
    assert lengths[len(lengths) // 2] <= 8
    assert lengths[len(lengths) * 9 // 10] <= 30


def test_readme_names_every_package() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"{room}/" in readme for room in ROOMS)


def defined(path: Path) -> set[str]:
    """Names of a module's functions, classes and methods; methods as ``Class.method``."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


def test_architecture_names_files_and_functions_that_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`([\w/]+\.py)` → `([\w.]+)`", text)
    assert len(named) == text.count(".py` → ") > 0
    missing = [
        f"{file} → {name}"
        for file, name in named
        if not (ROOT / file).is_file() or name not in defined(ROOT / file)
    ]
    assert not missing
    paths = re.findall(r"`((?:cli|profiles|scenarios|sched)/[\w/.]+)`", text)
    assert not [path for path in paths if not (ROOT / path).exists()]

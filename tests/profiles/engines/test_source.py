"""Names and sources of engines: a working tree, a commit, and a wheel; every refusal is one sentence."""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path
from shutil import which

import pytest

from schedbench.profiles.engines.names import (
    EngineError,
    EngineName,
    PackagePlace,
    expanded,
    is_engine,
    parse_engine,
)
from schedbench.profiles.engines.source import EngineSource, opened_source

from .checkouts import checkout, git, write_package
from .conftest import wait_until

PLACE = PackagePlace("toy", "python")
TEXT = "def step():\n    return 1\n"
CHANGED = "def step():\n    return 2\n"


def opened(text: str, wheels: Path = Path()) -> EngineSource:
    """Opens the source; a temporary one is removed from the disk at the end."""
    with opened_source(parse_engine(text), PLACE, wheels=wheels) as source:
        assert (source.path / "toy" / "loop.py").is_file()
    return source


def refusal(text: str, wheels: Path = Path()) -> str:
    with (
        pytest.raises(EngineError) as caught,
        opened_source(parse_engine(text), PLACE, wheels=wheels),
    ):
        pass
    return str(caught.value)


def wheel(folder: Path, version: str, package: str = "toy") -> None:
    with zipfile.ZipFile(folder / f"toy-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{package}/__init__.py", f'__version__ = "{version}"\n')
        file.writestr(f"{package}/loop.py", TEXT)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sglang:../sglang", EngineName("sglang", "../sglang")),
        ("sglang:../sglang@main", EngineName("sglang", "../sglang", "main")),
        ("sglang==0.5.23", EngineName("sglang", version="0.5.23")),
        ("mini-sglang:.", EngineName("mini-sglang", ".")),
        ("my/adapter.py:tree@v1", EngineName("my/adapter.py", "tree", "v1")),
    ],
)
def test_a_name_is_parsed_and_printed_unchanged(text: str, name: EngineName) -> None:
    assert parse_engine(text) == name
    assert str(name) == text
    assert is_engine(text)


@pytest.mark.parametrize(
    "text", ["relay=latest", "overlap=false,page_size=16", "result.json", "sglang", "engine=sglang:x", ""]
)
def test_overrides_and_files_are_not_parsed_as_engines(text: str) -> None:
    assert not is_engine(text)


def test_an_at_sign_in_a_folder_is_no_git_ref(tmp_path: Path) -> None:
    (tmp_path / "a@b").mkdir()
    assert parse_engine(f"toy:{tmp_path}/a@b").ref is None
    assert parse_engine(f"toy:{tmp_path}/a@b@main").ref == "main"


def test_choices_in_braces_are_separate_names() -> None:
    assert expanded("toy:x@{v1, main}") == ["toy:x@v1", "toy:x@main"]
    assert expanded("toy=={1,2}") == ["toy==1", "toy==2"]
    assert expanded("toy:{a,b}@{c,d}") == ["toy:a@c", "toy:a@d", "toy:b@c", "toy:b@d"]
    assert expanded("toy:x") == ("toy:x",)


def test_a_checkout_runs_from_its_working_tree(tmp_path: Path) -> None:
    commit = checkout(tmp_path, TEXT)
    clean = opened(f"toy:{tmp_path}")
    assert (clean.part.commit, clean.part.ref, clean.part.dirty, clean.part.version) == (
        commit,
        "main",
        False,
        "1.0",
    )
    assert clean.path == clean.watched == tmp_path / "python"
    (tmp_path / "README.md").write_text("not of the package")
    assert opened(f"toy:{tmp_path}") == clean
    (tmp_path / "python/toy/loop.py").write_text(CHANGED)
    dirty = opened(f"toy:{tmp_path}")
    assert dirty.part.dirty is True
    assert dirty.part.sha256 != clean.part.sha256
    assert dirty.part.name == "toy"


def test_a_commit_is_taken_from_git_and_not_from_the_working_tree(tmp_path: Path) -> None:
    commit = checkout(tmp_path, TEXT)
    clean = opened(f"toy:{tmp_path}")
    (tmp_path / "python/toy/loop.py").write_text(CHANGED)
    source = opened(f"toy:{tmp_path}@v1")
    assert (source.part.commit, source.part.ref, source.part.dirty) == (commit, "v1", False)
    assert source.part.sha256 == clean.part.sha256
    assert source.watched.name == "python"
    wait_until(lambda: not source.path.exists())


def test_only_the_folder_of_the_package_is_written(tmp_path: Path) -> None:
    """The rest of a repository may have as many files again, which would be removed at the end."""
    checkout(tmp_path, TEXT)
    with opened_source(parse_engine(f"toy:{tmp_path}@v1"), PLACE, wheels=tmp_path) as source:
        assert source.temporary is not None
        assert {path.name for path in source.temporary.iterdir()} == {"python"}


def test_a_bare_repository_has_commits_only(tmp_path: Path) -> None:
    checkout(tmp_path / "work", TEXT)
    git(tmp_path, "clone", "-q", "--bare", "work", "bare.git")
    assert opened(f"toy:{tmp_path}/bare.git@main").part.ref == "main"
    assert "name a commit" in refusal(f"toy:{tmp_path}/bare.git")


def test_a_folder_without_git_has_no_commit(tmp_path: Path) -> None:
    write_package(tmp_path / "toy", TEXT)
    source = opened(f"toy:{tmp_path}")
    assert (source.part.commit, source.part.dirty, source.part.ref) == (None, None, None)
    assert source.watched.name == "python"  # as in a checkout, so that lines have the same names
    assert "no git checkout: leave out @main" in refusal(f"toy:{tmp_path}@main")


def test_a_folder_that_its_repository_ignores_has_no_commit(tmp_path: Path) -> None:
    checkout(tmp_path, TEXT)
    (tmp_path / ".gitignore").write_text("unpacked\n")
    write_package(tmp_path / "unpacked" / "toy", TEXT)
    assert opened(f"toy:{tmp_path}/unpacked").part.commit is None


def test_a_release_is_unpacked_in_the_layout_of_a_checkout(tmp_path: Path) -> None:
    checkout(tmp_path, TEXT)
    wheel(tmp_path, "2.0")
    source = opened("toy==2.0", tmp_path)
    assert (source.part.version, source.part.commit) == ("2.0", None)
    assert source.watched.name == "python"


def test_no_one_waits_for_the_removal_of_what_was_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, allowed = tmp_path / "rm", tmp_path / "allowed"
    remove.write_text(f'#!/bin/sh\nuntil [ -e {allowed} ]; do sleep 0.01; done\nexec {which("rm")} "$@"\n')
    remove.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    wheel(tmp_path, "2.0")
    unpacked = opened("toy==2.0", tmp_path).temporary
    assert unpacked is not None and unpacked.exists()
    allowed.touch()
    wait_until(lambda: not unpacked.exists())


@pytest.mark.parametrize("folder", ["", "python/"], ids=["of the package's folder", "of the checkout"])
def test_a_release_without_a_wheel_is_unpacked_from_its_sdist(tmp_path: Path, folder: str) -> None:
    write_package(tmp_path / "made" / folder / "toy", TEXT)
    with tarfile.open(tmp_path / "toy-2.0.tar.gz", "w:gz") as file:
        file.add(tmp_path / "made", "toy-2.0")
    source = opened("toy==2.0", tmp_path)
    assert (source.part.version, source.watched.name) == ("2.0", "python")
    (tmp_path / "toy-3.0.tar.gz").write_text("<html>")
    assert "toy-3.0.tar.gz is no gz file: fetch it again" in refusal("toy==3.0", tmp_path)


def test_a_project_states_its_version(tmp_path: Path) -> None:
    write_package(tmp_path / "toy", TEXT)
    (tmp_path / "toy/__init__.py").write_text("")
    assert opened(f"toy:{tmp_path}").part.version is None
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "toy"\nversion = "3.1"\n')
    assert opened(f"toy:{tmp_path}").part.version == "3.1"


def test_refusals_give_their_reason(tmp_path: Path) -> None:
    checkout(tmp_path / "work", TEXT)
    (tmp_path / "empty").mkdir()
    assert refusal(f"toy:{tmp_path}/gone").endswith("gone is no folder")
    assert "no python/toy and no toy in that folder" in refusal(f"toy:{tmp_path}/empty")
    assert refusal(f"toy:{tmp_path}/work@gone").endswith("@gone: no such commit, branch or tag")
    with pytest.raises(EngineError, match="is missing after @"):
        parse_engine("toy:work@")
    with pytest.raises(EngineError, match="expected NAME:FOLDER"):
        parse_engine("toy")


def test_a_commit_without_the_package_is_refused(tmp_path: Path) -> None:
    checkout(tmp_path, TEXT)
    git(tmp_path, "rm", "-q", "-r", "python")
    git(tmp_path, "commit", "-q", "-m", "without")
    assert "the commit has no python/toy and no toy" in refusal(f"toy:{tmp_path}@main")


def test_a_missing_release_lists_those_of_the_folder_from_the_nearest_on(tmp_path: Path) -> None:
    for version in ("0.5.4", "0.5.9", "0.5.10.post1", "0.5.12"):
        wheel(tmp_path, version)
    (tmp_path / "toy-0.5.11.tar.gz").touch()
    (tmp_path / "toys-0.5.10-py3-none-any.whl").touch()
    said = refusal("toy==0.5.10", tmp_path)
    assert f"in {tmp_path}, which has 0.5.9, 0.5.10.post1, 0.5.4, 0.5.11, 0.5.12: pip download" in said


def test_a_missing_release_names_the_command_that_fetches_it(tmp_path: Path) -> None:
    assert f"pip download --no-deps toy==9 -d {tmp_path}" in refusal("toy==9", tmp_path)
    wheel(tmp_path, "9", package="other")
    assert refusal("toy==9", tmp_path).endswith("toy-9-py3-none-any.whl has no package toy")
    (tmp_path / "toy-8-py3-none-any.whl").write_text("<html>")
    assert "is no whl file: fetch it again" in refusal("toy==8", tmp_path)


def test_a_shallow_clone_says_how_to_deepen_it(tmp_path: Path) -> None:
    checkout(tmp_path / "work", TEXT)
    (tmp_path / "work/python/toy/loop.py").write_text(CHANGED)
    git(tmp_path / "work", "commit", "-q", "-a", "-m", "second")
    subprocess.run(
        ["git", "clone", "-q", "--depth=1", f"file://{tmp_path}/work", str(tmp_path / "shallow")], check=True
    )
    assert "fetch --unshallow" in refusal(f"toy:{tmp_path}/shallow@v1")

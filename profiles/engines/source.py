"""The source of an engine on disk: a checkout as it stands, a commit of it, or a release from a wheel or an sdist."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..record.environment import run_git
from ..record.provenance import EnginePart
from .names import ADAPTERS, EngineError, EngineName, PackagePlace, require_shipped

_VERSION: Final = re.compile(r"^__version__\s*=(?:\s*version\s*=)?\s*[\"']([^\"']+)[\"']", re.MULTILINE)
_VERSION_FILES: Final = ("version.py", "_version.py", "__init__.py")


class EngineSource(NamedTuple):
    """``path`` goes first on the import path and has the folder ``package``. ``watched`` is the folder whose lines are
    reported, by names relative to its parent. ``part`` is what the labels of a result say of it, without the edge of a
    run. ``temporary`` is removed once the source is no longer used."""

    name: EngineName
    path: Path
    package: str
    watched: Path
    part: EnginePart
    temporary: Path | None = None


@contextmanager
def opened_source(name: EngineName, place: PackagePlace, *, wheels: Path) -> Iterator[EngineSource]:
    """The source, which stays on disk until the block ends. Raises EngineError."""
    in_place = _in_place(name, place) if name.version is None and name.ref is None else None
    if in_place is not None and place.is_in_its_place(in_place.path):
        yield in_place
        return
    with _temporary() as tree:
        if in_place is not None:
            source = in_place
        elif name.version is None:
            source = _exported(name, place, tree)
        else:
            source = _unpacked(name, place, tree, wheels)
        yield _in_its_place(source, place, tree)._replace(temporary=tree)


@contextmanager
def _temporary() -> Iterator[Path]:
    """A folder. A process of its own removes it, because thousands of files take seconds on a busy disk, and Ctrl-C is
    to end the program at once."""
    folder = Path(tempfile.mkdtemp(prefix="schedbench-engine-")).resolve()
    try:
        yield folder
    finally:
        remove = ["sh", "-c", 'rm -rf "$0" &', str(folder)]
        none = subprocess.DEVNULL
        subprocess.run(remove, stdin=none, stdout=none, stderr=none, start_new_session=True, check=False)


def _in_its_place(source: EngineSource, place: PackagePlace, tree: Path) -> EngineSource:
    """The source with its package in the folder that a checkout has it in, so that its lines have the same names."""
    if place.is_in_its_place(source.path):
        return source
    path = tree / place.python_path
    path.mkdir(parents=True)
    (path / place.package).symlink_to(source.path / place.package)
    return source._replace(path=path, watched=path)


def _package_path(name: EngineName, place: PackagePlace) -> Path:
    """What to put on the import path of a folder as it stands. Raises EngineError."""
    tree = _folder(name)
    path = place.inside(tree)
    if path is None:
        bare = run_git(tree, "rev-parse", "--is-bare-repository") == "true"
        raise EngineError(
            f"{name}: a bare repository has no files: name a commit, {name}@REF"
            if bare
            else f"{name}: no {' and no '.join(place.candidates)} in that folder: is it a checkout of the engine?"
        )
    return path


def _in_place(name: EngineName, place: PackagePlace) -> EngineSource:
    path = _package_path(name, place)
    if not run_git(path, "ls-files", "--", f"{place.package}/*.py"):
        return _source(name, place, path)
    return _source(
        name,
        place,
        path,
        ref=run_git(path, "symbolic-ref", "--short", "--quiet", "HEAD"),
        commit=run_git(path, "rev-parse", "HEAD"),
        dirty=bool(run_git(path, "status", "--porcelain", "--", place.package)),
    )


def _exported(name: EngineName, place: PackagePlace, tree: Path) -> EngineSource:
    """The files of a commit, written into ``tree``."""
    repository, commit = _commit(name)
    listed = [at for at in place.candidates if run_git(repository, "ls-tree", commit, at)]
    if not listed:
        raise EngineError(f"{name}: the commit has no {' and no '.join(place.candidates)}")
    _archive(name, repository, commit, listed[0].removesuffix(place.package) or ".", tree)
    path = place.inside(tree)
    if path is None:
        raise EngineError(f"{name}: {listed[0]} of the commit has no Python files")
    return _source(name, place, path, ref=name.ref, commit=commit, dirty=False)


def _commit(name: EngineName) -> tuple[Path, str]:
    """The repository and the full name of the commit. Raises EngineError."""
    repository = _folder(name)
    if run_git(repository, "rev-parse", "--git-dir") is None:
        raise EngineError(
            f"{name}: {name.tree} is no git checkout: leave out @{name.ref} to run it as it stands"
        )
    repository = Path(run_git(repository, "rev-parse", "--show-toplevel") or repository)
    commit = run_git(
        repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name.ref}^{{commit}}"
    )
    if commit is None:
        raise EngineError(f"{name}: no such commit, branch or tag{_shallow(repository)}")
    return repository, commit


def _archive(name: EngineName, repository: Path, commit: str, folder: str, tree: Path) -> None:
    command = ["git", "-C", str(repository), "archive", "--format=tar", commit, "--", folder]
    with tempfile.TemporaryFile() as file:
        git = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, check=False)
        if git.returncode:
            reason = git.stderr.decode(errors="replace").strip()
            raise EngineError(f"{name}: git archive: {reason}{_shallow(repository)}")
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(tree, filter="data")


def _shallow(repository: Path) -> str:
    """What to do about a commit that a shallow clone does not have."""
    if run_git(repository, "rev-parse", "--is-shallow-repository") != "true":
        return ""
    return f"; the clone is shallow: git -C {repository} fetch --unshallow --tags"


def _unpacked(name: EngineName, place: PackagePlace, tree: Path, wheels: Path) -> EngineSource:
    """The files of a wheel, or else of an sdist, where a checkout would have them, so that source lines have the same
    names."""
    file = _release(name, name.adapter if Path(name.adapter).suffix != ".py" else place.package, wheels)
    try:
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(tree / place.python_path)
        else:
            tree = _sdist(file, place, tree)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError):
        raise EngineError(f"{name}: {file} is no {file.suffix[1:]} file: fetch it again") from None
    path = place.inside(tree)
    if path is None:
        raise EngineError(f"{name}: {file.name} has no package {place.package}")
    return _source(name, place, path)


def _release(name: EngineName, project: str, wheels: Path) -> Path:
    """The project's wheel, or else its sdist. Raises EngineError."""
    release = f"{re.sub(r'[-_.]+', '_', project)}-{name.version}"
    names = f"{release}-*.whl", f"{release}.tar.gz"
    folder = wheels.expanduser()
    if not folder.is_dir():
        raise EngineError(f"{name}: --engine-wheels: {wheels} is no folder")
    found = [file for pattern in names for file in sorted(folder.glob(pattern))]
    if not found:
        raise EngineError(
            f"{name}: no {' and no '.join(names)} in {wheels}{_others(release, folder)}: "
            f"pip download --no-deps {project}=={name.version} -d {wheels}, or --engine-wheels DIR"
        )
    return found[0]


def _others(release: str, wheels: Path) -> str:
    """The releases that the folder has instead of that one, the nearest first."""
    project, _, asked = release.partition("-")
    files = re.compile(rf"{re.escape(project)}-([^-]+)(?:-.*\.whl|\.tar\.gz)")
    names = filter(None, (files.fullmatch(file.name) for file in wheels.glob("*")))
    ordered = sorted({asked, *(found[1] for found in names)}, key=_numbers)
    at = ordered.index(asked)
    near = sorted(ordered, key=lambda version: abs(ordered.index(version) - at))[1:]
    return f", which has {', '.join(near)}" if near else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _sdist(file: Path, place: PackagePlace, tree: Path) -> Path:
    """Unpack the file into ``tree``. Returns the folder that stands for a checkout: that of the sdist, or ``tree``
    where the sdist is of the folder that a checkout has the package in."""
    with tarfile.open(file) as archive:
        archive.extractall(tree, filter="data")
    top = next((folder for folder in tree.iterdir() if folder.is_dir()), tree)
    if place.inside(top) != top:
        return top
    top.rename(tree / place.python_path)
    return tree


def require_there(name: EngineName) -> None:
    """Refuse an adapter or a folder that does not exist before an engine's process begins. Raises EngineError."""
    if Path(name.adapter).suffix != ".py":
        require_shipped(name.adapter)
    if name.version is None:
        _folder(name)


def require_source(name: EngineName, wheels: Path) -> None:
    """Refuse a commit, a release or a package that is not there, before any engine's process begins; releases and
    packages of shipped adapters alone. Raises EngineError."""
    if name.ref is not None:
        _commit(name)
    elif name.adapter in ADAPTERS and name.version is not None:
        _release(name, name.adapter, wheels)
    elif name.adapter in ADAPTERS:
        _package_path(name, ADAPTERS[name.adapter])


def _folder(name: EngineName) -> Path:
    folder = Path(name.tree).expanduser().resolve()
    if not folder.is_dir():
        hint = "; the keys of one engine are given by --set" if "," in name.tree else ""
        raise EngineError(f"{name}: {name.tree} is no folder{hint}")
    return folder


def _source(name: EngineName, place: PackagePlace, path: Path, **tracked: Any) -> EngineSource:
    """``tracked``: what a repository knows of it."""
    package = path / place.package
    part = EnginePart(
        name=Path(name.adapter).stem,
        version=name.version or _version(package),
        sha256=_digest(package),
        **tracked,
    )
    return EngineSource(
        name, path, place.package, watched=path if Path(place.python_path).name else package, part=part
    )


def _digest(package: Path) -> str:
    """Of the names and the contents of the package's Python files."""
    running = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        content = file.read_bytes()
        running.update(f"{file.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        running.update(content)
    return running.hexdigest()


def _version(package: Path) -> str | None:
    """The version that the package or its project states, if it does."""
    for file in _VERSION_FILES:
        with suppress(OSError):
            found = _VERSION.search((package / file).read_text(encoding="utf-8", errors="replace"))
            if found is not None:
                return found[1]
    with suppress(OSError, tomllib.TOMLDecodeError):
        project = tomllib.loads((package.parent / "pyproject.toml").read_text(encoding="utf-8"))
        version = project.get("project", {}).get("version")
        return version if isinstance(version, str) else None
    return None

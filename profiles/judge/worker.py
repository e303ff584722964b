"""A side whose runs happen in a worker process, which may run other sources; and that process, which reads requests
from stdin and writes samples to stdout, as one line of JSON each.

It is started as ``python -m schedbench.profiles.judge.worker`` with the sources of the checkout to run. A scenario that
cannot run on this machine is answered with the reason; any other error ends the process with a traceback on stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, TextIO

from ...scenarios.problems import ScenarioError, meant
from ...scenarios.records import TraceError
from ..platform.machine import MachineError
from ..platform.own_process import claim_process
from ..platform.pool import MapFunction
from ..record.environment import run_git
from ..record.result import Result
from .draws import HARDWARE, Profiles
from .trials import Question, Sample, Side, TrialRequest

_TAIL: Final = 60  # lines of a crash that are shown
_GRACE_S: Final = 5.0
SOURCES: Final = ".typing"  # the folder of a checkout that has the package under its own name


class SideError(ValueError):
    """A side is invalid, or cannot run the question."""


class CrashError(RuntimeError):
    """The worker of a side ended without a response."""

    def __init__(self, label: str, stderr: str) -> None:
        shown = stderr.rstrip().splitlines()[-_TAIL:] or ["(stderr is empty)"]
        super().__init__("\n".join([f"{label} crashed: {shown[-1]}", *shown]))


@dataclass(frozen=True, slots=True)
class WorkerSide(Side):
    """A side in a worker process, which is never spread. ``order`` is what all of its runs have in common."""

    question: Question
    order: TrialRequest
    process: subprocess.Popen[str]
    stderr: IO[str]

    def run(self, seed: int | None) -> Sample:
        """Raises CrashError, SideError, MachineError."""
        return Sample.of(self._request(seed), name=self.label)

    def recorded(self, seed: int | None, folder: Path) -> tuple[Result, Path]:
        """Raises what ``run`` raises; CrashError for a version from before this request."""
        return replace(self, order=replace(self.order, record=str(folder))).run(seed).result, folder

    def run_each(self, known: Result, profiles: Profiles, each: MapFunction) -> Iterator[Result]:  # noqa: ARG002
        """One after the other, in the side's own process, from files that ``device.hardware`` can name. Raises what
        ``run`` raises; a version from before the draws refuses the files."""
        with tempfile.TemporaryDirectory(prefix="schedbench-draws-") as folder:
            for number, profile in enumerate(profiles):
                path = Path(folder) / f"{profile.name}-{number}.yaml"
                path.write_text(profile.as_file(), encoding="utf-8")
                order = replace(self.order, overrides=(*self.order.overrides, f"{HARDWARE}={path}"))
                try:
                    yield replace(self, order=order).run(known.scenario.seed).result
                except SideError as error:
                    raise SideError(
                        "this side ran with its own hardware profile, and refuses one whose constants are drawn from "
                        f"their ranges: compare it with --draws 0\n{error}"
                    ) from None

    def margin(self, seed: int, request: str, position: int) -> float | None:
        """Raises what ``run`` raises."""
        found: float | None = self._request(seed, margin=[request, position])["margin"]
        return found

    def _request(self, seed: int | None, **more: Any) -> dict[str, Any]:
        order = asdict(replace(self.order, seed=seed))
        for field in ("engine", "record"):
            if not order[field]:  # maybe of a version without the field
                del order[field]
        request = json.dumps({"question": asdict(self.question), "order": order, **more})
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(f"{request}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._crashed() from None
        line = self.process.stdout.readline()
        if not line:
            raise self._crashed()
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            error = MachineError if answer["unable"] else SideError
            raise error(f"{self.label}: {answer['refused']}")
        return answer

    def _crashed(self) -> CrashError:
        self.process.wait()
        self.stderr.seek(0)
        return CrashError(self.label, self.stderr.read())


def command() -> list[str]:
    return [sys.executable, "-P", "-m", "schedbench.profiles.judge.worker"]


@contextmanager
def working(
    label: str, question: Question, order: TrialRequest, *, sources: Path, program: Sequence[str] = ()
) -> Iterator[WorkerSide]:
    """A worker that runs the package found in the folder ``sources``, with this environment's packages."""
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        process = subprocess.Popen(
            [*(program or command())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        try:
            yield WorkerSide(label, question, order, process, stderr)
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Closes the input of the worker, which ends an idle one, and kills it after a grace period."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def here() -> Path:
    """The checkout of schedbench that the current directory is in; outside of any repository, the one that this program
    runs from. Raises SideError where it is neither."""
    around = [folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / ".git").exists()]
    folder = around[0] if around else Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        raise SideError("git:REF needs a checkout of schedbench: run it in one")
    if not (folder / SOURCES / "schedbench").exists():
        engine = "a branch of an engine is a side of --a sglang:FOLDER@REF"
        raise SideError(f"git:REF: {folder} is not a checkout of schedbench; {engine}")
    return folder


def commit_of(root: Path, ref: str) -> str:
    """The commit that ``ref`` names in the checkout. Raises SideError, with the most similar branch or tag."""
    found = run_git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if not found:
        sides = [f"git:{name}" for name in refs(root)]
        raise SideError(
            f"git:{ref}: no such commit, branch or tag of schedbench in {root}{meant(f'git:{ref}', sides)}"
        )
    return found


def refs(root: Path) -> list[str]:
    """The branches and tags of the checkout."""
    return (run_git(root, "for-each-ref", "--format=%(refname:short)") or "").split()


@contextmanager
def worktree(root: Path, ref: str) -> Iterator[Path]:
    """A folder with the sources of ``ref``. Raises SideError when there is no such commit."""
    commit = commit_of(root, ref)
    with tempfile.TemporaryDirectory(prefix="schedbench-") as folder:
        tree = Path(folder) / "checkout"
        try:
            add = ["git", "-C", str(root), "worktree", "add", "--detach", str(tree), commit]
            added = subprocess.run(add, capture_output=True, text=True, check=False)
            if added.returncode:
                raise SideError(f"git:{ref}: {added.stderr.strip()}")
            yield tree
        finally:
            run_git(root, "worktree", "remove", "--force", str(tree))
            run_git(root, "worktree", "prune")


def serve(lines: Iterable[str], out: TextIO) -> None:
    for line in lines:
        out.write(json.dumps(_answer(json.loads(line))) + "\n")
        out.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from ...sched.model.checkpoint import CheckpointError
    from .local import margin, run_trial

    question = Question(**{**request["question"], "overrides": tuple(request["question"]["overrides"])})
    order = TrialRequest(**{**request["order"], "overrides": tuple(request["order"]["overrides"])})
    try:
        if "margin" in request:
            return {"margin": margin(question, order, *request["margin"])}
        return run_trial(question, order).document()
    except (ScenarioError, TraceError, CheckpointError, MachineError) as error:
        return {"refused": str(error), "unable": isinstance(error, MachineError)}


def _main() -> None:
    """Reserves stdout for the responses; everything else that is printed goes to stderr."""
    claim_process()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin, out)


if __name__ == "__main__":
    _main()

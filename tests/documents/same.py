"""Compare the result documents of the shipped scenarios between this tree and an earlier commit.

    python tests/documents/same.py --base REF [--only NAME ...] [--renamed OLD=NEW ...]

A refactoring must not change what a run says. Every key, number, digest and token has to be equal. What may differ is
what describes the run or the source rather than the schedule: the ``run``, ``environment`` and ``tool`` sections, the
wording of reasons, and where a source line stands and how it reads (its counts, bytes and times may not). Exits with 1
when a document differs, and lists every difference by its key.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from schedbench.profiles.judge.worker import commit_of, worktree

ROOT: Final = Path(__file__).resolve().parents[2]
NOT_OF_THE_SCHEDULE: Final = {"run", "environment", "tool"}
WORDING: Final = {"abstained", "reason", "missing", "untested", "about", "conclusion"}
SITE: Final = {"file", "line", "function", "statement"}
UNORDERED: Final = {"copies", "syncs", "findings", "ordering"}  # listed by source line, which may move


FORM: Final = ("--device", "vgpu", "--save-tokens", "--format", "json")
NEEDS_A_FILE: Final = {"checkpoint", "trace_mooncake"}  # of the user's; nothing runs without it

Question = tuple[str, ...]  # a scenario and options of ``schedbench run``
VARIANTS: Final[tuple[Question, ...]] = (
    ("mixed", "--relay", "latest", "--hazards", "on"),
    ("mixed", "--relay", "pr25774-before", "--hazards", "on"),
    ("mixed", "--set", "engine.overlap=false"),
    ("mixed", "--adversarial", "3"),
    ("penalties", "--hazards", "on"),
    ("spec_v1", "--hazards", "on"),
    ("spec_v2", "--relay", "latest", "--hazards", "on"),
    ("hisparse", "--set", "workload.requests=8", "--hazards", "on"),
    ("pp2", "--set", "workload.requests=16", "--hazards", "on"),
    ("disagg", "--set", "workload.requests=16", "--hazards", "on"),
    ("mixed", "--set", "engine.replicas=2"),
)


def questions(tree: Path, only: Sequence[str]) -> list[Question]:
    """Return the shipped scenarios of that tree, the scenarios of known bugs, and some of them with options."""
    folder = tree / "scenarios"
    names = [p.relative_to(folder).with_suffix("").as_posix() for p in sorted(folder.glob("*.yaml"))]
    names += [p.relative_to(folder).with_suffix("").as_posix() for p in sorted(folder.glob("faults/*.yaml"))]
    asked = [(name,) for name in names if name not in NEEDS_A_FILE] + list(VARIANTS)
    return [question for question in asked if not only or question[0] in only]


def document(tree: Path, question: Question, kept: Path | None) -> Any:
    """Return the JSON that ``run`` prints in that tree; exit code 1 (a broken budget) has a document, too."""
    file = kept / ("_".join(question).replace("/", "_") + ".json") if kept else None
    if file is not None and file.exists():
        return json.loads(file.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "schedbench", "run", *question, *FORM],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / ".typing")},
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(
            f"{' '.join(question)} in {tree} exited with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(done.stdout)
    return json.loads(done.stdout)


def comparable(value: Any, renamed: dict[str, str], key: str = "") -> Any:
    """Return the document without what may differ; rows of source lines are sorted by what they count."""
    if isinstance(value, dict):
        dropped = NOT_OF_THE_SCHEDULE | WORDING | (SITE if key in ("site", "sites") else set())
        kept = {name: comparable(item, renamed, name) for name, item in value.items() if name not in dropped}
        return kept | {name: bool(value[name]) for name in WORDING & value.keys()}
    if isinstance(value, list):
        items = [comparable(item, renamed, key) for item in value]
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True)) if key in UNORDERED else items
    return renamed.get(value, value) if isinstance(value, str) else value


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Yield the keys at which two documents differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from differences(a.get(key, "(absent)"), b.get(key, "(absent)"), f"{path}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for place, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from differences(left, right, f"{path}[{place}]")
    elif a != b:
        yield f"{path}: {json.dumps(a)[:120]} became {json.dumps(b)[:120]}"


def report(
    question: Question, base: Path, kept: Path | None, renamed: dict[str, str]
) -> tuple[Question, list[str]]:
    before, after = document(base, question, kept), document(ROOT, question, None)
    return question, list(differences(comparable(before, renamed), comparable(after, {})))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", required=True, metavar="REF", help="the commit to compare with")
    parser.add_argument(
        "--only", nargs="*", action="extend", default=[], metavar="NAME", help="these scenarios alone"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep and reuse the base's documents here")
    parser.add_argument(
        "--renamed",
        nargs="*",
        default=[],
        metavar="OLD=NEW",
        help="names of policies that were renamed since",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args(arguments)
    different = 0
    renamed = dict(pair.split("=") for pair in given.renamed)
    kept = given.keep / commit_of(ROOT, given.base) if given.keep else None
    with worktree(ROOT, given.base) as base, ThreadPoolExecutor(given.jobs) as pool:
        asked = questions(base, given.only)
        for question, found in pool.map(lambda q: report(q, base, kept, renamed), asked):
            different += bool(found)
            print(f"{'differs' if found else 'equal  '}  {' '.join(question)}", flush=True)
            print("".join(f"    {line}\n" for line in found[:20]), end="")
    print(f"{len(asked)} documents, {different} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

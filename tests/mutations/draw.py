"""Removes places that order streams or keep memory allocated, one at a time, drawn at random, and records what
``check`` finds.

python tests/mutations/draw.py --seed 1 --count 16 [--out FILE] [--only FILE:LINE ...]

Works on a copy of the tree; takes minutes. Prints a Markdown table; a place that no probe executes is not drawn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from places import PLAIN, Place, places

from schedbench.cli.errors import WORKLOAD_FAILED

ROOT = Path(__file__).resolve().parents[2]
COPIED = (".typing", "cli", "profiles", "scenarios", "sched")
_LINE = re.compile(r"(\.py):\d+")  # line numbers change, and the table is kept longer
SECONDS = 240  # a check that takes longer is taken to hang
ONE, ALL = ("--adversarial", "0"), ("--seeds", "0")

_OVERLAPPED = ("engine.overlap=true",)
_FEW = (
    "workload.requests=10",
    "workload.arrival=burst",
    "engine.max_running_requests=4",
    "workload.prompt_tokens={dist: uniform, min: 16, max: 80}",
    "workload.output_tokens={dist: uniform, min: 4, max: 20}",
)
# By name: a scenario and its overrides.
_WORKLOADS: dict[str, tuple[str, tuple[str, ...]]] = {
    "faults/mixing": ("faults/mixing", _OVERLAPPED),
    "faults/joining": ("faults/joining", _OVERLAPPED),
    "penalties": ("penalties", (*_OVERLAPPED, *_FEW)),
    "grammar": ("grammar", (*_OVERLAPPED, *_FEW)),
    "spec_v1": ("spec_v1", _FEW),
    "spec_v2": ("spec_v2", _FEW),
    "spec_grammar": ("spec_grammar", _FEW),
    "hosting": ("faults/hosting", _OVERLAPPED),
    "parting": ("faults/parting", _OVERLAPPED),
    "parting, small pool": (
        "faults/parting",
        (*_OVERLAPPED, "engine.kv_tokens=256", "workload.output_tokens=60"),
    ),
    "parting, a worker dies": (
        "faults/parting",
        (*_OVERLAPPED, "faults=[{rank: prefill 0, dies: {phase: transfer, nth: 6}}]"),
    ),
    "parting, a message is lost": (
        "faults/parting",
        (*_OVERLAPPED, "faults=[{link: [prefill 0, decode 0], tag: kv, does: drop, nth: 3}]"),
    ),
    "staging": ("faults/staging", ()),
    "staging, chunks without output": (
        "faults/staging",
        ("engine.pipeline={stages: 2, skip_chunk_outputs: true}",),
    ),
    "staging, four stages": ("faults/staging", ("model.preset=tiny-deep", "engine.pipeline={stages: 4}")),
    "disagg_spec": ("disagg_spec", _FEW),
    "disagg_spec, simulated": ("disagg_spec", (*_FEW, "engine.speculative.acceptance={mean: 2.0}")),
    "disagg_hisparse": ("disagg_hisparse", _FEW),
}
_RELAYS = ("latest", "pr25945", "pr26425")
_MODES = tuple(_WORKLOADS)[4:]  # all modes except the plain loops


class Probe(NamedTuple):
    workload: str
    relay: str

    def __str__(self) -> str:
        return f"{self.workload} {self.relay}"

    @property
    def arguments(self) -> list[str]:
        scenario, settings = _WORKLOADS[self.workload]
        return [scenario, "--relay", self.relay, *(part for s in settings for part in ("--set", s))]


# The other states run what distinguishes them: the plain loops, and lengths under speculation. Last, what only an older
# state's worker or a switch comes through.
PROBES = [
    *(
        Probe(workload, relay)
        for relay in _RELAYS
        for workload in _WORKLOADS
        if relay == "latest" or workload in (*tuple(_WORKLOADS)[:4], "spec_v2", "hosting")
    ),
    Probe("faults/mixing", "{state: pr26425, barrier: read-done}"),
    Probe("faults/mixing", "{state: latest, barrier: after-launch}"),
    Probe("spec_v2", "pr25774"),
    Probe("disagg_spec", "pr25774"),
    Probe("disagg_spec", "pr26425"),
]


@dataclass(frozen=True, slots=True)
class Judgement:
    """``caught`` has the first evidence of each check that failed, and is empty where all passed; ``probes`` are those
    that ran."""

    place: Place
    probes: tuple[str, ...]
    caught: dict[str, str]
    seconds: float


class Tree:
    """A copy of the repository in which places can be removed."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self._sound: set[Probe] = set()
        for name in COPIED:
            shutil.copytree(
                root / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(folder / ".typing"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs Python in the tree. Raises TimeoutExpired. Safe paths are on, because the tree's root would make
        ``sched`` another module."""
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def reached(self, probe: Probe) -> set[str]:
        """Returns the lines of sched/ that a run of the probe executes."""
        out = self.folder / "reached.json"
        script = str(Path(__file__).with_name("reach.py"))
        done = self.python(script, str(self.folder), str(out), "run", "--device", "vgpu", *probe.arguments)
        if done.returncode not in (0, WORKLOAD_FAILED):  # requests may fail by the probe's own script
            raise SystemExit(f"{probe} does not run as it is: {done.stderr[-2000:]}")
        return set(json.loads(out.read_text()))

    def check(self, probe: Probe, *adversaries: str) -> dict[str, str]:
        """Returns the checks that failed, with the first evidence of each."""
        asked = ["-m", "schedbench", "check", *probe.arguments, *adversaries, "--format", "json"]
        try:
            done = self.python(*asked)
        except subprocess.TimeoutExpired:
            return {"run": f"does not end within {SECONDS} s"}
        if not done.stdout:  # it failed outside of all checks
            return {"start": (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]}
        (report,) = json.loads(done.stdout)["reports"]
        return {check["name"]: _said(check) for check in report["checks"] if check["verdict"] == "failed"}

    def judge(self, place: Place, probes: Sequence[Probe]) -> Judgement:
        """Returns the judgement of the first probe that finds the mutation."""
        for probe in probes:
            self._require_sound(probe)
        begin = time.perf_counter()
        path = self.folder / place.file
        sound = path.read_bytes()
        asked: list[str] = []
        caught: dict[str, str] = {}
        path.write_bytes(place.mutated(sound))
        try:
            # Most mutants fail under one adversary, so the others run last.
            for adversaries, probe in (*((ONE, probe) for probe in probes), (ALL, probes[0])):
                asked.append(str(probe))
                caught = self.check(probe, *adversaries)
                if caught:
                    break
        finally:
            path.write_bytes(sound)
        return Judgement(place, tuple(asked), caught, time.perf_counter() - begin)

    def _require_sound(self, probe: Probe) -> None:
        """Raises if a check fails without a mutation, which would prove nothing."""
        if probe not in self._sound:
            failed = self.check(probe, *ALL)
            if failed:
                raise SystemExit(f"{probe} fails as it is: {failed}")
            self._sound.add(probe)


def _said(check: dict[str, Any]) -> str:
    evidence = check["evidence"][0]
    more = f" (and {len(check['evidence']) - 1} more)" if len(check["evidence"]) > 1 else ""
    return f"{evidence['says']}{more}"


def comes_through(place: Place, lines: set[str]) -> bool:
    return any(f"{place.file}:{line}" in lines for line in range(place.first, place.last + 1))


def asked_of(place: Place, reached: dict[Probe, set[str]]) -> list[Probe]:
    """Returns the probes that can find a mutation of this place."""
    return [probe for probe in PROBES if comes_through(place, reached[probe])]


def of_modes(place: Place, reached: dict[Probe, set[str]]) -> bool:
    """Whether only probes of modes execute the place."""
    return all(probe.workload in _MODES for probe in asked_of(place, reached))


def table(judgements: Sequence[Judgement]) -> Iterator[str]:
    yield "| place | taken away | caught by | what the first says |"
    yield "|---|---|---|---|"
    for found in judgements:
        place, probe = found.place, found.probes[-1]
        where = f"`{place.file}` {place.function}"
        change = f"{place.kind}: `{_short(place.was, 90)}` → `{_short(place.becomes, 60)}`"
        names = f"{', '.join(found.caught)} ({probe})" if found.caught else "**nothing**"
        says = _LINE.sub(r"\1", next(iter(found.caught.values()), f"all passed: {', '.join(found.probes)}"))
        yield f"| {where} | {change} | {names} | {_short(says, 240)} |"


def _short(text: str, most: int) -> str:
    """On one line, and without a cell's end."""
    line = " ".join(text.replace("|", "/").split()).replace(PLAIN, "nullcontext()")
    return line if len(line) <= most else f"{line[: most - 1]}…"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="FILE:LINE", help="these first, then the draw"
    )
    parser.add_argument("--out", type=Path, help="a JSON document, too")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to take places away from")
    parser.add_argument(
        "--modes", action="store_true", help="only places that the plain loops do not come through"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(given.root, Path(folder))
        tree.python("-m", "compileall", "-q", ".")
        _tell("which places do the probes come through?")
        reached = {probe: tree.reached(probe) for probe in PROBES}
        there = places(given.root)
        candidates = [place for place in there if asked_of(place, reached)]
        _tell("no probe comes through:", *(place for place in there if place not in candidates))
        named = [place for place in candidates if f"{place.file}:{place.line}" in given.only]
        if given.modes:
            candidates = [place for place in candidates if of_modes(place, reached)]
        drawn = random.Random(given.seed).sample(candidates, min(given.count, len(candidates)))
        print(f"{len(there)} places, {len(candidates)} reached, {len(drawn)} drawn with seed {given.seed}")
        judgements = [
            _judged(tree, place, asked_of(place, reached)) for place in dict.fromkeys([*named, *drawn])
        ]
    print("\n".join(table(judgements)))
    if given.out:
        given.out.write_text(json.dumps([asdict(judgement) for judgement in judgements], indent=1))


def _judged(tree: Tree, place: Place, probes: Sequence[Probe]) -> Judgement:
    found = tree.judge(place, probes)
    _tell(f"{place}\n    {found.caught or 'NOT CAUGHT'} ({found.probes[-1]}, {found.seconds:.0f} s)")
    return found


def _tell(*said: object) -> None:
    print(*said, sep="\n    ", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

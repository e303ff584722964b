"""Digests of the files that a scenario reads: its trace, the file of its relay, and the configuration and weights of
its checkpoints.

A trace, a tokenizer, a configuration and an index are digested whole. Of a weight file larger than ``WHOLE_BYTES`` the
size and ``BLOCKS`` evenly spaced blocks are digested, the first and the last among them.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

from ...scenarios.traces import TOKENIZER, tokenizer_file
from ...sched.model.checkpoint import INDEX, WHOLE
from ..record.provenance import InputPart, ScenarioPart
from .resolve import Resolved
from .user_files import UserState

WHOLE_BYTES: Final = 64 * 2**20
BLOCKS: Final = 64
BLOCK_BYTES: Final = 2**18


def scenario_part(resolved: Resolved) -> ScenarioPart:
    """The scenario as documents name it, with the files as they are now."""
    scenario = resolved.scenario
    return ScenarioPart(expanded=scenario.expanded(), sha256=scenario.sha256, inputs=inputs(resolved))


def inputs(resolved: Resolved) -> tuple[InputPart, ...]:
    """The files that a run of the scenario reads. What cannot be read, or is no regular file, is left out: a pipe would
    be consumed, and the run itself reports a missing file."""
    scenario, found = resolved.scenario, list[InputPart]()
    if (trace := scenario.file("workload", "trace")) is not None:
        found += _file("workload.trace", str(scenario.workload.trace), trace)
    if (tokenizer := tokenizer_file(scenario)) is not None:
        found += _file("model.path", f"{scenario.model.path}/{TOKENIZER}", tokenizer)
    for relay in resolved.relays:
        if isinstance(relay.state, UserState):
            found += _file("engine.relay", relay.state.file.name, relay.state.file)
    checkpoints = [("model.path", scenario.model.path, resolved.checkpoint)]
    if resolved.draft is not None:
        draft = scenario.engine.speculative.draft
        checkpoints.append(("engine.speculative.draft", draft, resolved.draft_checkpoint))
    for key, written, folder in checkpoints:
        if folder is not None:
            for name in _files_of(folder, weights=scenario.device.values == "real"):
                whole = name in ("config.json", INDEX)
                found += _file(key, f"{written}/{name}", folder / name, whole=whole)
    return tuple(found)


def _files_of(folder: Path, *, weights: bool) -> Sequence[str]:
    """The names of a checkpoint's files that are read."""
    if not weights:
        return ["config.json"]
    if (folder / WHOLE).exists():
        return ["config.json", WHOLE]
    return ["config.json", INDEX, *_shards(folder / INDEX)]


def _shards(index: Path) -> list[str]:
    """The weight files of an index; none of an invalid one, which the run reports."""
    try:
        return sorted({str(shard) for shard in json.loads(index.read_bytes())["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def _file(key: str, written: str, path: Path, *, whole: bool = True) -> Iterator[InputPart]:
    try:
        found = path.stat()
        if stat.S_ISREG(found.st_mode):
            version = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
            yield InputPart(key=key, file=written, sha256=_digest(path.resolve(), version, whole=whole))
    except (OSError, ValueError):
        return


@lru_cache(maxsize=256)
def _digest(path: Path, version: tuple[int, ...], *, whole: bool) -> str:
    """``version`` is the file system's metadata of the content; the digest is made again when it changes."""
    size = version[0]
    with path.open("rb") as file:
        if whole or size <= WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        running = hashlib.sha256(str(size).encode())
        for block in range(BLOCKS):
            file.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1))
            running.update(file.read(BLOCK_BYTES))
        return running.hexdigest()

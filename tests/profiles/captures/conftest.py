"""Captures written to disk, and the results that are read from them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from schedbench.profiles.captures.files import Reader
from schedbench.profiles.record.result import Result
from tests.profiles.captures.exports import Export
from tests.profiles.cuda.conftest import Trace

Read = Callable[..., Result]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Writes an export or a trace, and reads it as a user's file."""

    def reading(drawn: Export | Trace, meaning: str | None = None, without: tuple[str, ...] = ()) -> Result:
        if isinstance(drawn, Export):
            return Reader(meaning).read(drawn.write(tmp_path / "made-up.sqlite", without=without))
        path = tmp_path / "made-up.json.gz"
        path.write_bytes(gzip.compress(json.dumps(drawn.document()).encode()))
        return Reader(meaning).read(path)

    return reading

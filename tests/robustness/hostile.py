"""Invalid values and texts, derived from valid ones, and the required behaviour on reading them."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

PATIENCE_S = 10.0
LONGER = 30  # times the examples, for one round of ``make fuzz``
FUZZED = [
    pytest.mark.usefixtures("little_memory"),
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]
T = TypeVar("T", bound=Callable[..., object])

NUMBERS = (0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**15, 10**400, 0.5, -0.0, 5e-324, 1e308)
WORDS = (
    "",
    "x",
    "off",
    "null",
    "-",
    "=",
    "../..",
    "/dev/zero",
    "\0",
    "\x1b[31m",
    "\u202e",
    "\ud800",
    "a" * 5000,
)
CONTAINERS = ([], {}, [[]], [None], {"": {"": {}}}, {"dist": "uniform"}, {"process": 1})
VALUES = st.sampled_from(
    (None, True, False, math.inf, -math.inf, math.nan, *NUMBERS, *WORDS, *CONTAINERS)
) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


class HangError(Exception):
    """The operation took longer than allowed."""


def rounds(examples: int) -> Callable[[T], T]:
    """Sets the number of examples of a property: fixed examples in the suite, new ones in every ``make fuzz``."""
    fuzzing = settings.get_current_profile_name() == "fuzz"
    return settings(
        max_examples=examples * (LONGER if fuzzing else 1),
        derandomize=not fuzzing,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def replaced(file: Path, kind: str) -> None:
    """Puts in the place of a file a pipe, which has no writer, so that a reader waits forever; a folder; a link to
    itself (``loop``); nothing (``nowhere``); or a link to ``kind``."""
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind != "nowhere":
        file.symlink_to(file.name if kind == "loop" else kind)


@contextmanager
def time_limit(seconds: float = PATIENCE_S) -> Iterator[None]:
    """Raises HangError if the body takes longer than ``seconds``."""

    def give_up(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise HangError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def refuses_cleanly(*errors: type[Exception], longest: int = 1000) -> Iterator[None]:
    """The body reads hostile input. It succeeds or raises one of ``errors``, soon and with sentences of fewer than
    ``longest`` letters."""
    with time_limit():
        try:
            yield
        except errors as error:
            sentences = re.split("\n|; ", str(error))
            assert all(0 < len(sentence) < longest for sentence in sentences), sentences


@st.composite
def mutated(draw: st.DrawFn, document: Any, *, most: int = 4) -> Any:
    """Draws ``document`` with a few values replaced, removed or added."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        places = list(_places(document))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        change = draw(st.sampled_from(("replace", "replace", "drop", "add")))
        if change == "drop":
            del container[key]
        elif change == "add" and isinstance(container, dict):
            container[draw(st.text(max_size=5))] = copy.deepcopy(draw(VALUES))
        else:
            container[key] = copy.deepcopy(draw(VALUES))
    return document


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every container with each of its keys."""
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in list(entries):
        yield value, key
        yield from _places(inner)


@st.composite
def spliced(draw: st.DrawFn, sound: bytes) -> bytes:
    """Draws ``sound`` with bytes overwritten, removed, cut off or inserted at a few places."""
    content = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        noise = draw(
            st.binary(max_size=12) | st.sampled_from((b"9" * 400, b"[" * 2000, b"\xef\xbb\xbf", b"\x00" * 8))
        )
        content[at : at + draw(st.sampled_from((0, 1, len(noise), 40, len(content))))] = noise
    return bytes(content)


def as_json(document: object) -> str:
    """Writes NaN and infinities as Python does, and half surrogate pairs as escapes."""
    return json.dumps(document)

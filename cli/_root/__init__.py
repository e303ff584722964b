"""Measure and judge changes to an LLM inference scheduler.

``run``, ``compare``, ``check``, ``worth`` and ``load`` are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cli.answers import (
        Answer,
        BatchesAnswer,
        CasesAnswer,
        CheckAnswer,
        ComparisonAnswer,
        LadderAnswer,
        RunAnswer,
        SweepAnswer,
        WorthAnswer,
    )
    from .cli.api import check, compare, load, run, worth

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "BatchesAnswer",
    "CasesAnswer",
    "CheckAnswer",
    "ComparisonAnswer",
    "LadderAnswer",
    "RunAnswer",
    "SweepAnswer",
    "WorthAnswer",
    "check",
    "compare",
    "load",
    "run",
    "worth",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .cli import answers, api

    return getattr(answers if name.endswith("Answer") else api, name)

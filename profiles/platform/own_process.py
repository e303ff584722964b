"""Which processes run nothing but this program, and may therefore change torch for good."""

from __future__ import annotations

_claimed = False


def claim_process() -> None:
    """Declare that no other program's code runs in this process. Called where a process begins."""
    global _claimed
    _claimed = True


def is_claimed() -> bool:
    return _claimed

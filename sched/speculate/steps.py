"""One iteration of the loop under speculation is up to three steps, each of its own kind.

Their numbers follow the order in which the device runs them; the batch's own number is the middle one::

    decode      draft   verify    draft extend
    prompt              prefill   draft extend
                n - 1   n         n + 1
"""

from __future__ import annotations

STRIDE = 3
FIRST = 1


def draft_step(step: int) -> int:
    return step - 1


def extend_step(step: int) -> int:
    return step + 1

"""Actions of scripts that the tests of both contracts draw."""

from __future__ import annotations

from hypothesis import strategies as st

from schedbench.profiles.check.contract import DECODE, IDLE, BatchAction
from schedbench.profiles.check.scripted_engine import ROWS


def acts_with(*verbs: str) -> st.SearchStrategy[BatchAction]:
    """Actions of scripts; those of ``verbs`` bring new prompts."""
    counts = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)
    places = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=5).map(tuple)
    return st.one_of(
        st.builds(BatchAction, st.sampled_from(verbs), counts),
        st.builds(BatchAction, st.sampled_from(["leave", "retract"]), places),
        st.builds(BatchAction, st.just("chunks"), st.tuples(st.integers(1, 50))),
        st.just(DECODE),
        st.just(IDLE),
    )

"""Links between processes: an idle peer is alive, and one that does not answer is gone."""

from __future__ import annotations

import pytest

from tests.json_programs import rank_processes


@pytest.mark.wide
def test_an_idle_peer_is_alive_and_a_hanging_one_is_gone() -> None:
    with rank_processes("profiles.ranks.slow_peer_process", 2) as (first, _):
        said, _ = first.communicate(timeout=60)
    word, end = said.splitlines()
    assert word == "late [0, 1, 2]"
    assert end.startswith("the one waited for any of word, and the other is gone: it does not answer")

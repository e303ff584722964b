"""Links between processes: an idle peer is alive, and one that does not answer is gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from schedbench.profiles.ranks.processes import local_addresses

ROOT = Path(__file__).resolve().parents[3]


def test_an_idle_peer_is_alive_and_a_hanging_one_is_gone() -> None:
    talkers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.profiles.ranks.slow_peer_process",
                str(place.rank),
                str(place.port),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for place in local_addresses(2)
    ]
    try:
        said, _ = talkers[0].communicate(timeout=60)
    finally:
        for process in talkers:
            process.kill()
            process.communicate()
    word, end = said.splitlines()
    assert word == "late [0, 1, 2]"
    assert end.startswith("the one waited for any of word, and the other is gone: it does not answer")

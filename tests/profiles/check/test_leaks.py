"""Memory that an engine holds in another run of a check than the watched one, which is judged itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from schedbench.profiles.check import adversaries, tokens
from schedbench.profiles.check.report import Evidence


@pytest.mark.parametrize(("of_watched", "found"), [(None, ["3 rows"]), ("8 rows", [])])
def test_only_a_leak_that_the_watched_run_has_not_fails_other_checks(
    of_watched: str | None, found: list[str]
) -> None:
    def ended(leak: str | None) -> Any:
        return SimpleNamespace(run=SimpleNamespace(leak=leak), requests=(), metrics={}, outputs=None)

    watched, other = ended(of_watched), ended("3 rows")
    assert tokens.alike("overlap", watched, other, "").evidence == tuple(map(Evidence, found))
    says = [evidence.says for evidence in adversaries._differences(0, other, watched)]
    assert says == [f"adversary 0 (all work as late as possible): {leak}" for leak in found]

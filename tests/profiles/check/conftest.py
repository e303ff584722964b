"""Fixtures that the tests of checks share."""

from __future__ import annotations

import pytest

from schedbench.profiles.check import examine


@pytest.fixture
def nothing_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examinations skip the search for unproven waits, which takes runs of its own: test_unproven.py."""
    monkeypatch.setattr(examine, "unproven", lambda *_: [])

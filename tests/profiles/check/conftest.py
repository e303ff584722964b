"""What the tests of checks share."""

from __future__ import annotations

import pytest

from schedbench.profiles.check import examine


@pytest.fixture
def nothing_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examinations end with their checks. What runs leave unproven takes runs of its own: test_unproven.py."""
    monkeypatch.setattr(examine, "unproven", lambda *_: [])

"""Why a scenario is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schedbench.scenarios.problems import ScenarioError


def refused(ask: Callable[..., object], *given: object, **named: object) -> list[str]:
    """Returns the problems for which a call refuses a scenario: each with its place, key and message."""
    with pytest.raises(ScenarioError) as caught:
        ask(*given, **named)
    return [str(problem) for problem in caught.value.problems]

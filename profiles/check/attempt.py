"""A run that may break down: what it gave, or how it ended."""

from __future__ import annotations

from ...sched.relay.choice import RelayChoice
from ..run.compose import Guard
from ..run.crash import BrokenRunError, Crash, crash_of
from ..run.execute import Options, Outcome, execute
from ..run.machine import MachineError
from ..run.resolve import Resolved


def attempt(
    resolved: Resolved, relay: RelayChoice, options: Options, guard: Guard | None = None
) -> Outcome | Crash:
    """Raises what is no breakdown of the run: MachineError, and whatever says that a question makes no sense."""
    try:
        return execute(resolved, relay, options, guard=guard)
    except MachineError:
        raise
    except BrokenRunError as error:
        return crash_of(error.__cause__ or error)
    except Exception as error:
        return crash_of(error)

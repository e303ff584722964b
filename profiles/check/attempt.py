"""A run that may break down: what it gave, or how it ended."""

from __future__ import annotations

from ...sched.relay.choice import RelayChoice
from ..platform.machine import MachineError
from ..platform.resolve import Resolved
from ..ranks.execute import Options, RunOutcome, execute
from ..run.compose import Guard
from ..run.crash import BrokenRunError, Crash, crash_of


def attempt(
    resolved: Resolved, relay: RelayChoice, options: Options, guard: Guard | None = None
) -> RunOutcome | Crash:
    """Raises what is no breakdown of the run: MachineError, and whatever says that a question makes no sense."""
    try:
        return execute(resolved, relay, options, guard=guard)
    except MachineError:
        raise
    except BrokenRunError as error:
        return crash_of(error.__cause__ or error)
    except Exception as error:
        return crash_of(error)

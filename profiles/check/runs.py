"""Runs of a check that may crash."""

from __future__ import annotations

from ...sched.relay.choice import RelayChoice
from ..engines.client import EngineFailedError
from ..engines.names import EngineError
from ..measure.budget import RunOutcome
from ..platform.machine import MachineError
from ..platform.resolve import Resolved
from ..ranks.execute import Options, execute
from ..run.compose import Guard
from ..run.crash import BrokenRunError, Crash, crash_of


def attempt(
    resolved: Resolved, relay: RelayChoice, options: Options, guard: Guard | None = None
) -> RunOutcome | Crash:
    """Execute a run and return its outcome, or how it crashed. Raises MachineError, EngineError, and KeyboardInterrupt
    where the run was interrupted, whose result is only a part."""
    try:
        outcome = execute(resolved, relay, options, guard=guard)
    except (MachineError, EngineError):
        raise
    except EngineFailedError as error:
        return Crash(str(error).partition("\n")[0], None)
    except BrokenRunError as error:
        return crash_of(error.__cause__ or error)
    except Exception as error:
        return crash_of(error)
    if outcome.result.run.cancelled:
        raise KeyboardInterrupt
    return outcome

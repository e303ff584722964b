"""Runs of a check that may crash."""

from __future__ import annotations

from dataclasses import replace

from ..engines.client import EngineFailedError
from ..engines.names import EngineError
from ..platform.machine import MachineError
from ..platform.resolve import Resolved
from ..ranks.execute import Options, execute, whole
from ..record.result import Result
from ..run.compose import Guard
from ..run.crash import BrokenRunError, Crash, crash_of


def attempt(question: Resolved, options: Options, guard: Guard | None = None) -> Result | Crash:
    """Execute a run and return its result, which may have a leak, or how it crashed. Raises MachineError, EngineError,
    and KeyboardInterrupt where the run was interrupted, whose result is only a part."""
    try:
        return whole(execute(question, options, guard=guard))
    except (MachineError, EngineError):
        raise
    except EngineFailedError as error:
        return error.result or Crash(str(error).partition("\n")[0], None)
    except BrokenRunError as error:
        return crash_of(error.__cause__ or error)
    except Exception as error:
        return crash_of(error)


def with_section(resolved: Resolved, section: str, **changes: object) -> Resolved:
    """The question with other values in that section of its scenario."""
    changed = getattr(resolved.scenario, section).model_copy(update=changes)
    return replace(resolved, scenario=resolved.scenario.model_copy(update={section: changed}))

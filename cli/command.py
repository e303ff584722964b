"""One function is both a command and a function of Python: its keyword arguments are the options, and its answer is
what the command prints and Python returns."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from .arguments import EveryTable, Form, python_call
from .errors import INTERRUPTED, UsageError, ends_interrupted

if TYPE_CHECKING:
    from ..scenarios.problems import Problem
    from .answers import Answer

P = ParamSpec("P")
A = TypeVar("A", bound="Answer")


def command(function: Callable[..., Answer]) -> Callable[..., None]:
    """The function for Typer, which prints the answer and exits with its code. ``*arguments`` are a list there, and
    ``**keys`` are left to ``--set``."""

    def typed(*, every_table: EveryTable = False, form: Form = "table", **given: Any) -> None:
        listed = given.pop(arguments.name) or () if arguments else ()
        if form in ("svg", "html") and "picture" in given:
            given["picture"] = True
        with ends_interrupted("interrupted: there is no result"):
            answer = function(*listed, **given)
        answer.show(form, every_table=every_table)
        raise typer.Exit(answer.exit_code or 0)

    types = {
        name: eval(text, function.__globals__)
        for name, text in function.__annotations__.items()
        if name != "return"
    }
    options = [
        parameter.replace(annotation=types[parameter.name])
        for parameter in signature(function).parameters.values()
        if parameter.kind is not Parameter.VAR_KEYWORD
    ]
    arguments = next((option for option in options if option.kind is Parameter.VAR_POSITIONAL), None)
    own = [*signature(typed, eval_str=True).parameters.values()][:2]
    shape = [
        option.replace(kind=Parameter.KEYWORD_ONLY, default=() if option is arguments else option.default)
        for option in (*options, *own)
    ]
    typed.__signature__ = signature(typed).replace(parameters=shape)  # type: ignore[attr-defined]
    typed.__name__, typed.__doc__ = function.__name__, function.__doc__
    return typed


def from_python(function: Callable[P, Answer], kind: type[A]) -> Callable[P, A]:
    """The function for Python: it prints nothing, its answers are of this kind, and its errors name arguments where
    those of the command name options. It raises KeyboardInterrupt where the user interrupts it."""
    parameters = signature(function).parameters

    def named(text: str) -> str:
        return re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), text)

    def meaning(problem: Problem) -> str:
        """The message, of an unknown key with the argument that is nearest to it."""
        from ..scenarios.problems import meant

        is_unknown = problem.message.startswith("unknown key") and problem.path.isidentifier()
        near = meant(problem.path, parameters) if is_unknown else ""
        return f"unknown key{near}" if near else problem.message

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> A:
        from ..scenarios.overrides import OPTION
        from ..scenarios.problems import ScenarioError, SourceLocation

        shown = [repr(str(argument)) for argument in args if isinstance(argument, str | Path)]
        shown += [f"{name}={value!r}" for name, value in kwargs.items()]
        for name, value in kwargs.items():
            if isinstance(value, str) and name in parameters and parameters[name].default == ():
                raise UsageError(f"{name}: expected a list, got {value!r}")
        call = python_call.set(f"schedbench.{function.__name__}({', '.join(shown)})")
        try:
            answer = function(*args, **kwargs)
        except UsageError as error:
            raise UsageError(named(str(error))) from None
        except ScenarioError as error:
            raise ScenarioError(
                problem._replace(place=SourceLocation("keyword argument"), message=meaning(problem))
                if problem.place == OPTION
                else problem._replace(place=problem.place._replace(file=named(problem.place.file)))
                for problem in error.problems
            ) from None
        finally:
            python_call.reset(call)
        if answer.exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        assert isinstance(answer, kind)
        return answer

    return called

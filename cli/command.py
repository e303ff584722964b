"""One function is both a command and a function of Python: its keyword arguments are the options, and its answer is
what the command prints and Python returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args, get_origin

import typer

from .arguments import EveryTable, Form, UndrawnForm, python_call
from .errors import INTERRUPTED, UsageError
from .text import echo

if TYPE_CHECKING:
    from ..scenarios.problems import Problem
    from .answers import Answer

P = ParamSpec("P")
A = TypeVar("A", bound="Answer")


def command(function: Callable[..., Answer], *, drawn: bool = True) -> Callable[..., None]:
    """The function for Typer, which prints the answer and exits with its code. ``*arguments`` are a list there, and
    ``**keys`` are left to ``--set``. ``drawn``: some of its pages have a picture."""

    def typed(
        context: typer.Context, *, every_table: EveryTable = False, form: Form = "table", **given: Any
    ) -> None:
        listed = given.pop(arguments.name) or () if arguments else ()
        if form in ("svg", "html") and "picture" in given:
            given["picture"] = True
        answer = function(*listed, **given)
        answer.show(form, every_table=every_table)
        unused = dict(answer.unused)
        if given.get("executor"):
            from ..profiles.platform.pool import cluster_is_idle

            unused |= {"executor": "this command spreads no runs"} if cluster_is_idle() else {}
        for option, why in unused.items():
            if getattr(context.get_parameter_source(option), "name", "") == "COMMANDLINE":
                echo(f"schedbench: --{option} has no effect: {why}", err=True)
        raise typer.Exit(answer.exit_code or 0)

    options = [*_options(function).values()]
    arguments = next((option for option in options if option.kind is Parameter.VAR_POSITIONAL), None)
    context, every_table, form, _ = signature(typed, eval_str=True).parameters.values()
    own = context, every_table, form if drawn else form.replace(annotation=UndrawnForm)
    shape = [
        option.replace(kind=Parameter.KEYWORD_ONLY, default=() if option is arguments else option.default)
        for option in (*options, *own)
    ]
    typed.__signature__ = signature(typed).replace(parameters=shape)  # type: ignore[attr-defined]
    typed.__name__, typed.__doc__ = function.__name__, function.__doc__
    return typed


def _options(function: Callable[..., Answer]) -> dict[str, Parameter]:
    """The parameters by name, with their types and Typer's descriptions as annotations."""
    return {
        name: parameter.replace(annotation=eval(parameter.annotation, function.__globals__))
        for name, parameter in signature(function).parameters.items()
        if parameter.kind is not Parameter.VAR_KEYWORD
    }


def require_allowed(function: Callable[..., Answer], given: Mapping[str, object]) -> None:
    """Raises UsageError for a value of an option of the command that Typer would refuse."""
    from ..scenarios.problems import either

    options = _options(function)
    for name in options.keys() & given.keys():
        option, value, wanted = options[name], given[name], ""
        kind, about = get_args(option.annotation)
        if option.default == () and isinstance(value, str):
            wanted = "a list"
        elif get_origin(kind) is Literal and value not in get_args(kind) and not isinstance(value, bool):
            wanted = either(get_args(kind))
        elif about.min is not None and not (isinstance(value, int | float) and value >= about.min):
            wanted = f"{about.min} or more"
        if wanted and value != option.default:
            raise UsageError(f"{name}: expected {wanted}, got {value!r}")


def from_python(function: Callable[P, Answer], kind: type[A]) -> Callable[P, A]:
    """The function for Python: it prints nothing, its answers are of this kind, and its errors name arguments where
    those of the command name options. It raises KeyboardInterrupt where the user interrupts it."""
    options = _options(function)

    def named(text: str) -> str:
        return re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), text)

    def meaning(problem: Problem) -> str:
        """The message, of an unknown key with the argument that is nearest to it."""
        from ..scenarios.problems import meant

        is_unknown = problem.message.startswith("unknown key") and problem.path.isidentifier()
        near = meant(problem.path, options) if is_unknown else ""
        return f"unknown key{near}" if near else problem.message

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> A:
        from ..scenarios.problems import OPTION, ScenarioError, SourceLocation

        shown = [repr(str(argument)) for argument in args if isinstance(argument, str | Path)]
        shown += [f"{name}={value!r}" for name, value in kwargs.items()]
        require_allowed(function, kwargs)
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

    keys = [each for each in signature(function).parameters.values() if each.kind is Parameter.VAR_KEYWORD]
    described = [(option, *get_args(option.annotation)) for option in options.values()]
    called.__signature__ = signature(function).replace(  # type: ignore[attr-defined]
        parameters=[*(option.replace(annotation=plain) for option, plain, _ in described), *keys],
        return_annotation=kind,
    )
    lines = [f"    {option.name}: {named(about.help or '')}".rstrip(": ") for option, _, about in described]
    text = cleandoc(function.__doc__ or "").partition("\n\nExit codes")[0]
    called.__doc__ = "\n".join([text, "", "Arguments, and keys of the scenario:", *lines])
    return called

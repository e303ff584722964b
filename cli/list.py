"""``schedbench list``: the scenarios, models and other names that come with the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from .arguments import UndrawnForm
from .text import number

Entry = dict[str, Any]
What = Literal["scenarios", "cases", "relays", "faults", "models", "hardware", "maps", "engines"]


def show(
    what: Annotated[What, typer.Argument(help="What to list.")],
    form: UndrawnForm = "table",
) -> None:
    """List the scenarios, cases, relay states, faults, models, hardware profiles, maps of ranges or other projects'
    engines that can be named."""
    from .page import show_entries

    for name in _UNUSED:
        _import_unloaded(name)
    entries = _entries(what)
    paragraph = _PARAGRAPHS.get(what)
    text = "\n\n".join(map(paragraph, entries)) if paragraph else table(entries)
    show_entries(form, what, entries, text)


# What modules with names and texts import, and use in the functions of a run only.
_UNUSED = (
    *("torch", "numpy"),
    *(f"schedbench.sched.kernels.{name}" for name in ("allocation", "arrays", "drafts", "rows")),
)


class _UnusedModule(ModuleType):
    """A module that is loaded at the first use of one of its attributes. importlib's LazyLoader loads it as soon as it
    is imported twice."""

    def __getattr__(self, name: str) -> Any:
        assert self.__spec__ is not None and self.__spec__.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]
        vars(self).update(vars(module_from_spec(self.__spec__)))
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _import_unloaded(name: str) -> None:
    spec = None if name in sys.modules else find_spec(name)
    if spec is not None:
        sys.modules[name] = module = _UnusedModule(name)
        # ``inspect`` asks every module for its file, also while another of these modules is being loaded.
        module.__spec__, module.__file__ = spec, spec.origin


def table(entries: list[Entry]) -> str:
    width = max((len(entry["name"]) for entry in entries), default=0)
    return "\n".join(f"{entry['name']:{width}}  {entry['about']}".rstrip() for entry in entries)


def _case(entry: Entry) -> str:
    """The source of a case, its sides, the reported change and the expected one."""
    return (
        f"{entry['name']}  {entry['source']}\n"
        f"  {entry['about']}\n"
        f"  A {entry['a']}, B {entry['b']}\n"
        f"  reported: {entry['reported']}\n"
        f"  expect: {entry['metric']} {entry['expect']}"
    )


def _rung(entry: Entry) -> str:
    """A state's changes against the state before, expected effect, hazards and switches."""
    lines = [f"{entry['name']}  {entry['pr']}".rstrip(), f"  {entry['about']}"]
    lines += [f"    {asked}: {before} -> {after}" for asked, (before, after) in entry["changes"].items()]
    lines.append(f"  expect: {entry['expect']}")
    for hazard in entry["known_hazards"]:
        everywhere = hazard in entry["known_hazards_v2"]
        lines.append(f"  hazard: {hazard}{'' if everywhere else ' (not under speculation)'}")
    lines += [f"  defect: {defect}" for defect in entry["known_defects"]]
    switches = ", ".join(f"{name}={value}" for name, value in entry["switches"].items())
    return "\n".join((*lines, f"  switches: {switches}"))


def _defect(entry: Entry) -> str:
    """A fault's upstream reference, the defect, and the states that it can be switched on in."""
    loops = f"{' and '.join(entry['loops'])} loop{'s' * (len(entry['loops']) > 1)}"
    where = f"in {', '.join(entry['states'])}; {loops}{''.join(f'; needs {key}' for key in entry['needs'])}"
    where = f"waits for {entry['waits_for']}" if entry["waits_for"] else where
    return f"{entry['name']}  {entry['reference']}\n  {entry['about']}\n  {where}"


def _entries(what: What) -> list[Entry]:
    match what:
        case "scenarios" | "cases":
            from ..scenarios.shipped import case_names, catalog, names

            return catalog(names() if what == "scenarios" else case_names())
        case "hardware":
            from ..profiles.platform import hardware

            return _files(hardware)
        case "maps":
            from ..profiles.captures import maps

            return _files(maps)
        case "engines":
            from ..profiles.engines.names import ADAPTERS

            forms = "{0}:FOLDER, {0}:FOLDER@REF, {0}==VERSION"
            return [
                {"name": name, "about": forms.format(name), "package": adapter.package}
                for name, adapter in ADAPTERS.items()
            ]
        case "relays":
            return _relays()
        case "faults":
            return _faults()
        case "models":
            return _models()


def _files(shipped: ModuleType) -> list[Entry]:
    found = map(shipped.load, shipped.names())
    return [{"name": file.name, "about": file.about, "sha256": file.sha256} for file in found]


def _relays() -> list[Entry]:
    from ..sched.relay.choice import changes, choose
    from ..sched.relay.names import ALIASES
    from ..sched.relay.states import states

    known = states()
    return [
        {
            "name": state.name,
            "about": state.about,
            "pr": state.pr,
            "aliases": [alias for alias, name in ALIASES.items() if name == state.name],
            "before": state.before,
            "changes": changes(known[state.before], state) if state.before else {},
            "expect": state.expect,
            "known_hazards": list(choose(state.name, {}).known_hazards()),
            "known_hazards_v2": list(choose(state.name, {}).known_hazards(speculation="v2")),
            "known_defects": list(state.known_defects),
            "switches": dict(state.defaults),
        }
        for state in known.values()
    ]


def _faults() -> list[Entry]:
    from ..sched.relay.faults import FEATURES, awaited_faults, faults

    return [
        {
            "name": fault.name,
            "about": fault.about,
            "reference": fault.reference,
            "states": list(fault.states),
            "loops": list(fault.loops),
            "needs": [
                *([f"engine.speculative.mode={fault.speculation}"] if fault.speculation else []),
                *([FEATURES[fault.feature]] if fault.feature else []),
            ],
            "waits_for": fault.waits_for,
        }
        for fault in (*faults().values(), *awaited_faults().values())
    ]


def _size(parameters: int) -> str:
    """Like 8.03 B."""
    unit, scale = ("B", 1e9) if parameters >= 1e9 else ("M", 1e6)
    return f"{parameters / scale:.3g} {unit}"


def _models() -> list[Entry]:
    from ..sched.model.config import PRESETS

    return [
        {
            "name": name,
            "about": f"{_size(config.num_parameters)} parameters, {config.num_layers} layers, "
            f"hidden {number(config.hidden_size)}, vocabulary {number(config.vocab_size)}, "
            f"{number(config.max_positions)} positions",
            "parameters": config.num_parameters,
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "max_positions": config.max_positions,
        }
        for name, config in PRESETS.items()
    ]


_PARAGRAPHS: dict[What, Callable[[Entry], str]] = {"cases": _case, "relays": _rung, "faults": _defect}

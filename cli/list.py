"""``schedbench list``: the scenarios, models and other names that come with the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Annotated, Any, Literal

import typer

from .arguments import Form
from .text import number

Entry = dict[str, Any]
What = Literal["scenarios", "cases", "relays", "faults", "models", "hardware", "maps", "engines"]


def show(
    what: Annotated[What, typer.Argument(help="What to list.")],
    form: Form = "table",
) -> None:
    """List the scenarios, cases, relay states, faults, models, hardware profiles, maps of ranges or other projects'
    engines that can be named."""
    from .page import show_entries

    entries = _entries(what)
    show_entries(form, what, entries, _LAYOUTS.get(what, table)(entries))


def table(entries: list[Entry]) -> str:
    width = max((len(entry["name"]) for entry in entries), default=0)
    return "\n".join(f"{entry['name']:{width}}  {entry['about']}".rstrip() for entry in entries)


def _library(entries: list[Entry]) -> str:
    """Each case as a paragraph: its source, its sides, the reported change and the expected one."""
    return "\n\n".join(
        f"{entry['name']}  {entry['source']}\n"
        f"  {entry['about']}\n"
        f"  A {entry['a']}, B {entry['b']}\n"
        f"  reported: {entry['reported']}\n"
        f"  expect: {entry['metric']} {entry['expect']}"
        for entry in entries
    )


def _ladder(entries: list[Entry]) -> str:
    """Each state as a paragraph: changes against the state before, expected effect, hazards and switches."""
    return "\n\n".join("\n".join(_rung(entry)) for entry in entries)


def _rung(entry: Entry) -> Iterator[str]:
    yield f"{entry['name']}  {entry['pr']}".rstrip()
    yield f"  {entry['about']}"
    for question, (before, after) in entry["changes"].items():
        yield f"    {question}: {before} -> {after}"
    yield f"  expect: {entry['expect']}"
    for hazard in entry["known_hazards"]:
        everywhere = hazard in entry["known_hazards_v2"]
        yield f"  hazard: {hazard}{'' if everywhere else ' (not under speculation)'}"
    for defect in entry["known_defects"]:
        yield f"  defect: {defect}"
    yield f"  switches: {', '.join(f'{name}={value}' for name, value in entry['switches'].items())}"


def _defects(entries: list[Entry]) -> str:
    """Each fault as a paragraph: the defect, its upstream reference, and the states that it can be switched on in."""
    return "\n\n".join(
        f"{entry['name']}  {entry['reference']}\n  {entry['about']}\n  {_where(entry)}" for entry in entries
    )


def _where(entry: Entry) -> str:
    if entry["waits_for"]:
        return f"waits for {entry['waits_for']}"
    loops = f"{' and '.join(entry['loops'])} loop{'s' * (len(entry['loops']) > 1)}"
    return f"in {', '.join(entry['states'])}; {loops}{''.join(f'; needs {key}' for key in entry['needs'])}"


def _entries(what: What) -> list[Entry]:
    match what:
        case "scenarios" | "cases":
            from ..scenarios.shipped import case_catalog, catalog

            return catalog() if what == "scenarios" else case_catalog()
        case "hardware":
            from ..profiles.platform import hardware

            return _files(hardware)
        case "maps":
            from ..profiles.captures import maps

            return _files(maps)
        case "engines":
            from ..profiles.engines.adapter import adapter_named, adapter_names

            forms = "{0}:FOLDER, {0}:FOLDER@REF, {0}==VERSION"
            return [
                {"name": name, "about": forms.format(name), "package": adapter_named(name).package}
                for name in adapter_names()
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
    from ..sched.relay.faults import FEATURES, AwaitedFault, Fault, awaited_faults, faults

    entries: list[Entry] = []
    every: tuple[Fault | AwaitedFault, ...] = (*faults().values(), *awaited_faults().values())
    for fault in every:
        here = fault if isinstance(fault, Fault) else None
        needs = [f"engine.speculative.mode={here.speculation}"] if here and here.speculation else []
        entries.append(
            {
                "name": fault.name,
                "about": fault.about,
                "reference": fault.reference,
                "states": list(here.states) if here else [],
                "loops": list(here.loops) if here else [],
                "needs": [*needs, *([FEATURES[here.feature]] if here and here.feature else [])],
                "waits_for": fault.feature if isinstance(fault, AwaitedFault) else None,
            }
        )
    return entries


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


_LAYOUTS: dict[What, Callable[[list[Entry]], str]] = {
    "cases": _library,
    "relays": _ladder,
    "faults": _defects,
}

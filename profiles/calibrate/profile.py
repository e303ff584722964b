"""Makes a hardware profile with measured constants, as YAML for ``device.hardware``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from ..platform.hardware import HardwareProfile, PhaseLine
from .fit import FittedLine
from .host import HostTimes, fit_kinds, fit_phases

_DIGITS = 4  # significant digits; measurements repeat no better
_LEAST = {"ns": 0.0, "B": 0.0, "B/s": 1e6, "FLOP/s": 1e9, "1": 1e-3}
_MOST = {"1": 1.0}


class FittedConstant(NamedTuple):
    """A measured value of the profile. ``key`` is its path, such as ``("phases", "admit", "b")``. ``spread`` is the
    half-width of its range, in the value's unit. ``basis`` says what it follows from. ``old`` is the base's value, None
    for a phase that the base does not have."""

    key: tuple[str, ...]
    value: float
    spread: float
    basis: str
    old: float | None


class Provenance(NamedTuple):
    machine: str
    date: str

    def origin(self, basis: str) -> str:
        return f"measured on {self.machine}, {self.date}, {basis}"


def phase_constants(base: HardwareProfile, times: HostTimes) -> list[FittedConstant]:
    """a and b of every measured phase, and of its kinds of steps."""
    found: list[FittedConstant] = []
    for name, line in fit_phases(times).items():
        found += _of_line(("phases", name), line, base.phases.get(name))
    for (name, kind), line in fit_kinds(times).items():
        old = base.phases[name].kinds.get(kind) if name in base.phases else None
        found += _of_line(("phases", name, "kinds", kind), line, old)
    return found


def _of_line(key: tuple[str, ...], line: FittedLine, old: PhaseLine | None) -> list[FittedConstant]:
    """Return the line's constants; a sample's usual distance from the line is the spread of either part."""
    basis, share = _basis(line), line.residual / max(line.at(line.worst_n), line.residual, 1.0)
    return [
        FittedConstant((*key, "a"), line.a, line.residual, basis, old.a.value if old else None),
        FittedConstant((*key, "b"), line.b, share * line.b, basis, old.b.value if old else None),
    ]


def _basis(line: FittedLine) -> str:
    explained = "one size only" if line.sizes == 1 else f"{line.sizes} sizes"
    r2 = "" if line.r2 is None else f", R2 {line.r2:.2f}"
    return f"{line.samples} samples, {explained}, residual {line.residual:.0f} ns{r2}"


def calibrated(
    base: HardwareProfile, constants: Iterable[FittedConstant], provenance: Provenance, *, name: str
) -> dict[str, Any]:
    """The base's document with these constants."""
    document = base.model_dump(exclude={"sha256"}, exclude_defaults=True)
    constants = list(constants)
    for constant in constants:
        quantity = _found(document, constant.key)
        value = _rounded(constant.value)
        unit = quantity.get("unit", "ns")  # a line that the base does not have is a time
        quantity |= {
            "value": value,
            "low": min(value, max(_LEAST[unit], _rounded(value - constant.spread))),
            "high": max(value, min(_MOST.get(unit, math.inf), _rounded(value + constant.spread))),
            "unit": unit,
            "origin": provenance.origin(constant.basis),
        }
    document["name"] = name
    document["about"] = f"{base.name} with {len(constants)} constants measured on {provenance.machine}"
    return document


def _found(document: Mapping[str, Any], key: Sequence[str]) -> dict[str, Any]:
    inner: Any = document
    for word in key:
        inner = inner.setdefault(word, {})
    found: dict[str, Any] = inner
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def to_yaml(document: Mapping[str, Any]) -> str:
    """One line per constant."""
    text: str = yaml.safe_dump(
        dict(document), sort_keys=False, default_flow_style=None, width=10_000, allow_unicode=True
    )
    return text

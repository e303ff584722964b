"""A hardware profile with some constants replaced by measured ones, as the YAML that ``device.hardware`` names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from ..platform.hardware import HardwareProfile, PhaseLine
from .fit import FittedLine
from .host import HostTimes, fit_kinds, fit_phases

_DIGITS = 4  # significant ones; no machine repeats itself better


class FittedConstant(NamedTuple):
    """A measured value of the profile. ``key``: its path, as ``("phases", "admit", "b")``. ``basis``: what it was
    found from; ``old``: what the base says, None for a phase that the base has not."""

    key: tuple[str, ...]
    value: float
    basis: str
    old: float | None


class Provenance(NamedTuple):
    machine: str
    date: str

    def origin(self, basis: str) -> str:
        return f"measured on {self.machine}, {self.date}, {basis}"


def phase_constants(base: HardwareProfile, times: HostTimes) -> list[FittedConstant]:
    """a and b of every phase that was met, and of the kinds of steps that are told apart."""
    found: list[FittedConstant] = []
    for name, line in fit_phases(times).items():
        found += _of_line(("phases", name), line, base.phases.get(name))
    for (name, kind), line in fit_kinds(times).items():
        old = base.phases[name].kinds.get(kind) if name in base.phases else None
        found += _of_line(("phases", name, "kinds", kind), line, old)
    return found


def _of_line(key: tuple[str, ...], line: FittedLine, old: PhaseLine | None) -> list[FittedConstant]:
    basis = _basis(line)
    return [
        FittedConstant((*key, "a"), line.a, basis, old.a.value if old else None),
        FittedConstant((*key, "b"), line.b, basis, old.b.value if old else None),
    ]


def _basis(line: FittedLine) -> str:
    explained = "one size only" if line.sizes == 1 else f"{line.sizes} sizes"
    r2 = "" if line.r2 is None else f", R2 {line.r2:.2f}"
    return f"{line.samples} samples, {explained}, residual {line.residual:.0f} ns{r2}"


def calibrated(
    base: HardwareProfile, constants: Iterable[FittedConstant], provenance: Provenance, *, name: str
) -> dict[str, Any]:
    """The document of a profile: the base's, with the constants in it."""
    document = base.model_dump(exclude={"sha256"}, exclude_defaults=True)
    constants = list(constants)
    for constant in constants:
        quantity = _found(document, constant.key)
        quantity |= {"value": _rounded(constant.value), "origin": provenance.origin(constant.basis)}
        quantity.setdefault("unit", "ns")  # of a line that the base has not
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

"""A hardware profile with some constants replaced by measured ones, as the YAML that ``device.hardware`` names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from ..hardware import HardwareProfile
from .fit import Line
from .host import HostTimes, fit_phases

_DIGITS = 4  # significant ones; no machine repeats itself better


class Constant(NamedTuple):
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


def phase_constants(base: HardwareProfile, times: HostTimes) -> list[Constant]:
    """a and b of every phase that was met."""
    found = []
    for name, line in fit_phases(times).items():
        basis, old = _basis(line), base.phases.get(name)
        found += [
            Constant(("phases", name, "a"), line.a, basis, old.a.value if old else None),
            Constant(("phases", name, "b"), line.b, basis, old.b.value if old else None),
        ]
    return found


def _basis(line: Line) -> str:
    explained = "one size only" if line.sizes == 1 else f"{line.sizes} sizes"
    r2 = "" if line.r2 is None else f", R2 {line.r2:.2f}"
    return f"{line.samples} samples, {explained}, residual {line.residual:.0f} ns{r2}"


def calibrated(
    base: HardwareProfile, constants: Iterable[Constant], provenance: Provenance, *, name: str
) -> dict[str, Any]:
    """The document of a profile: the base's, with the constants in it."""
    document = base.model_dump(exclude={"sha256"})
    constants = list(constants)
    for constant in constants:
        quantity = _found(document, constant.key)
        quantity |= {"value": _rounded(constant.value), "origin": provenance.origin(constant.basis)}
    document["name"] = name
    document["about"] = f"{base.name} with {len(constants)} constants measured on {provenance.machine}"
    return document


def _found(document: Mapping[str, Any], key: Sequence[str]) -> dict[str, Any]:
    inner: Any = document
    for word in key:
        inner = inner[word]
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

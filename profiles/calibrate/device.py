"""Constants of a hardware profile from the documents of the probes (``lab.probes``).

Where two constants can only be measured together, each keeps its share of the base's values, and the constant's basis
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from operator import attrgetter
from statistics import median
from typing import Any, Final

from ..platform.hardware import BOUNDS, HardwareProfile
from .fit import FittedConstant, FittedLine, TimedSample, fit

PROBES: Final = ("costs", "copies", "kernels")
NODES: Final = 300  # of the graph whose launch is the constant: an 8B decode's
SPREAD: Final = 0.1  # relative difference of a probe's median when it runs again
_LARGE: Final = 1 << 20  # bytes; larger copies are bound by their size
_COMPUTE: Final = 128  # products of at least so many rows are bound by their rate

Document = Mapping[str, Any]
Found = Iterator[tuple[str, float, str]]  # key, value, basis


def device_constants(
    base: HardwareProfile, probes: Mapping[str, Document]
) -> tuple[list[FittedConstant], list[str]]:
    """The constants, and what could not be derived, and why. ``probes`` are documents by name. A missing or partly
    failed one leaves its own constants out, and no others; so does a value that no profile can have. What follows from
    other constants takes those that were measured before it, else the base's."""
    steps: Mapping[str, tuple[str, Callable[[HardwareProfile, Document], Found]]] = {
        "launches": ("costs", _launches),
        "kernels of the engine": ("costs", _kernels),
        "graphs": ("costs", _graphs),
        "events": ("costs", _events),
        "pinned blocks": ("costs", _pinned),
        "pinned copies": ("copies", _pinned_copies),
        "inline size": ("copies", _inline),
        "pageable copies": ("copies", _pageable_copies),
        "rates": ("kernels", _rates),
        "attention": ("kernels", _attention),
    }
    constants: list[FittedConstant] = []
    missing: list[str] = []
    for what, (probe, step) in steps.items():
        try:
            found = [
                FittedConstant(key, value, SPREAD * value, basis, old=getattr(old, "value", None))
                for key, value, basis in step(base, probes[probe])
                for old in [attrgetter(key)(base)]
            ]
            base = HardwareProfile(
                **calibrated(base, found, machine="this one", date="now", name=base.name), sha256=base.sha256
            )
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            missing.append(f"{what}: the probe {probe} does not have it ({type(error).__name__}: {error})")
        else:
            constants += found
    return constants, missing


def calibrated(
    base: HardwareProfile, constants: Iterable[FittedConstant], *, machine: str, date: str, name: str
) -> dict[str, Any]:
    """The base's document with these constants, which were measured on that machine. A size in bytes is exact: the
    largest that was seen to behave so. Raises ValueError for a value beyond the bounds of its unit."""
    document = base.model_dump(exclude={"sha256"}, exclude_defaults=True)
    constants = list(constants)
    for key, measured, spread, basis, _ in constants:
        quantity = reduce(lambda inner, word: inner.setdefault(word, {}), key.split("."), document)
        unit = quantity.get("unit", "ns")  # a line or a call that the base does not have is a time
        least, most = BOUNDS[unit]
        if not least <= measured <= most:
            raise ValueError(f"{key} would be {measured:.4g} {unit}")
        value = measured if unit == "B" else _rounded(measured)
        low = value if unit == "B" else _rounded(measured - spread)
        quantity |= {
            "value": value,
            "low": min(value, max(least, low)),
            "high": max(value, min(most, _rounded(measured + spread))),
            "unit": unit,
            "origin": f"measured on {machine}, {date}, {basis}",
        }
    document["name"] = name
    document["about"] = f"{base.name} with {len(constants)} constants measured on {machine}"
    return document


def _rounded(value: float) -> float:
    """Four significant digits; measurements repeat no better."""
    return float(f"{value:.4g}")


def _launches(base: HardwareProfile, costs: Document) -> Found:
    """The host time of a torch call and its launch, and the device time of a kernel and the gap after it."""
    both, host = costs["launch"]["host_ns"], base.host
    whole = host.torch_call.value + host.launch.value
    launch = both["median"] * (host.launch.value / whole if whole else 0.5)
    ns = f"{both['median']:.0f} ns in one, median of {both['n']:.0f} x.add_(1); torch's share as in the base"
    yield "host.torch_call", both["median"] - launch, ns
    yield "host.launch", launch, ns
    apart = costs["launch"]["device_ns"]
    node = _line((int(nodes), found["device_ns"]) for nodes, found in costs["graphs"].items()).b
    fixed = min(base.kernels.fixed.value, apart, node)
    ns = f"{apart:.0f} ns from kernel to kernel, {node:.0f} ns in a graph; a kernel's own as in the base"
    yield "kernels.fixed", fixed, ns
    yield "kernels.gap", apart - fixed, ns
    yield "kernels.graph_gap", node - fixed, ns


def _kernels(base: HardwareProfile, costs: Document) -> Found:
    """The host time of a Triton kernel before its launch."""
    calls = {name: found["median"] for name, found in costs["engine_kernels"].items()}
    each = ", ".join(f"{name} {ns:.0f} ns" for name, ns in calls.items())
    before_launch = max(median(calls.values()) - base.host.launch.value, 0.0)
    yield "host.kernel_call", before_launch, f"median of {each}; the launch taken off"


def _graphs(base: HardwareProfile, costs: Document) -> Found:  # noqa: ARG001
    graphs = costs["graphs"].items()
    line = _line((int(nodes), found["host_ns"]["median"]) for nodes, found in graphs)
    per_node = f"{line.a:.0f} ns + {line.b:.1f} ns per node, residual {line.residual:.0f} ns"
    yield "host.graph_launch", line.at(NODES), f"{per_node}; here for {NODES} nodes"


def _events(base: HardwareProfile, costs: Document) -> Found:  # noqa: ARG001
    measured = {"event_record": "record", "event_wait": "wait", "sync_return": "stream_synchronize_done"}
    for name, what in measured.items():
        yield f"host.{name}", *_median(costs["events"][what], what)


def _pinned(base: HardwareProfile, costs: Document) -> Found:  # noqa: ARG001
    what = "pin_memory() of 4 KiB from a cached block"
    yield "host.pin_memory", *_median(costs["pinned"]["hit"], what)


def _median(spread: Document, what: str) -> tuple[float, str]:
    n, low, high = (spread[name] for name in ("n", "p10", "p90"))
    return spread["median"], f"{what}: median of {n:.0f}, p10 {low:.0f}, p90 {high:.0f} ns"


def _copies(copies: Document, direction: str, memory: str) -> list[Document]:
    return [row for row in copies["idle"] if row["direction"] == direction and row["host_memory"] == memory]


def _pinned_copies(base: HardwareProfile, copies: Document) -> Found:
    fixed, calls = [], []
    for direction in ("h2d", "d2h"):
        rows = _copies(copies, direction, "pinned")
        line = _line((row["bytes"], row["device_ns"]) for row in rows)
        fixed.append(line.a)
        calls += [row["call_ns"]["median"] for row in rows]
        yield f"copies.{direction}_pinned", 1e9 / line.b, _of_line(line)
    yield "copies.fixed", median(fixed), "intercept of the pinned copies' lines, both directions"
    call = median(calls)
    sizes = f"median of {len(calls)} pinned non-blocking sizes, {call:.0f} ns; the torch call taken off"
    yield "host.copy_call", max(call - base.host.torch_call.value, 0.0), sizes


def _pageable_copies(base: HardwareProfile, copies: Document) -> Found:
    for direction in ("h2d", "d2h"):
        rows = [row for row in _copies(copies, direction, "pageable") if row["bytes"] >= _LARGE]
        line = _line((row["bytes"], row["blocking_ns"]["median"]) for row in rows)
        yield f"copies.{direction}_pageable", 1e9 / line.b, _of_line(line)
    inline = base.copies.pageable_inline.value
    small = [row for row in _copies(copies, "h2d", "pageable") if row["bytes"] <= inline]
    line = _line((row["bytes"], row["call_ns"]["median"]) for row in small)
    yield "copies.host_memcpy", 1e9 / line.b, f"calls of up to {inline:.0f} B: {_of_line(line)}"


def _line(times: Iterable[tuple[float, float]]) -> FittedLine:
    """The line through times, in ns, by size. Raises ValueError where all are of one size."""
    line = fit(TimedSample(*time) for time in times)
    if line.sizes < 2:
        raise ValueError("one size gives no line")
    return line


def _of_line(line: FittedLine) -> str:
    return f"{line.samples} sizes, {line.a:.0f} ns + bytes, residual {line.residual:.0f} ns"


def _inline(base: HardwareProfile, copies: Document) -> Found:  # noqa: ARG001
    rows = copies["behind_busy"]
    waited = min((row["bytes"] for row in rows if row["waited"]), default=None)
    went_on = max((row["bytes"] for row in rows if not row["waited"]), default=None)
    if waited is None or went_on is None or went_on > waited:
        raise ValueError("no size above which the call waits")
    sizes = f"behind a busy stream {went_on} B did not wait, {waited} B did"
    yield "copies.pageable_inline", float(went_on), sizes


def _rates(base: HardwareProfile, kernels: Document) -> Found:
    moved = kernels["copy"]
    bandwidth = moved["bytes"] / moved["device_ns"] * 1e9
    copy = f"device-to-device copy of {moved['bytes'] / 2:.0f} B, read plus write"
    yield "kernels.memory_bandwidth", bandwidth, copy
    peaks = {row["dtype"]: _flops(row) / row["device_ns"] * 1e9 for row in kernels["peak"]}  # of the largest
    for dtype, rate in peaks.items():
        yield f"kernels.gemm_rates.{dtype}", rate, "a product of three equal sides, the largest"
    products, fixed = kernels["gemm"], base.kernels.fixed.value
    large = [
        _flops(row) / _beyond(row, fixed) * 1e9 / peaks[row["dtype"]]
        for row in products
        if row["m"] >= _COMPUTE
    ]
    small = [_bytes(row) / _beyond(row, fixed) * 1e9 / bandwidth for row in products if row["m"] < _COMPUTE]
    yield _efficiency("gemm", large, "products", "the rate above")
    yield _efficiency("memory", small, "products", "the rate above")


def _efficiency(name: str, shares: list[float], of: str, rate: str) -> tuple[str, float, str]:
    if not shares:
        raise ValueError(f"no {of} for the efficiency of {name}")
    basis = f"median of {len(shares)} {of}, {min(shares):.2f} to {max(shares):.2f} of {rate}"
    return f"kernels.efficiency.{name}", min(max(median(shares), 1e-3), 1.0), basis


def _attention(base: HardwareProfile, kernels: Document) -> Found:
    """The efficiency of prompts' attention, as a share of the rate of products. Decodes are bound by bytes."""
    rates, fixed = base.kernels.gemm_rates.model_dump(), base.kernels.fixed.value
    shares = [
        _attended(row) / _beyond(row, fixed) * 1e9 / rates[row["dtype"]]["value"]
        for row in kernels["attention"]
        if row["new"] >= _COMPUTE
    ]
    yield _efficiency("attention", shares, "prompts", "the rate of products")


def _attended(row: Document) -> float:
    """flops of all pairs of a token and a position that it attends to."""
    new, length = row["new"], row["new"] + row["before"]
    pairs = row["requests"] * new * (2 * length - new + 1) / 2
    return float(4 * row["heads"] * row["head_dim"] * pairs)


def _flops(row: Document) -> float:
    return float(2 * row["m"] * row["n"] * row["k"])


def _bytes(row: Document) -> float:
    size = {"bfloat16": 2, "float16": 2, "float32": 4}[row["dtype"]]
    return float(size * (row["m"] * row["k"] + row["k"] * row["n"] + row["m"] * row["n"]))


def _beyond(row: Document, fixed: float) -> float:
    return max(float(row["device_ns"]) - fixed, 1.0)

"""How fast the GPU runs: tokens/s, bandwidth and FLOP/s, and the distance of decodes from their roofline.

Limits hold for an 8B model with 64 running requests; emulated runs are shown without a verdict.
``python -m schedbench.profiles.lab.speed FOLDER NAME...`` writes speed.json there, from each ``NAME.json`` and from the
documents of ``single_run --sides``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ..platform.hardware import HardwareError
from ..platform.hardware import load as hardware_profile
from ..record.conclusion import numbers
from ..record.files import write_whole
from ..record.result import Result, read

Document = dict[str, Any]

OVERHEADS: Final = ("overhead", "overhead-nvtx")
LIMITED: Final = ("llama-3-8b", 64)  # the model and max_running_requests that the limits are for


def _value(result: Result, name: str, quantile: str = "") -> float | None:
    """The value of a metric with a single one, the mean of a distribution, or one of its quantiles."""
    found = getattr(result.metrics.get(name), quantile or "value", None)
    return found if isinstance(found, (int, float)) else None


def over_roofline(result: Result) -> float | None:
    """The time of a decode with the idle before it, over its roofline; means of the run."""
    names = ("forward_ms.decode", "idle_ms", "decode_roofline_ms")
    forward, idle, roofline = (_value(result, name) for name in names)
    if forward is None or idle is None or not roofline:
        return None
    return (forward + idle) / roofline


_OVER_ROOFLINE: Final = "decode step over roofline"
# The figure, its unit, the metric and its quantile, and the metric's unit in that of the figure.
_FIGURES: Final = (
    ("output throughput", "tokens/s", "output_throughput", "", 1),
    ("input throughput", "tokens/s", "input_throughput", "", 1),
    ("steady output throughput", "tokens/s", "steady_output_throughput", "", 1),
    ("requests in a decode", "requests", "decode_batch_size", "", 1),
    ("step p50", "ms", "step_ms", "p50", 1),
    ("decode forward p50", "ms", "forward_ms.decode", "p50", 1),
    ("decode forward", "ms", "forward_ms.decode", "", 1),
    ("decode roofline", "ms", "decode_roofline_ms", "", 1),
    (_OVER_ROOFLINE, "ratio", "", "", 1),
    ("decode bandwidth", "GB/s", "decode_bandwidth", "", 1),
    ("decode FLOP/s", "TFLOP/s", "decode_flops", "", 1),
    ("prefill FLOP/s", "TFLOP/s", "prefill_flops", "", 1),
    ("forward occupancy", "%", "forward_occupancy", "", 100),
    ("idle between steps p50", "us", "idle_ms", "p50", 1000),
    ("idle between steps p99", "us", "idle_ms", "p99", 1000),
)
_LIMITS: Final = {
    _OVER_ROOFLINE: ("<", 1.15),
    "forward occupancy": (">", 99.4),
    "idle between steps p50": ("<", 20),
}


def figures(result: Result) -> Iterator[Document]:
    """``value`` is None if the run does not have it; ``met`` if there is no limit, or no verdict. Limits are of one
    shape."""
    expanded: Any = result.scenario.expanded
    model, engine = expanded.get("model"), expanded.get("engine")
    limited = model and engine and (model.get("preset"), engine.get("max_running_requests")) == LIMITED
    for name, unit, metric, quantile, scale in _FIGURES:
        value = _value(result, metric, quantile) if metric else over_roofline(result)
        value = None if value is None else scale * value
        bar, met = "", None
        if name in _LIMITS and limited:
            sign, limit = _LIMITS[name]
            bar = f"{sign} {limit:g}"
            if value is not None and not result.labels.emulated:
                met = value < limit if sign == "<" else value > limit
        yield {"name": name, "unit": unit, "value": value, "bar": bar, "met": met}


def run_document(name: str, result: Result) -> Document:
    """Plain dicts and lists."""
    how = numbers(result.labels.model_dump(), f"on {result.hardware.name}")
    return {
        "name": name,
        "evidence": f"{how}{', cancelled: partial' if result.run.cancelled else ''}",
        "relay": result.relay.state,
        "roofline": _origin(result),
        "figures": list(figures(result)),
    }


def _origin(result: Result) -> str:
    """The origin of the roofline's bandwidth."""
    device = result.scenario.expanded.get("device")
    name = str(device.get("hardware")) if isinstance(device, dict) else ""
    try:
        bandwidth = hardware_profile(name).kernels.memory_bandwidth
    except HardwareError:
        return f"hardware profile {name}, which is not here"
    return f"{bandwidth.value / 1e9:,.0f} GB/s of hardware profile {name}: {bandwidth.origin}"


def document(
    runs: Sequence[tuple[str, Result]], overheads: Iterable[Document], *, missing: Sequence[str] = ()
) -> Document:
    """``overheads`` are documents of ``single_run --sides``, ``missing`` the runs without a result. A limit is
    ``undecided`` where a measured run has no verdict."""
    documents = [run_document(name, result) for name, result in runs]
    costs = [{**cost, "met": None if cost.get("emulated") else cost.get("met")} for cost in overheads]
    verdicts = [
        figure["met"]
        for (_, result), run in zip(runs, documents, strict=True)
        for figure in run["figures"]
        if figure["bar"] and not result.labels.emulated
    ]
    verdicts += [cost["met"] for cost in costs if "abstained" not in cost and not cost["emulated"]]
    return {
        "met": sum(verdict is True for verdict in verdicts),
        "missed": sum(verdict is False for verdict in verdicts),
        "undecided": sum(verdict is None for verdict in verdicts),
        "runs": documents,
        "overheads": costs,
        "missing": list(missing),
    }


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a limit is missed or, on measured runs, undecided."""
    folder, names = Path(arguments[0]), arguments[1:]
    there = [name for name in names if (folder / f"{name}.json").exists()]
    costs = [path for name in OVERHEADS if (path := folder / f"{name}.json").exists()]
    found = document(
        [(name, read(folder / f"{name}.json")) for name in there],
        [json.loads(path.read_text(encoding="utf-8")) for path in costs],
        missing=[name for name in names if name not in there],
    )
    write_whole(folder / "speed.json", json.dumps(found, indent=1) + "\n")
    print(f"limits met {found['met']}, missed {found['missed']}, undecided {found['undecided']}")
    return 1 if found["missed"] or found["undecided"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

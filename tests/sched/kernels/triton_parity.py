"""Compares the Triton kernels' results with torch's in float64, within stated tolerances. Run as a program under
TRITON_INTERPRET=1 it prints what is wrong with each case as JSON; on CUDA the same cases run through the ops
themselves."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from schedbench.sched.kernels.declare import kernels, triton_kernel
from tests.sched.kernels.triton_cases import attention, hosted, model, sampling, speculation, steps
from tests.sched.kernels.triton_cases.case import Case, addressed, placed

# Half of the last place of a number near 1, some places more for what is summed.
ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

CASES: dict[str, Case] = {
    **model.CASES,
    **attention.CASES,
    **sampling.CASES,
    **steps.CASES,
    **hosted.CASES,
    **speculation.CASES,
}


def wrong(name: str, dtype: torch.dtype, run: Callable[..., Any], device: str = "cpu") -> str:
    """Describes how the result and the arguments after ``run`` differ from the torch implementation's in float64; "" if
    they do not."""
    chosen = CASES[name]
    given = chosen.arguments(dtype, device)
    # The same rounded numbers, in float64.
    truth = [placed(arg, torch.float64, "cpu") for arg in chosen.arguments(dtype)]
    expected = kernels()[chosen.op].impl(*truth)
    found = run(*addressed(kernels()[chosen.op].name, given))
    if device == "cuda":
        torch.cuda.synchronize()
    pairs = [("result", found, expected)]
    pairs += [(f"argument {place}", arg, truth[place]) for place, arg in enumerate(given)]
    judged = ((where, _differ(a, b, dtype)) for where, a, b in pairs)
    return "; ".join(f"{where}: {why}" for where, why in judged if why)


def _differ(found: Any, expected: Any, dtype: torch.dtype) -> str:
    if isinstance(expected, (list, tuple)):
        return "; ".join(filter(None, (_differ(a, b, dtype) for a, b in zip(found, expected, strict=True))))
    if not isinstance(expected, torch.Tensor):
        return "" if found == expected else f"{found} instead of {expected}"
    found = found.cpu()
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if not expected.is_floating_point():
        return "" if torch.equal(found, expected) else f"{found.tolist()} instead of {expected.tolist()}"
    bound = ROUNDING[dtype] * (1 + expected.abs())
    error = ((found.double() - expected.double()).abs() / bound).nan_to_num(
        posinf=float("inf"), nan=float("inf")
    )
    same = found.double() == expected.double()  # infinities
    return (
        "" if bool((same | (error <= 1)).all()) else f"off by {error[~same].max():.3g} times what is allowed"
    )


def names(*, every: bool = True) -> Iterator[tuple[str, torch.dtype]]:
    """The cases in each dtype; without ``every``, one case of each op in each dtype and the others in float32."""
    seen = set()
    for name, chosen in CASES.items():
        whole = chosen.floats and (every or chosen.op not in seen)
        seen.add(chosen.op)
        for dtype in ROUNDING if whole else (torch.float32,):
            yield name, dtype


def main() -> None:
    found = {}
    for name, dtype in names(every=False):
        entry = kernels()[CASES[name].op]
        try:
            found[f"{name} {dtype}"] = wrong(name, dtype, triton_kernel(entry))
        except Exception:
            found[f"{name} {dtype}"] = traceback.format_exc(limit=-6)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

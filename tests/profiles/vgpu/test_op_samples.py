"""Torch's own samples of its operators on the virtual GPU: the values equal the CPU's, and an op makes the same copies
and kernels under ``inference_mode`` as under ``no_grad``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from schedbench.profiles.vgpu.tensor import DeviceTensor
from tests.profiles.vgpu.conftest import Opener

pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore")]  # torch warns of deprecated operators
SAMPLES = 3  # per operator
# Operators that the virtual GPU lacks, and that CUDA also refuses or runs by its own libraries.
UNSUPPORTED = {
    "_batch_norm_with_update": "takes no running statistics, which torch's Python overloads do not accept",
    "_native_batch_norm_legit": "takes no running statistics, which torch's Python overloads do not accept",
    "as_strided.partial_views": "views more memory than the tensor was made from",
    "jiterator": "compiles CUDA source",
    "sparse": "sparse layouts",
    "tensor_split": "needs its indices on the host",
    "to_sparse": "sparse layouts",
}
# Values that are random, not initialised, or one of several valid ones.
UNDETERMINED = (
    "as_strided",
    "bernoulli",
    "dropout",
    "eig",
    "empty",
    "hfftn",
    "pca",
    "qr",
    "rand",
    "rrelu",
    "svd",
)


def samples(ops: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for op in ops:
        if op.dtypes and not op.full_name.startswith(tuple(UNSUPPORTED)):
            dtype = torch.float32 if torch.float32 in op.dtypes else next(iter(op.dtypes))
            for sample, _ in zip(
                op.sample_inputs("cpu", dtype, requires_grad=False), range(SAMPLES), strict=False
            ):
                yield op, (sample.input, sample.args, sample.kwargs)


def on_device(value: Any) -> Any:
    return value.detach().to("vgpu") if isinstance(value, torch.Tensor) else value


def held(value: Any) -> Any:
    return value.held if type(value) is DeviceTensor else value


def result_and_kinds(opened: Opener, op: Any, given: Any, mode: Any) -> tuple[Any, Counter[str]]:
    """Returns the op's result, and the device's operations by kind."""
    with opened() as bench, mode():
        value, args, kwargs = tree_map(on_device, given)
        torch.manual_seed(0)
        out: list[Any] = []
        kinds = bench.observe(lambda: out.append(tree_map(held, op.op(value, *args, **kwargs)))).kinds
        return out[0], Counter(kinds)


def test_samples_agree_in_values_and_counts(opened: Opener) -> None:
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds to import

    assert len(op_db) > 500
    different = []
    for op, given in samples(op_db):
        (out, counts), (_, inference) = (
            result_and_kinds(opened, op, given, mode) for mode in (torch.no_grad, torch.inference_mode)
        )
        if counts != inference:
            different.append(
                f"{op.full_name}: {dict(counts)} under no_grad, {dict(inference)} under inference_mode"
            )
        if not any(word in op.full_name for word in UNDETERMINED):
            torch.manual_seed(0)
            value, args, kwargs = given
            expected = tree_leaves(op.op(value, *args, **kwargs))
            for one, other in zip(tree_leaves(out), expected, strict=True):
                if isinstance(one, torch.Tensor):
                    torch.testing.assert_close(one, other, equal_nan=True, msg=op.full_name)
    assert different == []

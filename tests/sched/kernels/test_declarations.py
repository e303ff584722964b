"""What an op declares holds for what it computes: shapes, accesses and cost. The cases are those of Triton kernels,
those of the model, and some of ops without a Triton kernel."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from schedbench.sched.kernels import verify
from schedbench.sched.kernels.declare import Work, kernels
from schedbench.sched.kernels.sampling import sample_greedy_tagged, sample_tagged
from schedbench.sched.kernels.tags import kv_tags
from tests.sched.kernels.test_speculation_kernels import PARENTS, ROWS, STEPS, VOCAB, B, D, floats, ids
from tests.sched.kernels.triton_cases.case import INT32, INT64, Op, placed
from tests.sched.kernels.triton_parity import CASES as TRITON
from tests.sched.model.test_model_kernels import CASES as MODEL

[SAMPLED] = [case.make() for name, case in TRITON.items() if name == "sample of 37 ids, masked"]
OTHERS: dict[str, tuple[Op, list[Any]]] = {
    "tree_links": (verify.tree_links, [PARENTS]),
    "accept_drafts of a whole chain": (verify.accept_drafts, [ids(B, D), None, ids(B * D), D]),
    "accept_simulated": (
        verify.accept_simulated,
        [torch.zeros(4, dtype=INT64), ROWS, ids(B), ids(B * D), D, 2.5, False, 0],
    ),
    "path_tokens": (verify.path_tokens, [ids(B, D), verify.tree_paths(PARENTS, STEPS + 2)[0]]),
    "along_paths": (verify.along_paths, [floats(B, VOCAB), floats(B, 1), ids(B * D, 2), True]),
    "count_accepted": (verify.count_accepted, [floats(B, VOCAB), floats(B, 1), ids(B, 4), False]),
    "sample_tagged": (sample_tagged, [*SAMPLED, torch.arange(6)]),
    "sample_greedy_tagged": (sample_greedy_tagged, [floats(4, 70), None, torch.arange(4)]),
    "sample_greedy_tagged, masked": (
        sample_greedy_tagged,
        [floats(4, 70), torch.full((4, 3), -1, dtype=INT32), torch.arange(4)],
    ),
}
# A stride of a dimension of one element differs here; the table is not read where no pages are copied.
FREE_STRIDE, UNREAD = "best 1 of 2500", "decode inputs"
CASES = {**{name: (case.op, case.make()) for name, case in TRITON.items()}, **MODEL, **OTHERS}


def tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def layouts(tensors: list[torch.Tensor], *, strides: bool) -> list[Any]:
    return [(t.shape, t.dtype, t.stride() if strides else None) for t in tensors]


@pytest.mark.parametrize("name", CASES)
def test_an_op_does_what_it_declares(name: str) -> None:
    op, args = CASES[name]
    entry, used = kernels()[op], placed(list(args), None, "cpu")
    accesses, outlines = entry.footprint(*used), tensors(entry.meta(*args))
    results = tensors(op(*used))
    strides = name != FREE_STRIDE
    assert layouts(outlines, strides=strides) == layouts(results, strides=strides)
    assert {outline.device.type for outline in outlines} <= {"meta"}
    floats = any(result.is_floating_point() for result in results)
    computed = entry.unread_floats or not any(tensor.is_floating_point() for tensor in tensors(list(args)))
    assert not (computed and floats), "floats that are computed where floats are skipped"
    assert name not in MODEL or not results or computed is not floats
    for before, after in zip(tensors(list(args)), tensors(used), strict=True):
        declared = [access for access in accesses if access.tensor is after]
        assert declared or name == UNREAD, "an argument without a declared access"
        changed = (before != after).nonzero()[:, 0].unique().tolist()
        if changed:
            rows = next(access.rows for access in declared if access.write)
            assert rows is None or {*changed} <= {*rows.flatten().tolist()}


@pytest.mark.parametrize("name", CASES)
def test_only_arguments_are_accessed_only_written_ones_changed_and_only_tags_are_free(name: str) -> None:
    op, args = CASES[name]
    entry, given = kernels()[op], tensors(list(args))
    named = dict(zip(entry.signature.types, args, strict=True))
    written = {id(tensor) for each in entry.signature.written for tensor in tensors(named[each])}
    for access in entry.footprint(*args):
        assert id(access.tensor) in (written if access.write else {*map(id, given)})
    assert (entry.cost is None) == (op is kv_tags)
    assert entry.cost is None or entry.cost(*args) > Work(0) or not given[0].numel()


def on_cuda(arg: Any) -> Any:
    """A fake tensor of the same layout on the CUDA device; other arguments stay as they are."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="cuda")


@pytest.mark.parametrize("name", TRITON)
def test_a_footprint_is_computed_from_device_tensors_alone(name: str) -> None:
    """Footprints that depend on values cannot be computed with fake tensors and are not examined here."""
    arguments = TRITON[name].arguments(torch.float32)
    with FakeTensorMode():
        try:
            kernels()[TRITON[name].op].footprint(*tree_map(on_cuda, arguments))
        except RuntimeError as error:
            assert not re.search(r"two (different )?devices", str(error))

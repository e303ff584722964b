"""Rows of sampling state: their uploads, how they move, and the launches of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from schedbench.sched.batch import ModelOutput
from schedbench.sched.config import SamplingParams
from schedbench.sched.kernels.declare import Access, kernels
from schedbench.sched.kernels.sampling import (
    Draw,
    row_seed,
    sample,
    sample_greedy,
    sample_greedy_tagged,
    sample_tagged,
    scale_repeated,
    score_tokens,
    withhold_stops,
)
from schedbench.sched.model.grammar import GrammarCache
from schedbench.sched.model.sampling import Sampler, SamplingInfo, host_rows, packed_words, unpacked
from schedbench.sched.model.upload import pack, unpack
from schedbench.sched.request import Request
from tests.sched.sampling.rows import CONFIG, OpRecord, info_of, requests

VARIED = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=5, min_p=0.1, frequency_penalty=0.5),
    SamplingParams(repetition_penalty=1.2, min_new_tokens=3),
]


def seq_lens_of(info: SamplingInfo) -> torch.Tensor:
    return torch.arange(3, 3 + len(info.params))


def test_parameters_are_uploaded_as_they_are() -> None:
    rows = info_of(VARIED).tensors
    assert torch.equal(rows.temperatures, torch.tensor([[0.0], [0.7], [1.2], [0.0]]))
    assert torch.equal(rows.top_ps, torch.tensor([1.0, 0.9, 1.0, 1.0]))
    assert torch.equal(rows.top_ks, torch.tensor([301, 301, 5, 301], dtype=torch.int32))
    assert torch.equal(rows.min_ps, torch.tensor([0.0, 0.0, 0.1, 0.0]))
    assert rows.sampling_seeds.tolist() == [row_seed(CONFIG.seed, i) for i in range(4)]


def test_packed_rows_are_views_of_the_same_values() -> None:
    reqs = requests(VARIED)
    words = torch.from_numpy(packed_words(host_rows(reqs, CONFIG)).copy())
    columns = SamplingInfo.from_requests(reqs, config=CONFIG).tensors
    for packed, column in zip(unpacked(words), columns, strict=True):
        assert packed.dtype == column.dtype
        assert torch.equal(packed, column)
        assert packed.untyped_storage().data_ptr() == words.untyped_storage().data_ptr()


def test_packing_keeps_shapes_and_dtypes() -> None:
    arrays = [
        np.array([[1.5], [2.5], [-0.5]], np.float32),
        np.arange(4, dtype=np.int64).reshape(2, 2),
        np.array([7], np.int32),
        np.zeros((2, 0), np.int64),
        np.array([2**62], np.int64),
    ]
    views = unpack(torch.from_numpy(pack(arrays)), like=arrays)
    for view, array in zip(views, arrays, strict=True):
        assert torch.equal(view, torch.from_numpy(array))


@pytest.mark.parametrize("packed", [False, True])
def test_rows_filter_and_merge(packed: bool) -> None:
    reqs = requests(VARIED)

    def info(chosen: list[Request]) -> SamplingInfo:
        made = SamplingInfo.from_requests(chosen, config=CONFIG)
        words = torch.from_numpy(packed_words(host_rows(chosen, CONFIG)).copy())
        return replace(made, rows=(words,)) if packed else made

    rows = info(reqs)
    before = rows.tensors.temperatures
    rows.filter([2, 0], torch.tensor([2, 0]))
    assert before.shape == (4, 1)
    assert rows.needs.filters and not rows.needs.greedy
    rows.merge(info(reqs[1:2]))
    assert rows.params == (VARIED[2], VARIED[0], VARIED[1]) and rows.grammars == (None,) * 3
    expected = SamplingInfo.from_requests([reqs[i] for i in (2, 0, 1)], config=CONFIG).tensors
    for got, want in zip(rows.tensors, expected, strict=True):
        assert torch.equal(got, want)
    rows.filter([1], torch.tensor([1]))
    assert rows.needs.greedy and not rows.needs.filters


def test_a_greedy_row_needs_no_filter() -> None:
    params = [SamplingParams(top_k=5, top_p=0.5), SamplingParams(temperature=1.0)]
    assert not info_of(params).needs.filters


@pytest.mark.parametrize("exact", [False, True])
def test_overlap_and_serial_penalise_alike(exact: bool) -> None:
    info = info_of(VARIED, exact=exact)
    for token in (5, 6, 6):
        assert info.penalizer_orchestrator is not None
        info.penalizer_orchestrator.cumulate_output_tokens(torch.full((4,), token))
    logits = torch.randn((4, 301), generator=torch.Generator().manual_seed(3))
    serial, forked = logits.clone(), logits.clone()
    info.apply_penalties(serial)
    copied = info.copy_for_forward()
    assert (copied.penalizer_orchestrator is not None) == exact
    copied.apply_penalties(forked)
    torch.testing.assert_close(serial, forked, rtol=1e-6, atol=1e-6)
    assert torch.equal(serial, forked) or not exact


def test_counting_in_the_forwards_copy_reaches_the_batch() -> None:
    info = info_of(VARIED, exact=True)
    copied = info.copy_for_forward()
    assert copied.penalizer_orchestrator is not None
    copied.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([4, 4, 4, 4]))
    logits = torch.ones((4, 301))
    info.apply_penalties(logits)
    assert logits[:, 4].tolist() == pytest.approx([1.0, 1.0, 0.5, 1 / 1.2])


def test_a_steady_greedy_step_is_one_launch() -> None:
    info = info_of([SamplingParams()] * 3)
    output, seq_lens = ModelOutput(torch.randn(3, 301)), seq_lens_of(info)
    with OpRecord() as record:
        copied = info.copy_for_forward()
        copied.update_vocab_mask()
        Sampler().sample(output, copied, seq_lens)
    assert record.names == ["sample_greedy"]


LAUNCHES = {
    "temperature": (SamplingParams(temperature=1.0), ["sample"]),
    "frequency": (SamplingParams(frequency_penalty=1.0), ["sub_", "sample_greedy", "scatter_add_"]),
    "repetition": (SamplingParams(repetition_penalty=2.0), ["scale_repeated", "sample_greedy", "scatter_"]),
    "min_new_tokens": (SamplingParams(min_new_tokens=2), ["withhold_stops", "sample_greedy", "add_"]),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_launches_of_a_steady_exact_step(case: str) -> None:
    params, expected = LAUNCHES[case]
    info = info_of([params] * 3, exact=True)
    output, seq_lens = ModelOutput(torch.randn(3, 301)), seq_lens_of(info)
    with OpRecord() as record:
        copied = info.copy_for_forward()
        ids = Sampler().sample(output, copied, seq_lens)
        if copied.penalizer_orchestrator is not None:
            copied.penalizer_orchestrator.cumulate_output_tokens(ids)
    assert (copied.penalizer_orchestrator is None) == (not params.penalised)
    assert [name for name in record.names if name not in ("unsqueeze", "view")] == expected


def test_nothing_waits_for_the_device() -> None:
    """Runs everything between two uploads, with the torch code inside the kernels dispatched one by one."""
    info = info_of(VARIED)
    joining = info_of(VARIED[1:])
    keep = torch.tensor([3, 1, 2])
    mask = torch.full((3, 10), -1, dtype=torch.int32)
    output = ModelOutput(torch.randn(3, 301))
    with OpRecord() as record:
        info.filter([3, 1, 2], keep)
        assert info.penalizer_orchestrator is not None
        info.penalizer_orchestrator.cumulate_output_tokens(keep)
        forward = replace(info.copy_for_forward(), vocab_mask=mask)
        ids = Sampler().sample(output, forward, keep)
        Sampler().score(output, forward, keep, ids)
        joining.filter([0, 1, 2], torch.arange(3))
        info.merge(joining)
        draw = Draw(output.logits, *_in_kernel_order(forward), keep, mask, True)
        for op, args in (
            (sample, draw),
            (sample_tagged, (*draw, keep)),
            (score_tokens, (*draw, ids)),
            (sample_greedy, (output.logits, mask)),
            (sample_greedy_tagged, (output.logits, mask, keep)),
            (scale_repeated, (output.logits, output.logits.abs() + 1)),
            (withhold_stops, (output.logits, output.logits, keep.view(3, 1), keep.view(3, 1))),
        ):
            kernels()[op].impl(*args)
    assert "sample" in record.names and "sort" in record.names


def _in_kernel_order(info: SamplingInfo) -> tuple[torch.Tensor, ...]:
    rows = info.tensors
    return rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps, rows.sampling_seeds


def test_kernels_declare_their_costs() -> None:
    b, vocab = 4, 70
    logits, ids = torch.randn(b, vocab), torch.arange(b)
    column, words = torch.ones(b, 1), torch.full((b, 3), -1, dtype=torch.int32)
    draw = Draw(logits, column, ids.int(), column[:, 0], column[:, 0], ids, ids, words, False)
    logits_bytes, row_bytes = 4 * b * vocab, b * (4 + 4 + 4 + 4 + 8 + 8 + 12)
    assert kernels()[sample_greedy].cost(logits, words).bytes == logits_bytes + 12 * b + 8 * b
    assert kernels()[sample_greedy_tagged].cost(logits, None, ids).bytes == logits_bytes + 8 * b
    assert kernels()[sample].cost(*draw).bytes == logits_bytes + row_bytes + 8 * b
    assert kernels()[sample].cost(*draw[:-1], True).bytes == 3 * logits_bytes + row_bytes + 8 * b
    assert kernels()[sample_tagged].cost(*draw, ids) == kernels()[sample].cost(*draw)
    assert kernels()[scale_repeated].cost(logits, logits).bytes == 3 * logits_bytes
    *_, last = kernels()[withhold_stops].footprint(logits, logits, column, column)
    assert last == Access(logits, write=True)


@pytest.mark.parametrize("greedy", [True, False])
def test_a_fingerprint_decides_the_token(greedy: bool) -> None:
    params = SamplingParams(temperature=0.0 if greedy else 1.0)
    info = info_of([params] * 3)
    fingerprint, seq_lens = torch.tensor([5, 6, 5]), seq_lens_of(info)
    first = Sampler().sample(ModelOutput(torch.randn(3, 301), fingerprint), info, seq_lens)
    again = Sampler().sample(ModelOutput(torch.randn(3, 301), fingerprint), info, seq_lens + 1)
    assert torch.equal(first, again)
    assert first[0] == first[2] != first[1]


def test_the_mask_holds_each_rows_grammar() -> None:
    reqs = requests([SamplingParams(), SamplingParams(temperature=1.0)])
    reqs[1].grammar = GrammarCache(CONFIG.vocab_size, CONFIG.eos_token_ids).start(("choice", ("yes", "yet")))
    info = SamplingInfo.from_requests(reqs, config=CONFIG)
    assert info.needs.grammar
    info.update_vocab_mask()
    assert info.vocab_mask is not None and info.vocab_mask.shape == (2, 10)
    output = ModelOutput(torch.randn(2, 301))
    assert Sampler().sample(output, info, seq_lens_of(info))[1] == ord("y")
    assert info.vocab_mask[0].tolist() == [-1] * 10
    info.filter([0], torch.tensor([0]))
    assert info.vocab_mask is None and not info.needs.grammar
    info.update_vocab_mask()
    assert info.vocab_mask is None

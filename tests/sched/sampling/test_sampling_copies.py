"""The copies and waits of sampling, counted by the virtual GPU: upstream's rows, and the changes by switches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from schedbench.sched.batch import ModelOutput
from schedbench.sched.config import EngineConfig, SamplingParams
from schedbench.sched.model.grammar import GrammarCache
from schedbench.sched.model.sampling import Sampler, SamplingInfo
from schedbench.sched.model.upload import Upload
from tests.profiles.recorders import OperationCounter, counted_gpu
from tests.sched.sampling.rows import CONFIG, info_of, requests

PLAIN = SamplingParams(temperature=1.0, top_p=0.9)
PENALISED = SamplingParams(
    frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2, min_new_tokens=3
)


@pytest.fixture
def tally() -> Iterator[OperationCounter]:
    with counted_gpu() as tally:
        yield tally


@pytest.fixture
def vgpu_config(tally: OperationCounter) -> EngineConfig:
    return replace(CONFIG, device=tally.gpu.device, capabilities=tally.gpu.capabilities)


@pytest.mark.parametrize(
    ("how", "plain", "penalised"),
    [
        ("pageable", {"h2d!": 5, "sync": 5}, {"h2d!": 10, "sync": 10}),
        ("pinned", {"h2d": 5}, {"h2d": 10}),
        ("packed", {"h2d": 1}, {"h2d": 2}),
    ],
)
def test_uploads_of_a_prefill(
    tally: OperationCounter,
    vgpu_config: EngineConfig,
    how: Upload,
    plain: dict[str, int],
    penalised: dict[str, int],
) -> None:
    """Four parameters and the seed, one more per penalizer, and the stop tokens of min_new_tokens."""
    info_of([PLAIN] * 3, vgpu_config, how=how)
    assert tally.since_last() == plain
    info_of([PLAIN, PENALISED], vgpu_config, how=how)
    counts = tally.since_last()
    assert {name: counts.get(name, 0) for name in penalised} == penalised
    assert counts.get("d2h!", 0) == counts.get("d2h", 0) == 0


def test_without_pinned_memory_every_upload_waits(tally: OperationCounter, vgpu_config: EngineConfig) -> None:
    config = replace(vgpu_config, capabilities=replace(vgpu_config.capabilities, pinned_memory=False))
    info_of([PLAIN], config, how="packed")
    assert tally.since_last() == {"h2d!": 5, "sync": 5}


def test_merging_uploads_only_what_one_side_lacks(tally: OperationCounter, vgpu_config: EngineConfig) -> None:
    running = info_of([PENALISED], vgpu_config)
    joining = [info_of([p], vgpu_config) for p in (PENALISED, PLAIN)]
    tally.since_last()
    running.merge(joining[0])
    assert "h2d!" not in tally.since_last()
    running.merge(joining[1])
    assert tally.since_last()["h2d!"] == 5


@pytest.mark.parametrize("exact", [False, True])
def test_a_penalised_decode_neither_copies_nor_waits(
    tally: OperationCounter, vgpu_config: EngineConfig, exact: bool
) -> None:
    info = info_of([PENALISED, PLAIN], vgpu_config, exact=exact)
    ids = torch.tensor([4, 5], device=vgpu_config.device)
    output = ModelOutput(torch.randn((2, vgpu_config.vocab_size)).to(vgpu_config.device))
    tally.since_last()
    orchestrator = info.penalizer_orchestrator
    assert orchestrator is not None
    orchestrator.cumulate_output_tokens(ids)
    Sampler().sample(output, info.copy_for_forward(), ids)
    counts = tally.since_last()
    assert not counts.keys() & {"h2d", "h2d!", "d2h", "d2h!", "sync"}
    assert sum(counts.values()) == (9 if exact else 13)


@pytest.mark.parametrize(("pinned", "expected"), [(True, {"h2d": 1}), (False, {"h2d!": 1, "sync": 1})])
def test_a_grammar_mask_is_one_upload_per_step(
    tally: OperationCounter, vgpu_config: EngineConfig, pinned: bool, expected: dict[str, int]
) -> None:
    capabilities = replace(vgpu_config.capabilities, pinned_memory=pinned)
    reqs = requests([PLAIN] * 3)
    reqs[1].grammar = GrammarCache(301, (2,)).start(("choice", ("yes",)))
    info = SamplingInfo.from_requests(reqs, config=replace(vgpu_config, capabilities=capabilities))
    tally.since_last()
    info.update_vocab_mask()
    assert tally.since_last() == expected


@pytest.mark.parametrize("how", ["pageable", "pinned", "packed"])
def test_tokens_do_not_depend_on_how_parameters_travel(vgpu_config: EngineConfig, how: Upload) -> None:
    reqs = requests([PLAIN, PENALISED, SamplingParams(temperature=0.7, top_k=9, min_p=0.1)])
    logits = torch.randn((3, CONFIG.vocab_size), generator=torch.Generator().manual_seed(1))
    seq_lens = torch.tensor([9, 8, 7])
    host = SamplingInfo.from_requests(reqs, config=CONFIG)
    expected = Sampler().sample(ModelOutput(logits.clone()), host, seq_lens)
    device = vgpu_config.device
    info = SamplingInfo.from_requests(reqs, config=vgpu_config, how=how)
    ids = Sampler().sample(ModelOutput(logits.to(device)), info.copy_for_forward(), seq_lens.to(device))
    assert ids.tolist() == expected.tolist()


def test_values_none_takes_tokens_from_fingerprints() -> None:
    with counted_gpu("none") as tally:
        gpu = tally.gpu
        config = replace(CONFIG, device=gpu.device, capabilities=gpu.capabilities)
        info = info_of([PLAIN, PENALISED], config, how="packed")
        fingerprint = torch.tensor([12, -12], device=gpu.device)
        logits = torch.empty((2, CONFIG.vocab_size), device=gpu.device)
        tally.since_last()
        ids = Sampler().sample(ModelOutput(logits, fingerprint), info, fingerprint)
        assert tally.since_last().keys() >= {"sub_", "scale_repeated", "sample_tagged"}
        again = Sampler().sample(ModelOutput(logits, fingerprint), info, fingerprint + 1)
        assert ids.tolist() == again.tolist()
        assert all(0 <= token < CONFIG.vocab_size for token in ids.tolist())

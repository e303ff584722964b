"""Attention by a planned library, with one in its place that has the wrappers as they are documented."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from schedbench.profiles.platform import attention as choosing
from schedbench.profiles.platform.machine import MachineError
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.run import machines
from schedbench.sched.batch import ForwardBatch, ForwardMode
from schedbench.sched.kernels.attention import attention
from schedbench.sched.model.planned import FlashInfer
from tests.acceptance.questions import SMALL, asked

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
CONFIG: Any = SimpleNamespace(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)


@dataclass
class Wrapper:
    """Computes request by request with torch's own attention; keeps what it was told."""

    workspace: torch.Tensor
    layout: str
    use_tensor_cores: bool = False
    plans: list[tuple[Any, ...]] = field(default_factory=list)
    made: ClassVar[list[Wrapper]] = []

    def __post_init__(self) -> None:
        assert self.layout == "NHD"
        self.made.append(self)

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        queries, indptr, indices, last, how = self.plans[-1]
        assert all(cache.shape[1] == 1 for cache in caches) and last.tolist() == [1] * (len(indptr) - 1)
        out = []
        for i in range(len(indptr) - 1):
            slots = indices[indptr[i] : indptr[i + 1]].long()
            keys, values = (
                cache[slots, 0].repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1)
                for cache in caches
            )
            mine = q[queries[i] : queries[i + 1]].transpose(0, 1)
            mask = torch.ones(mine.shape[1], len(slots), dtype=torch.bool).tril(len(slots) - mine.shape[1])
            attended = torch.nn.functional.scaled_dot_product_attention(
                mine, keys, values, attn_mask=mask, scale=how["sm_scale"]
            )
            out.append(attended.transpose(0, 1))
        return torch.cat(out)


class Decode(Wrapper):
    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, **how: Any,
    ) -> None:  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (HEADS, KV_HEADS, HEAD_DIM, 1)
        queries = torch.arange(len(indptr), dtype=torch.int32)
        self.plans.append((queries, indptr, indices, last_page_len, how))


class Prefill(Wrapper):
    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int,
        page_size: int, *, causal: bool, **how: Any,
    ) -> None:  # fmt: skip
        assert causal and (num_qo_heads, num_kv_heads, head_dim_qk, page_size) == (
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            1,
        )
        self.plans.append((qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, how))


LIBRARY = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Decode, BatchPrefillWithPagedKVCacheWrapper=Prefill
)


def batch(lens: Sequence[int], new: Sequence[int] | None) -> ForwardBatch:
    tokens = len(lens) if new is None else sum(new)
    nothing = torch.zeros(tokens, dtype=torch.int64)
    return ForwardBatch(
        mode=ForwardMode.DECODE if new is None else ForwardMode.EXTEND,
        batch_size=len(lens),
        num_tokens=tokens,
        input_ids=nothing,
        positions=nothing,
        req_pool_indices=torch.arange(len(lens)).flip(0) + 1,
        seq_lens=torch.tensor(lens),
        out_cache_loc=nothing,
        max_seq_len=max(lens),
        extend_lens=None if new is None else torch.tensor(new, dtype=torch.int32),
        max_extend_len=1 if new is None else max(new),
    )


@pytest.fixture(autouse=True)
def afresh() -> None:
    Wrapper.made.clear()


@pytest.mark.parametrize(
    ("lens", "new"),
    [((5,), None), ((3, 17, 1), None), ((4, 9), (4, 9)), ((12, 6, 8), (1, 6, 3))],
    ids=["one", "several", "prompts", "prompts with prefixes"],
)
def test_it_attends_as_our_kernel_does(lens: tuple[int, ...], new: tuple[int, ...] | None) -> None:
    torch.manual_seed(3)
    table = torch.randperm(8 * 20)[: 4 * 20].view(4, 20).to(torch.int32)
    keys, values = torch.randn(2, 8 * 20, KV_HEADS, HEAD_DIM)
    asked = batch(lens, new)
    planned = FlashInfer(CONFIG, table, library=LIBRARY)
    planned.plan(asked)
    for _ in range(2):  # layers
        q = torch.randn(asked.num_tokens, HEADS, HEAD_DIM)
        ours = attention(
            q, keys, values, table, asked.req_pool_indices, asked.seq_lens, asked.extend_lens,
            HEAD_DIM**-0.5, asked.max_seq_len, asked.max_extend_len,
        )  # fmt: skip
        assert torch.allclose(planned(q, keys, values), ours, atol=1e-5)
    assert [len(wrapper.plans) for wrapper in Wrapper.made] == ([1, 0] if new is None else [0, 1])
    assert Wrapper.made[0].workspace is Wrapper.made[1].workspace


def test_many_query_heads_of_a_kv_head_are_for_tensor_cores() -> None:
    config = SimpleNamespace(**{**vars(CONFIG), "num_heads": 32, "num_kv_heads": 8})
    for each, expected in ((CONFIG, False), (config, True)):
        Wrapper.made.clear()
        FlashInfer(each, torch.zeros(2, 2, dtype=torch.int32), library=LIBRARY)
        assert Wrapper.made[0].use_tensor_cores is expected


# ---- in runs -----------------------------------------------------------------------------------------------


@dataclass
class OnDevice:
    """The same wrappers for a virtual GPU, by our own kernel. ``plan`` brings what it is given to the device."""

    workspace: torch.Tensor
    layout: str
    use_tensor_cores: bool = False
    shape: tuple[Any, ...] = ()

    def _plan(self, queries: torch.Tensor | None, indptr: torch.Tensor, indices: torch.Tensor) -> None:
        lens = indptr.diff()
        table = torch.zeros(len(lens), int(lens.max()), dtype=torch.int32, device=indices.device)
        for i, length in enumerate(lens.tolist()):
            table[i, :length] = indices[int(indptr[i]) : int(indptr[i]) + length]
        new = None if queries is None else queries.diff().to(indices.device)
        most = 1 if queries is None else int(queries.diff().max())
        rows, on_device = torch.arange(len(lens), device=indices.device), lens.long().to(indices.device)
        self.shape = (table, rows, on_device, new, int(lens.max()), most)

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        table, rows, lens, new, longest, most = self.shape
        keys, values = (cache[:, 0] for cache in caches)
        out: torch.Tensor = attention(
            q, keys, values, table, rows, lens, new, q.shape[2] ** -0.5, longest, most
        )
        return out.view(q.shape)


class DecodeOnDevice(OnDevice):
    def plan(self, indptr: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> None:
        self._plan(None, indptr, indices)


class PrefillOnDevice(OnDevice):
    def plan(
        self, queries: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any
    ) -> None:
        self._plan(queries, indptr, indices)


PLANNED = "engine.attention=flashinfer"


def test_whole_runs_have_the_same_tokens_and_show_what_a_plan_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=DecodeOnDevice, BatchPrefillWithPagedKVCacheWrapper=PrefillOnDevice
    )
    plain = asked("mixed", *SMALL, "engine.relay=latest", "workload.requests=6")
    ours = execute(plain, plain.relays[0], Options(device="vgpu")).result
    monkeypatch.setattr(choosing, "import_module", lambda _: library)
    monkeypatch.setattr(choosing, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(machines, "obstacle", lambda *_, **__: "")
    question = asked("mixed", *SMALL, "engine.relay=latest", "workload.requests=6", PLANNED)
    theirs = execute(question, question.relays[0], Options(device="vgpu")).result
    assert theirs.outputs == ours.outputs
    for kind in ("decode", "mixed"):
        before, after = (run.per_step[kind].streams["forward"] for run in (ours, theirs))
        assert "d2h_blocking" not in before
        assert after["d2h_blocking"].median == after["d2h_blocking"].max == 1
    waited = [
        row for row in theirs.copies if row.direction == "d2h" and row.blocking and row.stream == "forward"
    ]
    assert {row.site and row.site.statement for row in waited} == {"on_host = torch.stack((lens, new)).cpu()"}


@pytest.mark.parametrize(
    ("device", "available", "says"),
    [
        ("vgpu", False, "has kernels for CUDA only"),
        ("auto", False, "has kernels for CUDA only"),
        ("cuda", False, "no CUDA device here"),
        ("cuda", True, "pip install 'schedbench[flashinfer]'"),
        ("auto", True, "pip install 'schedbench[flashinfer]'"),
    ],
)
def test_where_it_cannot_be_had_it_says_so(
    device: Any, available: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    with pytest.raises(MachineError, match=says.replace("[", r"\[").replace("]", r"\]")):
        machines.chosen(device, asked("mixed", PLANNED).scenario)


def test_it_computes_in_half_precision_only() -> None:
    question = asked("mixed", PLANNED)
    with pytest.raises(MachineError, match="float16 and bfloat16"):
        choosing.planned(question.scenario, question.model, torch.zeros(1, 1, dtype=torch.int32))

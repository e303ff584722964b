"""KV on the host in SGLang's own scheduler, from the wheel of a release (see ``test_sglang.py``)."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from schedbench.profiles.engines.client import EngineFailedError
from schedbench.profiles.engines.sglang.hisparse_kernels import load_cache_to_device_buffer
from schedbench.profiles.record.result import Result

from .conftest import findings
from .test_sglang import BEFORE, WHEELS, at, changed, given, given_wheels, median, run

RELEASE = "0.5.23"
SENTINELS, LENGTHS = "8b473aa0b", "c4b6b5ea1"  # #25944 and #26020
HOSTED = ("engine.page_size=64", "engine.hisparse.device_buffer_size=64")
COORDINATOR = "sglang/srt/managers/hisparse_coordinator.py"


def hosted(engine: str | None, *overrides: str, hazards: bool = False) -> Result:
    return run(engine, *HOSTED, *overrides, scenario="hisparse", hazards=hazards)


# ---- the kernel ----------------------------------------------------------------------------------------------


class Buffers:
    """One layer, and three rows of four slots and one for the newest token. Row 0 is padding."""

    def __init__(self) -> None:
        self.tokens = torch.arange(5, dtype=torch.int32).repeat(3, 1)
        self.tokens[:, 4] = -1
        self.slots = torch.tensor([[0] * 5, [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]], dtype=torch.int32)
        self.host_slots = torch.arange(24).view(3, 8)
        self.host = 100.0 + torch.arange(24.0).view(24, 1, 1)
        self.device = torch.zeros(32, 1, 1)
        self.lru = torch.arange(4, dtype=torch.int16).repeat(3, 1)

    def locations(self, positions: list[list[int]], rows: list[int], lens: list[int]) -> list[list[int]]:
        chosen = torch.tensor(positions, dtype=torch.int32)
        found = torch.full_like(chosen, 7)
        tables = chosen, self.tokens, self.host_slots, self.slots, self.host, self.device, found
        real = torch.tensor([len([length for length in lens if length])], dtype=torch.int32)
        load_cache_to_device_buffer(*tables, torch.tensor(rows), torch.tensor(lens), self.lru, real)
        return found.tolist()


def test_missing_tokens_replace_those_that_were_used_the_longest_ago() -> None:
    """Position 1 is found; 5 and 4 take the first two slots of those that are not; 6 is the newest."""
    buffers = Buffers()
    assert buffers.locations([[1, 4, 5, 6]], [2], [7]) == [[21, 20, 22, 24]]
    assert buffers.tokens[2].tolist() == [4, 1, 5, 3, -1]
    assert buffers.lru[2].tolist() == [3, 0, 2, 1]
    assert buffers.device[[20, 22], 0, 0].tolist() == [100 + 20, 100 + 21]
    assert buffers.locations([[0, 1, 4, 7]], [2], [8]) == [[23, 21, 20, 24]]
    assert buffers.lru[2].tolist() == [2, 3, 0, 1]
    assert torch.equal(buffers.tokens[1], Buffers().tokens[1])


def test_a_short_request_has_its_tokens_in_order_and_padding_has_none() -> None:
    buffers = Buffers()
    assert buffers.locations([[0, 1, 2, -1], [3, 3, 3, 3]], [1, 0], [3, 0]) == [[10, 11, 12, 0], [0] * 4]
    assert torch.equal(buffers.tokens, Buffers().tokens)
    assert not buffers.device.any()


# ---- whole runs ----------------------------------------------------------------------------------------------


@given_wheels
@pytest.mark.parametrize(
    "overrides",
    [(), ("engine.overlap=false",), ("engine.cuda_graph=false",), ("engine.kv_tokens=1024",)],
    ids=["overlapped", "serial", "eager", "few KV tokens"],
)
def test_greedy_tokens_equal_our_schedulers(overrides: tuple[str, ...]) -> None:
    assert hosted(f"sglang=={RELEASE}", *overrides).outputs == hosted(None, *overrides).outputs


@given_wheels
def test_a_steady_decode_backs_up_its_previous_tokens_beside_the_forward() -> None:
    """One kernel copies the tokens of all requests in all layers. The numbers of these requests are uploaded without
    waiting, and a prompt is copied as a whole once."""
    result = hosted(f"sglang=={RELEASE}", hazards=True)
    streams = result.per_step["decode.steady"].streams
    assert streams["backup"]["kernel"].median == 1
    assert streams["schedule"]["h2d"].median == 1
    assert streams["schedule"]["sync"].median == 0
    assert median(result, "prefill", "staging", "kernel") == 1
    functions = {row.site.function for row in result.copies if row.site and row.stream == "schedule"}
    assert "HiSparseCoordinator._eager_backup_previous_token" in functions
    assert {finding.resource for finding in findings(result)} == {"new_seq_lens_buf"}


@given_wheels
def test_a_forward_that_does_not_wait_for_the_backup_is_a_hazard(tmp_path: Path) -> None:
    with zipfile.ZipFile(next(Path(WHEELS).glob(f"sglang-{RELEASE}-*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    changed(tmp_path / COORDINATOR, "self._backup_done_event.wait(device_module.current_stream())", "pass")
    assert any(
        {finding.first.stream, finding.second and finding.second.stream} == {"forward", "backup"}
        for finding in findings(hosted(f"sglang:{tmp_path}", hazards=True))
    )


@given
def test_the_commits_of_the_ladder_have_the_errors_that_it_is_said_to_have() -> None:
    """After #25944 hot buffers are found by sentinels instead of lengths, which #26020 mends; #26425 forgets the rows
    of the batch that rejoins (``docs/hisparse.md``)."""
    ours = hosted(None).outputs
    assert hosted(at(SENTINELS)).outputs != ours
    mended = hosted(at(LENGTHS))
    assert mended.outputs == ours
    assert mended.per_step["decode.steady"].streams["schedule"]["d2h_blocking"].median == 1
    with pytest.raises(EngineFailedError) as crashed:
        hosted(at(BEFORE))
    assert "req_idx = int(req_pool_indices_cpu[i])" in str(crashed.value)

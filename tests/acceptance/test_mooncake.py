"""A Mooncake trace on the shape of an 8B model, without its arithmetic."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedbench.profiles.judge.effects import metric_values
from schedbench.profiles.record.result import Result
from tests.acceptance.runs import digest_of, result_of, statuses, value

BLOCK = 512  # prompt tokens of one hash id
RECORDED = Path(__file__).parents[3] / "shared/data/mooncake_conversation_head1500.jsonl"


def conversations(*, clients: int, turns: int) -> Iterator[dict[str, object]]:
    """Every turn repeats its conversation so far, after a system prompt that all share."""
    dice = random.Random(0)
    ids = iter(range(1, 10**6))
    histories = [[0] for _ in range(clients)]
    for turn in range(turns):
        for client, history in enumerate(histories):
            history += [next(ids) for _ in range(dice.randint(1, 4))]
            length = len(history) * BLOCK - dice.randrange(BLOCK)
            yield {
                "timestamp": 2000 * turn + 30 * client,
                "input_length": length,
                "output_length": dice.randint(2, 40),
                "hash_ids": history.copy(),
            }


def write_trace(file: Path, *, clients: int, turns: int) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in conversations(clients=clients, turns=turns)))
    return file


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("mooncake") / "trace.jsonl", clients=8, turns=4)


@pytest.fixture(scope="module")
def result(trace: Path) -> Result:
    return result_of("trace_mooncake", f"workload.trace={trace}")


@pytest.fixture(scope="module")
def uncached(trace: Path) -> Result:
    return result_of("trace_mooncake", f"workload.trace={trace}", "engine.radix_cache=false")


def test_prompts_and_outputs_are_as_long_as_recorded(result: Result, trace: Path) -> None:
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert statuses(result) == {"finished"}
    assert [row.prompt_tokens for row in result.requests] == [line["input_length"] for line in lines]
    assert [row.output_tokens for row in result.requests] == [line["output_length"] for line in lines]
    assert [row.arrival for row in result.requests] == [line["timestamp"] * 10**6 for line in lines]


@pytest.mark.wide
def test_shared_prefixes_are_found(result: Result, uncached: Result) -> None:
    """All but the first turns repeat most of their prompt."""
    assert 0.3 < value(result, "cache_hit_ratio") < 0.9
    assert value(uncached, "cache_hit_ratio") == 0


def test_cached_prefixes_save_time_and_change_no_token(result: Result, uncached: Result) -> None:
    assert value(result, "ttft_ms") < value(uncached, "ttft_ms")
    assert digest_of(result) == digest_of(uncached)


@pytest.mark.slow
def test_the_recorded_trace_finishes() -> None:
    """All 1,500 requests of a real service. The recording lies beside the repository."""
    recorded = result_of("trace_mooncake", f"workload.trace={RECORDED}", "workload.requests=1500")
    assert len(recorded.requests) == 1500
    finished = sum(row.status == "finished" for row in recorded.requests)
    assert finished >= 0.99 * len(recorded.requests)
    assert value(recorded, "cache_hit_ratio") > 0


@pytest.mark.slow
def test_disaggregation_beats_replicas_at_a_high_rate() -> None:
    """Compares the slowest tenth of requests. At a low rate the single prefill worker is the bottleneck; at a higher
    one prefills delay the replicas' decodes."""

    def slowest(rate: str, how: str) -> float:
        found = result_of(
            "trace_mooncake",
            f"workload.trace={RECORDED}",
            "workload.requests=100",
            f"workload.arrival={{process: poisson, rate: {rate}}}",
            "engine.relay=latest",
            how,
        )
        return metric_values(found, ("e2e_ms.p90",))["e2e_ms.p90"].value

    alike, apart = "engine.replicas=2", "engine.disaggregation.mode=pair"
    assert slowest("0.25", apart) > 1.1 * slowest("0.25", alike)
    assert slowest("1.25", apart) < 0.9 * slowest("1.25", alike)

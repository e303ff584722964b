"""``schedbench onebatch``: latencies by batch and prompt, the scheduler's own tokens, every format, and refusals."""

from __future__ import annotations

import csv
import io
import json

import pytest

from tests.acceptance.runs import digest
from tests.conftest import RunCommand

SMALL = ("--batch", "1,4", "--prompt", "16,64", "--output", "6", "--device", "vgpu")
NONE = ("--set", "device.values=none")


def points(run_command: RunCommand, *arguments: str) -> list[dict]:
    said = run_command("onebatch", "mixed", *SMALL, *arguments, "--format", "json")
    assert said.code == 0, said.err
    return json.loads(said.out)["points"]


@pytest.mark.parametrize("relay", ["pr25774-before", "pr25944", "pr25945", "latest"])
def test_the_tokens_equal_those_of_the_scheduler(run_command: RunCommand, relay: str) -> None:
    for point in points(run_command, *NONE, "--relay", relay):
        static = ("workload.arrival=burst", "workload.shared_prefix=null", "measure.warmup_requests=0")
        lengths = {"requests": "batch", "prompt_tokens": "prompt", "output_tokens": "output"}
        same = [f"workload.{key}={point[name]}" for key, name in lengths.items()]
        assert point["digest"] == digest("mixed", "device.values=none", *static, *same)


def test_latencies_grow_with_batch_and_prompt_on_a_large_model(run_command: RunCommand) -> None:
    sizes = ["--batch", "1,8", "--prompt", "128,2048", "--output", "3"]
    said = run_command("onebatch", "overlap_on", *sizes, "--format", "json")
    rows = {(row["batch"], row["prompt"]): row for row in json.loads(said.out)["points"]}
    assert rows[8, 2048]["prefill_ms"] > 4 * rows[8, 128]["prefill_ms"] > rows[1, 128]["prefill_ms"]
    assert rows[8, 2048]["decode_ms"] > rows[8, 128]["decode_ms"] > rows[1, 128]["decode_ms"]
    row = rows[8, 128]
    assert row["prefill_throughput"] == pytest.approx(8 * 128 / row["prefill_ms"] * 1e3)
    assert row["decode_throughput"] == pytest.approx(8 / row["decode_ms"] * 1e3)
    assert row["total_ms"] == pytest.approx(row["prefill_ms"] + 2 * row["decode_ms"], rel=1e-2)


def test_a_batch_that_does_not_fit_is_left_out(run_command: RunCommand) -> None:
    said = run_command("onebatch", "mixed", *NONE, *SMALL, "--set", "engine.kv_tokens=200")
    assert said.code == 0
    text = " ".join(said.out.split())
    assert "– 4 x 64: 280 KV tokens are needed, and engine.kv_tokens is 200" in text
    assert "a prefill takes" in text and "one static batch, without the scheduler" in text
    long = run_command("onebatch", "mixed", *NONE, "--batch", "1", "--prompt", "8200", "--device", "vgpu")
    assert long.code == 2 and "prompt and 16 tokens exceed the context of 8192" in long.err
    both = ("--batch", "1", "--prompt", "8", "--output", "2", "--set", "workload.encoder_tokens=60")
    encoder = run_command(
        "onebatch", "encoder_decoder", *both, "--set", "engine.kv_tokens=64", "--device", "vgpu"
    )
    assert encoder.code == 2 and "70 KV tokens are needed" in encoder.err
    none = run_command("onebatch", "mixed", *NONE, *SMALL, "--set", "engine.kv_tokens=20")
    assert none.code == 2 and "no batch fits" in none.err


def test_the_rows_of_csv_are_the_batches(run_command: RunCommand) -> None:
    said = run_command("onebatch", "mixed", *NONE, *SMALL, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert [row["batch"] + "x" + row["prompt"] for row in rows] == ["1x16", "4x16", "1x64", "4x64"]


def test_a_fault_that_breaks_the_run_is_named(run_command: RunCommand) -> None:
    said = run_command("onebatch", "mixed", *NONE, *SMALL, "--fault", "onebatch-never-resolves")
    assert said.code == 4 and "with fault onebatch-never-resolves the run broke down" in said.err

"""How requests end besides finishing: refused because they can never run, or aborted by their clients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from schedbench.profiles.platform.machine import Machine
from schedbench.profiles.record.result import RequestRow, Result
from schedbench.sched.loop.scheduler import Scheduler
from schedbench.sched.observe import Observer
from schedbench.sched.request import Request, Status
from tests.acceptance.runs import SMALL, digest_observed, resolved, result_of, statuses

LOOPS = ("engine.overlap=true", "engine.overlap=false")
FEW = (*SMALL, "workload.requests=8", "workload.output_tokens={dist: uniform, min: 12, max: 24}")


class TestTooLong:
    @pytest.fixture
    def scenario(self, tmp_path: Path) -> Path:
        lengths = [(40, 8), (600, 8), (50, 8), (500, 100), (60, 8)]
        lines = [{"input_length": prompt, "output_length": output} for prompt, output in lengths]
        (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
        file = tmp_path / "too_long.yaml"
        file.write_text(
            "name: too_long\n"
            "model: {preset: tiny-llama}\n"
            "engine: {relay: pr25945, kv_tokens: 512, max_running_requests: 4}\n"
            "workload: {trace: trace.jsonl, format: jsonl}\n"
        )
        return file

    @pytest.mark.parametrize("loop", LOOPS)
    @pytest.mark.parametrize("page", ["engine.page_size=1", "engine.page_size=16"])
    def test_is_refused_with_its_reason_and_the_run_goes_on(
        self, scenario: Path, loop: str, page: str
    ) -> None:
        result = result_of(scenario, loop, page)
        assert [row.status for row in result.requests] == [
            "finished",
            "refused",
            "finished",
            "refused",
            "finished",
        ]
        assert [row.reason for row in result.requests if row.status == "refused"] == [
            "600 prompt + 8 new tokens exceed the KV pool of 512 tokens",
            "500 prompt + 100 new tokens exceed the KV pool of 512 tokens",
        ]
        assert all(row.output_tokens == 0 for row in result.requests if row.status == "refused")

    def test_other_requests_have_the_same_tokens(self, scenario: Path) -> None:
        tight = result_of(scenario)
        roomy = result_of(scenario, "engine.kv_tokens=4096")
        assert statuses(roomy) == {"finished"}
        for refused_or_not, row in zip(tight.requests, roomy.requests, strict=True):
            assert refused_or_not.token_ids == (row.token_ids if refused_or_not.status == "finished" else ())


class EndRecorder(Observer):
    """Records how often each request ended, and with which status."""

    def __init__(self) -> None:
        self.endings: list[tuple[str, Status]] = []

    def ended(self, request: Request) -> None:
        self.endings.append((request.id, request.status))


def aborting(after: int) -> Sequence[str]:
    return *FEW, f"workload.abort={{fraction: 0.5, after_tokens: {after}}}"


def by_status(result: Result, status: str) -> dict[str, RequestRow]:
    return {row.id: row for row in result.requests if row.status == status}


@cache
def not_aborted(*overrides: str) -> Result:
    return result_of("mixed", *FEW, *overrides)


class TestAbort:
    @pytest.mark.parametrize(
        ("loop", "values", "after"),
        [*((loop, "none", after) for loop in LOOPS for after in (0, 1, 9)), (LOOPS[0], "real", 9)],
    )
    def test_aborted_requests_have_the_same_tokens_until_then(
        self, loop: str, values: str, after: int
    ) -> None:
        values = f"device.values={values}"
        whole = {row.id: row for row in not_aborted(values, loop).requests}
        result = result_of("mixed", *aborting(after), values, loop)
        aborted, finished = by_status(result, "aborted"), by_status(result, "finished")
        assert (len(aborted), len(finished)) == (4, 4)
        for row in aborted.values():
            assert row.reason == "aborted by its client"
            assert row.output_tokens == after
            assert row.token_ids == _first(whole[row.id], after)
        for row in finished.values():
            assert row.token_ids == whole[row.id].token_ids

    def test_named_requests_are_aborted(self) -> None:
        result = result_of("mixed", *FEW, "workload.abort={requests: [r3, r5], after_tokens: 4}")
        assert set(by_status(result, "aborted")) == {"r3", "r5"}

    @pytest.mark.parametrize("loop", LOOPS)
    def test_every_request_ends_once(self, loop: str) -> None:
        recorder = EndRecorder()

        def listener(machine: Machine, scheduler: Scheduler) -> Observer:  # noqa: ARG001
            return recorder

        digest_observed(resolved("mixed", *aborting(3), loop, "device.values=none"), listener)
        ids = [request for request, _ in recorder.endings]
        assert sorted(ids) == sorted(f"r{index}" for index in range(8))
        assert [status for _, status in recorder.endings].count(Status.ABORTED) == 4


def _first(row: RequestRow, count: int) -> tuple[int, ...]:
    assert row.token_ids is not None
    return row.token_ids[:count]

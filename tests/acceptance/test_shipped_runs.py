"""Every shipped scenario runs to its end and does what its name says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from schedbench.cli.result_page import labels
from schedbench.profiles.record.result import Metric, RequestRow, Result
from schedbench.scenarios import shipped
from schedbench.sched.observe import StepInfo
from tests.acceptance.runs import (
    SHORTER,
    InFlight,
    digest_observed,
    digest_of,
    known_result,
    resolved,
    result_of,
    statuses,
    value,
)

# Scenarios that need a user's file run elsewhere, on a file that the test writes.
ON_FILES = {"checkpoint", "trace_mooncake"}
# Requests of a run: enough for every kind of step of the scenario, and more where a claim needs them.
REQUESTS = {
    "dp_idle": 3,
    "grammar": 16,
    "penalties": 12,
    "prefill_heavy": 12,
    "retraction": 16,
    "shared_prefix": 24,
    "spec_grammar": 16,
}
NONE = "device.values=none"

NUMBER = re.compile(rb"-?[0-9]{1,12}(\.[0-9]{1,6})?")
TEXT = re.compile(rb"[ -~]{0,24}")
BEGUN_NUMBER = re.compile(rb"-?[0-9]{0,12}|-?[0-9]{1,12}\.[0-9]{0,6}")


def run(name: str, *overrides: str) -> Result:
    requests = f"workload.requests={REQUESTS.get(name, 8)}"
    return known_result(name, requests, *SHORTER.get(name, ()), *overrides)


@pytest.mark.parametrize("name", sorted(set(shipped.names()) - ON_FILES))
def test_every_request_finishes(name: str) -> None:
    """The hazard checker is on, because this runs every mode as it is shipped."""
    few = ("workload.requests=2", "workload.output_tokens={dist: uniform, min: 2, max: 6}")
    result = result_of(name, *few, "measure.warmup_requests=0", hazards=True)
    assert statuses(result) == {"finished"} and len(result.requests) == 2
    metrics = [metric for part in (result, *result.ranks) for metric in part.metrics.values()]
    assert all(metric.exact for metric in metrics if isinstance(metric, Metric))


@pytest.mark.wide
@pytest.mark.parametrize("name", sorted(set(shipped.names()) - ON_FILES))
def test_every_request_of_a_longer_run_finishes(name: str) -> None:
    result = run(name)
    assert result.requests
    assert statuses(result) == {"finished"}


def test_checkpoint_runs_on_a_checkpoint(checkpoint: Path) -> None:
    overrides = (f"model.path={checkpoint}", "engine.kv_tokens=1024")
    result = run("checkpoint", *overrides)
    assert statuses(result) == {"finished"}
    assert len(result.requests) == 8
    serial = run("checkpoint", *overrides, "engine.overlap=false", "engine.page_size=16")
    assert digest_of(serial) == digest_of(result)


def test_another_checkpoint_gives_other_tokens(checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    before = digest_of(run("checkpoint", f"model.path={checkpoint}"))
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 3.0'))
    assert digest_of(result_of("checkpoint", f"model.path={checkpoint}")) != before


class TestGrammar:
    """Token ids below 256 are bytes; 256 is the model's end-of-sequence."""

    @staticmethod
    def text(row: RequestRow) -> bytes:
        assert row.token_ids is not None
        ids = row.token_ids
        return bytes(ids[:-1] if ids[-1] == 256 else ids)

    @pytest.mark.parametrize("loop", ["engine.overlap=true", "engine.overlap=false"])
    def test_outputs_match_their_pattern(self, loop: str) -> None:
        rows = run("grammar", loop).requests
        assert {row.reason for row in rows} == {"stop", "length"}
        for row in rows:
            expected = NUMBER if row.reason == "stop" else BEGUN_NUMBER
            assert expected.fullmatch(self.text(row)), row

    def test_outputs_are_different_numbers(self) -> None:
        assert len({self.text(row) for row in run("grammar", "engine.overlap=true").requests}) > 8


class TestSpeculationWithGrammar:
    """Its tokens are those without speculation: test_speculation_digest.py."""

    WITHOUT = ("workload.sampling.grammar=null",)

    def test_verifies_give_several_tokens(self) -> None:
        assert value(run("spec_grammar"), "accept_length") > 1.5

    def test_outputs_match_only_because_of_the_grammar(self) -> None:
        rows = run("spec_grammar").requests
        assert {row.reason for row in rows} == {"stop", "length"}
        assert all(TEXT.fullmatch(TestGrammar.text(row)) for row in rows)
        free = run("spec_grammar", *self.WITHOUT, "workload.requests=4").requests
        assert not all(TEXT.fullmatch(bytes(id % 256 for id in row.token_ids or ())) for row in free)

    def test_a_verify_with_a_grammar_begins_after_the_step_before_is_settled(self) -> None:
        """Without a grammar it does not wait."""
        assert self.under_way() == {0}
        assert max(self.under_way(*self.WITHOUT)) > 0

    @staticmethod
    def under_way(*overrides: str) -> set[int]:
        """Returns how many parts of steps were unsettled when each verify was launched."""
        counts = Launches()
        digest_observed(resolved("spec_grammar", "workload.requests=4", *overrides), lambda *_: counts)
        return counts.before_a_verify


class Launches(InFlight):
    def __init__(self) -> None:
        self.before_a_verify: set[int] = set()

    def launched(self, info: StepInfo) -> None:
        if info.kind == "draft":  # the first part of an iteration that verifies
            self.before_a_verify.add(self.unsettled)
        super().launched(info)


class TestPenalties:
    PLAIN = (
        "workload.sampling.frequency_penalty=0",
        "workload.sampling.presence_penalty=0",
        "workload.sampling.repetition_penalty=1",
        "workload.sampling.min_new_tokens=0",
    )

    def test_penalties_reduce_repetition(self) -> None:
        assert self.repeated(run("penalties")) < self.repeated(run("penalties", *self.PLAIN))

    def test_every_decode_counts_the_latest_tokens(self) -> None:
        result = run("penalties")
        assert "decode.steady" not in result.per_step
        uploads = sum(
            row.count
            for row in result.copies
            if row.kind == "decode" and row.site is not None and row.site.function == "known_to_the_host"
        )
        assert uploads == result.per_step["decode"].steps

    def test_upstream_penalties_lag_by_a_token_under_overlap(self) -> None:
        """Exact penalties do not: test_ladder_tokens.py."""
        assert digest_of(run("penalties", "engine.overlap=false")) != digest_of(run("penalties"))

    @staticmethod
    def repeated(result: Result) -> int:
        """Returns the number of output tokens that their request had before."""
        return sum(row.output_tokens - len(set(row.token_ids or ())) for row in result.requests)


def test_the_retraction_scenario_retracts_and_changes_no_token() -> None:
    tight = run("retraction", NONE)
    assert value(tight, "retractions") > 0
    assert value(tight, "peak_kv_tokens") <= 2048
    roomy = run("retraction", "engine.kv_tokens=16384", NONE)
    assert value(roomy, "retractions") == 0
    assert digest_of(roomy) == digest_of(tight)


def test_shared_prefixes_come_from_the_cache() -> None:
    assert value(run("shared_prefix", NONE), "cache_hit_ratio") > 0.5
    assert value(run("shared_prefix", "engine.radix_cache=false", NONE), "cache_hit_ratio") == 0


def test_mixed_has_mixed_steps_and_prefill_heavy_has_chunks() -> None:
    assert run("mixed", NONE).per_step["mixed"].steps > 10
    prefill_heavy = run("prefill_heavy", NONE, "workload.requests=4")
    assert max(row.prompt_tokens for row in prefill_heavy.requests) > 8192


@pytest.mark.parametrize("values", [pytest.param("device.values=real", marks=pytest.mark.wide), NONE])
def test_a_device_with_one_queue_has_the_same_tokens(values: str) -> None:
    """It has no pinned memory, side streams, events or graphs."""
    plain = run("mixed", values, "device.hardware=mlx-like")
    assert digest_of(plain) == digest_of(run("mixed", values))
    assert {stream for counts in plain.per_step.values() for stream in counts.streams} == {"schedule"}
    assert not any(row.host_memory == "pinned" for row in plain.copies)


@pytest.mark.parametrize(("scenario", "loop"), [("spec_v1", "serial"), ("spec_grammar", "overlapped")])
def test_the_loop_that_auto_chose_is_in_the_result_and_on_its_page(scenario: str, loop: str) -> None:
    result = run(scenario, "workload.requests=4")
    assert result.scenario.expanded["engine"]["overlap"] == "auto"
    assert result.relay.loop == loop
    assert f"relay pr25945, {loop}" in labels(result.document())

"""SGLang's own scheduler, from a clone of its repository that is given by path::

    SCHEDBENCH_SGLANG=../sglang SCHEDBENCH_ENGINE_PYTHON=../venv/bin/python make test

The clone has the commits of the five pull requests; the interpreter has what SGLang needs. ``SCHEDBENCH_SGLANG_WHEELS``
names a folder with the wheels of its releases.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from schedbench.profiles.check.examine import not_asked
from schedbench.profiles.engines.adapter import adapter_named
from schedbench.profiles.engines.bridge import AllEnded, wrap_methods
from schedbench.profiles.engines.client import EngineFailedError
from schedbench.profiles.engines.names import EngineError
from schedbench.profiles.engines.sglang import arguments
from schedbench.profiles.engines.sglang.loop import SglangLoop
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.record.result import Result
from schedbench.sched.config import SamplingParams
from schedbench.sched.request import Request, Status

from .conftest import PYTHON, findings, run_given

CLONE = os.environ.get("SCHEDBENCH_SGLANG", "")
WHEELS = os.environ.get("SCHEDBENCH_SGLANG_WHEELS", "")
BEFORE, AFTER = "1051a8456", "282c46133"  # around #25945
LATER = "8905cbd42"  # of July 2026, whose model runner is of the second generation
SMALL = ("workload.requests=8", "workload.output_tokens={dist: uniform, min: 4, max: 16}")

given = pytest.mark.skipif(not CLONE, reason="SCHEDBENCH_SGLANG names no clone of SGLang")
given_wheels = pytest.mark.skipif(
    not WHEELS, reason="SCHEDBENCH_SGLANG_WHEELS names no folder with SGLang's wheels"
)


def run(engine: str | None, *overrides: str, **options: Any) -> Result:
    choice = None if engine is None else EngineChoice(engine, PYTHON, Path(WHEELS))
    return run_given(choice, *SMALL, *overrides, **options)


def at(commit: str) -> str:
    return f"sglang:{CLONE}@{commit}"


def both(commit: str, *overrides: str, **options: Any) -> tuple[Result, Result]:
    """Runs of SGLang at a commit, with its own model runner or a temperature near 0 where that is asked for, and of our
    scheduler without these."""
    ours = [override for override in overrides if override not in (OWN, NEAR_0)]
    return run(at(commit), *overrides, **options), run(None, *ours, **options)


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Path]:
    """Returns a copy of the sources of a commit, for changes."""
    yield tmp_path
    shutil.rmtree(tmp_path / "python", ignore_errors=True)


def sources(folder: Path, commit: str) -> Path:
    archive = subprocess.run(
        ["git", "-C", CLONE, "archive", commit, "python/sglang"], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / "python/sglang/srt/managers"


def changed(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


MODES = ("embedding", "encoder_decoder", "block_diffusion", "deferred")


OWN = "engine.model_runner=own"
GREEDY, NEAR_0 = "workload.sampling.temperature=0", "workload.sampling.temperature=0.001"
OWN_REFUSED = (
    f"spec_v2 {OWN}",
    f"mixed {OWN} engine.pipeline.stages=2 engine.overlap=auto device.values=none",
    f"logprobs {OWN}",
)
HOSTED_REFUSED = (
    "hisparse device.values=none",
    "hisparse engine.disaggregation.mode=pair",
    f"hisparse {OWN}",
    "hisparse workload.sampling.prompt_logprobs=true",
)
REFUSED = (
    *HOSTED_REFUSED,
    "dp_idle",
    "disagg engine.disaggregation.transfer=nixl",
    "spec_v2 engine.disaggregation.mode=pair",
    "spec_v2 'engine.speculative.acceptance={mean: 2.5}'",
    "mixed engine.replicas=2",
    "pause",
    "split_prefill",
    "mixed workload.sampling.hidden_states=true",
    *MODES,
    *OWN_REFUSED,
)


@pytest.mark.parametrize("arguments", REFUSED)
def test_a_refused_mode_names_the_function_that_prevents_it(arguments: str) -> None:
    assert all(re.search(r" needs? .*\(\w+", need) for need in needs(arguments))


@pytest.mark.parametrize(
    ("engine", "overrides", "says"),
    [
        ("sglang:.", "mixed", "a stub took its place (--set engine.model_runner=own runs it)"),
        ("sglang:.", "spec_v2", "a stub took its place, because speculation with engine.model_runner=own"),
        ("sglang:.", "hisparse", "a stub took its place, because hisparse with engine.model_runner=own"),
        ("sglang:.", f"mixed {OWN}", ""),
        ("mini-sglang:.", "mixed", ""),
    ],
)
def test_a_check_with_a_stub_lists_the_own_model_runner_as_not_asked(
    engine: str, overrides: str, says: str
) -> None:
    scenario, *given_overrides = overrides.split()
    question = replace(ask(scenario, given_overrides), engine=EngineChoice(engine))
    found = not_asked(question, (), ())
    runner = found.get("the engine's own model runner", "")
    assert runner.startswith(says) and bool(runner) == bool(says)
    hides = "stub's whole forward hides" in found.get("waits and references", "")
    assert hides == (scenario != "mixed")


def needs(arguments: str) -> Sequence[str]:
    """What SGLang lacks for a scenario with overrides."""
    scenario, *overrides = shlex.split(arguments)
    found = adapter_named("sglang").needs(ask(scenario, overrides).scenario)
    assert found
    return found


@given
@pytest.mark.parametrize("arguments", REFUSED)
def test_the_named_functions_exist_in_sglang(arguments: str) -> None:
    functions = re.findall(r"\(([\w. ]+)\)", " ".join(needs(arguments)))
    assert functions
    for name in re.findall(r"\w+", " ".join(functions).replace(" in ", " ")):
        pattern = rf"(def|class) {name}\b"
        found = ["git", "-C", CLONE, "grep", "-qE", pattern, AFTER]
        assert subprocess.run(found, check=False).returncode == 0, name


GRAMMARS = ("{regex: '-?[0-9]{1,12}(\\.[0-9]{1,6})?'}", "{choice: [yes, 'no. (maybe)']}")


@given
@pytest.mark.parametrize(
    ("commit", "scenario", "overrides"),
    [
        (AFTER, "mixed", ()),
        (AFTER, "mixed", ("engine.overlap=false",)),
        (AFTER, "mixed", ("engine.page_size=16",)),
        (AFTER, "mixed", ("device.values=none",)),
        (AFTER, "mixed", ("workload.sampling.frequency_penalty=0.5",)),
        (AFTER, "mixed", ("engine.kv_tokens=1024",)),
        (AFTER, "mixed", (OWN,)),
        (AFTER, "mixed", (OWN, "engine.page_size=16", "device.values=none")),
        (LATER, "mixed", (OWN, "engine.overlap=false", "device.values=none")),
        (LATER, "mixed", (OWN, "engine.cuda_graph=false")),
        *((commit, "spec_v2", (NEAR_0,)) for commit in (AFTER, LATER)),
        *(
            (commit, "grammar", (GREEDY, f"workload.sampling.grammar={grammar}"))
            for commit in (AFTER, LATER)
            for grammar in GRAMMARS
        ),
    ],
    ids=str,
)
def test_tokens_equal_our_schedulers(commit: str, scenario: str, overrides: tuple[str, ...]) -> None:
    """At a temperature near 0 what SGLang draws is what is most likely."""
    theirs, ours = both(commit, *overrides, scenario=scenario)
    assert theirs.outputs == ours.outputs


@given
@pytest.mark.parametrize(("commit", "added"), [(AFTER, 7), (LATER, 5)])
def test_sglangs_own_model_runner_adds_metadata_and_the_inputs_of_graphs(commit: str, added: int) -> None:
    """Four kernels of metadata, one with which the decoder reads them, and one or two for the inputs, for one that
    stages the stub's; in the earlier one also a conversion of lengths for the decoder."""
    own, stub = (run(at(commit), *more) for more in ((OWN,), ()))
    more = {
        stream: median(own, "decode.steady", stream, "kernel")
        - median(stub, "decode.steady", stream, "kernel")
        for stream in ("forward", "schedule")
    }
    assert more == {"forward": added, "schedule": 0}
    places = {(Path(row.site.file).name, row.kind, row.stream) for row in own.copies if row.site}
    assert ("triton_backend.py", "prefill", "forward") in places


@given
def test_wrong_metadata_of_attention_change_the_tokens(broken: Path) -> None:
    backend = sources(broken, AFTER).parent / "layers/attention/triton_backend.py"
    line = "        kv_indptr[1:] = torch.cumsum(seq_lens, dim=0)\n"
    changed(backend, line, f"{line}        kv_indptr[1:-1] = (kv_indptr[1:-1] - 1).clamp(min=0)\n")
    assert run(f"sglang:{broken}", OWN).outputs != run(None).outputs


@given
@pytest.mark.parametrize("overrides", [(), ("engine.page_size=16",)], ids=["tokens", "pages"])
def test_speculation_accepts_as_many_tokens_as_our_scheduler(overrides: tuple[str, ...]) -> None:
    theirs, ours = both(AFTER, *overrides, scenario="spec_v2")
    assert theirs.outputs == ours.outputs
    for metric in ("accept_length", "position_acceptance.1", "position_acceptance.3"):
        assert theirs.metrics[metric].values == ours.metrics[metric].values
    found = {kind: step.streams for kind, step in theirs.per_step.items()}
    assert found["verify"]["schedule"]["h2d_pageable"].median == 2
    assert found["draft"]["forward"]["kernel"].median > 0
    assert found["draft_extend"]["forward"]["kernel"].median > 0


CHAINS = ("engine.speculative.topk=1", "engine.speculative.draft_tokens=4")


@given
@pytest.mark.parametrize(
    "overrides",
    [(), CHAINS, (*CHAINS, "engine.page_size=16"), (NEAR_0,)],
    ids=["trees", "chains", "pages", "temperature"],
)
def test_the_serial_worker_gives_the_same_tokens(overrides: tuple[str, ...]) -> None:
    theirs, ours = both(AFTER, *overrides, scenario="spec_v1")
    assert theirs.outputs == ours.outputs
    assert theirs.per_step["verify"].streams["schedule"]["d2h"].median >= 5
    assert theirs.metrics["accept_length"].values[0] > 2


TREES = ("engine.speculative.topk=2", "engine.speculative.draft_tokens=8")


@given
@pytest.mark.parametrize(
    "overrides",
    [(), ("engine.overlap=false",), ("engine.page_size=16",)],
    ids=["overlapped", "serial", "pages"],
)
def test_trees_of_the_overlapped_worker_give_the_same_tokens(overrides: tuple[str, ...]) -> None:
    """With pages a draft waits for the device twice: finding 8 of docs/findings.md."""
    theirs = run(at(LATER), *TREES, *overrides, scenario="spec_v2")
    assert theirs.outputs == run(None, scenario="spec_v2").outputs
    waits = 2 if "engine.page_size=16" in overrides else 0
    assert median(theirs, "draft", "forward", "sync") == waits
    ours = run(None, *TREES, scenario="spec_v1")
    for metric in ("accept_length", "position_acceptance.1", "position_acceptance.3"):
        assert theirs.metrics[metric].values == ours.metrics[metric].values


def of_commit(commit: str, scenario: str, overrides: tuple[str, ...], says: str) -> Any:
    return pytest.param(at(commit), scenario, overrides, says, marks=given)


def of_release(release: str, scenario: str, overrides: tuple[str, ...], says: str) -> Any:
    return pytest.param(f"sglang=={release}", scenario, overrides, says, marks=given_wheels)


SIMULATED = ("engine.speculative.acceptance={mean: 2.5}",)
RANKS = ("engine.data_parallel.ranks=2",)
CHUNKS = ("engine.overlap=auto", "device.values=none", "engine.pipeline={stages: 2, dynamic_chunks: true}")
ONE_SIZE = r"chunks of one size \(ChunkSizePredictor\.fit\): .*"


@pytest.mark.parametrize(
    ("engine", "scenario", "overrides", "says"),
    [
        of_commit(AFTER, "spec_v2", ("engine.overlap=false",), r"EAGLEWorker\.forward_batch_generation"),
        of_commit(LATER, "spec_v1", (), r"EAGLEWorker\.forward_batch_generation"),
        of_commit(AFTER, "spec_v2", SIMULATED, "generate_simulated_accept_index"),
        # The overlapped worker takes chains only.
        of_commit(
            AFTER,
            "spec_v2",
            TREES,
            r"disable_overlap_schedule, which it sets itself \(_handle_eagle_family\)",
        ),
        # In the words of SGLang's arguments.
        of_release(
            "0.5.9",
            "spec_v2",
            TREES,
            r"only supports topk = 1 .* \(ServerArgs\._handle_speculative_decoding\)",
        ),
        of_release("0.5.23", "hisparse", (), "has pages of 64 tokens"),
        # Ranks are groups of their own.
        of_commit(AFTER, "mixed", RANKS, "initialize_dp_attention"),
        of_commit(LATER, "mixed", RANKS, "initialize_dp_attention"),
        # SGLang would go on: the forwards that are timed have no ids between #25945 and #26883; those of a small model
        # show no curve.
        of_commit(AFTER, "mixed", CHUNKS, f"{ONE_SIZE}Failed to profile prefill latency"),
        of_commit(LATER, "mixed", CHUNKS, f"{ONE_SIZE}not positive"),
    ],
)
def test_what_a_version_cannot_run_is_refused(
    engine: str, scenario: str, overrides: tuple[str, ...], says: str
) -> None:
    with pytest.raises(EngineError, match=says):
        run(engine, *overrides, scenario=scenario)


def test_a_message_has_tokens_log_probabilities_and_the_end() -> None:
    loop: Any = object.__new__(SglangLoop)
    loop._reports = Mock()
    message = SimpleNamespace(
        rids=["r0", "r1"],
        finished_reasons=[None, {"type": "length"}],
        output_ids=[array("q", [5]), array("q", [6, 7])],
        output_token_logprobs_val=[[-0.5], [-0.6, -0.7]],
        input_token_logprobs_val=[[None, -2.5], []],
    )
    loop._sent(message)
    message.output_token_logprobs_val = message.input_token_logprobs_val = None  # nothing was asked for
    loop._sent(message)
    assert [call.args for call in loop._reports.streamed.call_args_list] == [
        ("r0", array("q", [5]), False, [-0.5], [-2.5]),
        ("r1", array("q", [6, 7]), True, [-0.6, -0.7], []),
        ("r0", array("q", [5]), False, (), []),
        ("r1", array("q", [6, 7]), True, (), []),
    ]


def test_a_method_with_another_name_is_no_step_that_is_not_counted() -> None:
    class ScheduleBatch:
        def prepare_for_extend(self) -> None: ...

    with pytest.raises(EngineError, match=r"ScheduleBatch has no retract_decode, from which .* reads steps"):
        wrap_methods(ScheduleBatch, dict.fromkeys(("prepare_for_extend", "retract_decode"), print))


def test_a_request_that_sglang_accepts_and_then_aborts_of_its_own_accord_has_failed() -> None:
    ends: dict[str, Any] = {}
    loop: Any = object.__new__(SglangLoop)
    loop._reports, loop._accepted, loop._aborted = (
        SimpleNamespace(end=lambda name, *end: ends.update({name: end}), streamed=Mock()),
        set(),
        {"gone": "left"},
    )
    marks = {"accepted": None, "gone": None, "too long": "a reason"}
    batch = [SimpleNamespace(rid=name, to_finish=mark, cached_tokens=0) for name, mark in marks.items()]
    loop._cached(SimpleNamespace(reqs=batch))
    reason = {"type": "abort", "message": "no rows"}
    loop._sent(SimpleNamespace(rids=list(marks), finished_reasons=[reason] * 3, output_ids=[[]] * 3))
    assert ends == {
        "accepted": (Status.FAILED, "no rows"),
        "gone": (Status.ABORTED, "left"),
        "too long": (Status.REFUSED, "no rows"),
    }


def test_the_example_of_a_workflow_installs_what_sglang_needs() -> None:
    page = Path(__file__).parents[3] / "docs/sglang-pull-request.yml"
    assert {*adapter_named("sglang").requires.values()} <= {*page.read_text().split()}


@given
def test_no_order_of_work_changes_the_tokens_of_a_grammar() -> None:
    """SGLang reduces sampled tokens over the ranks of a batch with grammars, and there is one."""
    found = run(at(LATER), GREEDY, scenario="grammar", adversary=0)
    assert found.outputs == run(None, GREEDY, scenario="grammar").outputs


@given
def test_simulated_acceptance_is_drawn_by_sglang() -> None:
    overrides = ("engine.speculative.acceptance={mean: 2.5, per: batch}", "device.values=none")
    result = run(at(AFTER), *overrides, scenario="spec_v2")
    assert result.labels.acceptance == "simulated"
    assert [result.metrics[f"position_acceptance.{place}"].values for place in (1, 3)] == [(1.0,), (0.0,)]
    assert 0 < result.metrics["position_acceptance.2"].values[0] < 1


@given
def test_hazards_of_a_draft_are_found() -> None:
    """At this commit rewriting the page table from the radix cache races with the forwards."""
    found = findings(run(at(AFTER), scenario="spec_v2", hazards=True))
    assert {finding.resource for finding in found} == {"req_to_token"}
    assert any(
        finding.first.site and finding.first.site.function == "EagleDraftWorker.draft_forward"
        for finding in found
    )


@given
def test_a_prefill_uploads_its_ids_on_the_forward_stream_after_25945() -> None:
    before, after = (run(at(commit)).per_step["prefill"].streams for commit in (BEFORE, AFTER))
    assert [(x["schedule"]["h2d_pinned"].median, x["forward"]["h2d"].median) for x in (before, after)] == [
        (3, 2),
        (2, 3),
    ]


@given
def test_an_item_in_the_preparation_of_a_decode_is_found(broken: Path) -> None:
    line = "            self.seq_lens_cpu = self.seq_lens_cpu + 1\n"
    found = sources(broken, AFTER) / "schedule_batch.py"
    changed(found, line, f"{line}            self.longest = self.seq_lens.max().item()\n")
    result = run(f"sglang:{broken}")
    steady = result.per_step["decode.steady"].streams["schedule"]
    assert (steady["d2h_blocking"].median, steady["sync"].median) == (1, 1)
    places = {
        (row.site.file, row.site.statement)
        for row in result.copies
        if row.site and row.kind == "decode" and row.stream == "schedule" and row.direction == "d2h"
    }
    assert places == {
        ("python/sglang/srt/managers/schedule_batch.py", "self.longest = self.seq_lens.max().item()")
    }


def _with_free(**free: int) -> Any:
    """The loop of a decode worker with KV on the host, where all requests have ended, and of its pools of 8 ``free``
    are free."""
    names = ("slots", "rows", "buffers", "host")
    pools = {name: SimpleNamespace(size=8, available_size=partial(free.get, name, 8)) for name in names}
    pools["slots"].hisparse_attn_allocator = pools["buffers"]
    pools["rows"].size, pools["rows"].pre_alloc_size = 6, 2
    loop: Any = object.__new__(SglangLoop)
    loop._role, loop._stage = "decode", None
    loop.scheduler = SimpleNamespace(
        req_to_token_pool=pools["rows"],
        token_to_kv_pool_allocator=pools["slots"],
        tree_cache=SimpleNamespace(evictable_size=lambda: 0),
        hisparse_coordinator=SimpleNamespace(mem_pool_host=pools["host"]),
    )
    return loop


def test_all_memory_is_free_when_all_requests_have_ended() -> None:
    assert _with_free()._held() == ""
    twice = "3 KV slots more are free than exist: some were freed twice"
    found = {"slots": twice, "rows": "3 rows more", "buffers": "3 KV slots of buffers more"}
    for pool, text in found.items():
        assert text in _with_free(**{pool: 11})._held()
    for pool, what in {"buffers": "KV slots of buffers", "host": "KV slots of the host"}.items():
        assert _with_free(**{pool: 5})._held().endswith(f"ended, and 3 {what} were not freed")


def test_parameters_are_normalised_with_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, later releases refuse a minimum length."""
    params = Mock()
    module = SimpleNamespace(SamplingParams=lambda **_: params)
    monkeypatch.setattr(arguments, "import_module", lambda _: module)
    arguments._sampling(Request("r", array("q"), SamplingParams(min_new_tokens=4), 0))
    [tokenizer] = params.normalize.call_args.args
    assert tokenizer is not None


@pytest.mark.parametrize("lost", [True, False])
def test_what_a_lost_request_still_holds_is_not_called_a_leak(*, lost: bool) -> None:
    system: Any = object.__new__(SglangLoop)
    system._bridge = SimpleNamespace(lost=lost)
    system._run_loop = Mock(side_effect=AllEnded)
    system._held = Mock(side_effect=["of the warm-up", "of the workload", ""])
    for leak in ("of the warm-up", "of the workload", "of the workload"):
        system.run()
        assert system.leak == ("" if lost else leak)


@given
@pytest.mark.parametrize("ranks", [(), ("engine.disaggregation={mode: pair}",)])
def test_rows_that_are_not_freed_fail_the_run(broken: Path, ranks: tuple[str, ...]) -> None:
    """SGLang's overlapped loop does not reach its own check; that of a pipeline's stages does."""
    common = sources(broken, AFTER).parent / "mem_cache/common.py"
    changed(common, "    tree_cache.req_to_token_pool.free(req)\n", "    pass\n")
    with pytest.raises(EngineFailedError, match=r"all requests have ended, and [1-9]\d* rows were not freed"):
        run(f"sglang:{broken}", *ranks)


@given
def test_a_missing_wait_of_the_forward_stream_is_a_hazard(broken: Path) -> None:
    wait = "                    self.forward_stream.wait_stream(self.schedule_stream)\n"
    found = sources(broken, AFTER) / "scheduler.py"
    changed(
        found, f"{wait}                    # resolve consumes SB staging", "# resolve consumes SB staging"
    )
    assert any(
        finding.first.stream == "schedule" and finding.second and finding.second.stream == "forward"
        for finding in findings(run(f"sglang:{broken}", hazards=True))
    )


@given
def test_a_missing_wait_for_the_reads_of_a_graph_is_a_hazard(broken: Path) -> None:
    changed(sources(broken, LATER) / "scheduler.py", "self.schedule_stream.wait_event(ev)\n", "pass\n")
    found = findings(run(f"sglang:{broken}", hazards=True))
    [second] = {finding.second for finding in found if finding.resource == "req_to_token"}
    assert second and second.site and Path(second.site.file).name == "memory_pool.py"


@given
@pytest.mark.parametrize("commit", [BEFORE, LATER])
def test_a_missing_reference_is_a_freed_block(broken: Path, commit: str) -> None:
    """Before #26380 no barrier makes the next schedule wait for the forward; later it waits for the reads of a graph,
    behind which the forward still computes."""
    kept = "self.batch_record_buf[self.batch_record_ct] = [batch, attr_snapshot]"
    changed(sources(broken, commit) / "scheduler.py", kept, kept.replace("batch, attr_snapshot", ""))
    for engine, freed in ((f"sglang:{broken}", True), (at(commit), False)):
        found = findings(run(engine, hazards=True))
        assert any(finding.resource.startswith("freed block of") for finding in found) is freed


# Our states and the commits that they mirror.
LADDER = {
    "pr25774-before": "7f154ba44^",
    "pr25774": "7f154ba44",
    "pr25944-before": "44ec2ee18",
    "pr25944": "8b473aa0b",
    "pr26020": "c4b6b5ea1",
    "pr26425": "1051a8456",
    "pr25945-before": "282c46133^",
    "pr25945": "282c46133",
}
COUNTED = ("h2d_pinned", "h2d_pageable", "h2d_blocking", "d2h", "d2h_blocking", "d2d", "sync")
# Uploads that our states have and SGLang's source does not: seeds of the sampler's noise, which make
# tokens independent of batching.
SEEDS = {"h2d_pageable": 1, "h2d_blocking": 1, "sync": 1}
KNOWN = {"prefill": SEEDS, "decode.steady": {}, "prebuilt": SEEDS}
# Copies on the device in a prefill depend on which requests of a common prefix meet in a batch, and so on times.
UNCOMPARED = {("prefill", "d2d")}


@given
@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("state", LADDER)
def test_a_ladder_state_has_the_counts_of_sglang_at_its_commit(state: str, overlap: str) -> None:
    ours, theirs = of_state(state, overlap)
    assert ours.outputs == theirs.outputs
    assert "prebuilt" not in ours.per_step | theirs.per_step
    compare_counts(ours, theirs, KNOWN.keys() - {"prebuilt"})


@given
@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("state", LADDER)
def test_both_workers_of_a_pair_count_what_the_source_at_its_commit_does(state: str, overlap: str) -> None:
    """Each worker runs as if the other were infinitely fast, so that tokens mean nothing."""
    ours, theirs = of_state(state, overlap, "engine.disaggregation={mode: pair, transfer: fake}")
    for result in (ours, theirs):
        assert {row.status for row in result.requests} == {"finished"}
        assert [rank.role for rank in result.ranks] == ["prefill", "decode"]
    compare_counts(ours, theirs, KNOWN.keys())


def of_state(state: str, overlap: str, *more: str) -> tuple[Result, Result]:
    """Runs of our scheduler in a state and of SGLang at the commit that it mirrors."""
    overrides = ("workload.requests=12", f"engine.overlap={overlap}", *more)
    return run(None, *overrides, f"engine.relay={state}"), run(at(LADDER[state]), *overrides)


def compare_counts(ours: Result, theirs: Result, kinds: Iterable[str]) -> None:
    for kind in kinds:
        known = KNOWN[kind]
        for stream in ("schedule", "forward", "copy"):
            more = {
                name: median(ours, kind, stream, name) - median(theirs, kind, stream, name)
                for name in COUNTED
                if (kind, name) not in UNCOMPARED
            }
            expected = known if stream == "schedule" else {}
            assert {name: count for name, count in more.items() if count} == expected, (kind, stream)


def median(result: Result, kind: str, stream: str, name: str) -> float:
    found = result.per_step[kind].streams.get(stream, {}).get(name)
    return 0 if found is None else found.median

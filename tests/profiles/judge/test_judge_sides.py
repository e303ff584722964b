"""Sides: their syntax, and their runs in this process, in a worker, and from another commit."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from schedbench.profiles.judge import worker
from schedbench.profiles.judge.likeness import LikenessError
from schedbench.profiles.judge.local import margin, run_trial
from schedbench.profiles.judge.sides import SideSpec, StoredSide, opened, parse, split
from schedbench.profiles.judge.trials import Question, Sample, TrialRequest, WorkloadError
from schedbench.profiles.judge.worker import (
    SOURCES,
    CrashError,
    SideError,
    commit_of,
    working,
    worktree,
)
from schedbench.profiles.platform.hardware import load
from schedbench.profiles.platform.machine import MachineError
from schedbench.profiles.record import environment
from schedbench.profiles.record.environment import changes
from schedbench.profiles.record.recording import read_ranks
from schedbench.profiles.record.result import ResultError
from schedbench.scenarios.problems import ScenarioError

ROOMS = ("cli", "profiles", "scenarios", "sched", SOURCES)
TINY = """
name: tiny
model: {preset: tiny-llama, dtype: float32}
engine: {overlap: true, relay: pr25945, max_running_requests: 2, kv_tokens: 256, chunked_prefill_size: 32}
workload:
  requests: 2
  arrival: {process: burst}
  prompt_tokens: {dist: fixed, value: 9}
  output_tokens: {dist: fixed, value: 3}
"""


@pytest.fixture(scope="module")
def question(tmp_path_factory) -> Question:
    path = tmp_path_factory.mktemp("scenario") / "tiny.yaml"
    path.write_text(TINY)
    return Question.of(str(path))


@pytest.fixture(scope="module")
def sample(question) -> Sample:
    return run_trial(question, TrialRequest(device="vgpu", seed=1))


# ---- how sides are written ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("", SideSpec("as is")),
        ("overlap=false", SideSpec("overlap=false", ("engine.overlap=false",))),
        ("relay=latest", SideSpec("relay=latest", ("engine.relay=latest",))),
        ("barrier=off", SideSpec("barrier=off", ("engine.relay.barrier=off",))),
        ("engine.page_size=1, policy=lpm", SideSpec(
            "engine.page_size=1, policy=lpm", ("engine.page_size=1", "engine.policy=lpm"))),
        ("relay={state: latest, barrier: off},overlap=true", SideSpec(
            "relay={state: latest, barrier: off},overlap=true",
            ("engine.relay={state: latest, barrier: off}", "engine.overlap=true"))),
        ("git:main", SideSpec("git:main", ref="main")),
        ("git:main,overlap=true", SideSpec("git:main,overlap=true", ("engine.overlap=true",), "main")),
    ],
)  # fmt: skip
def test_sides_are_parsed(text, spec):
    assert parse(text) == spec


def test_commas_inside_brackets_do_not_separate():
    assert split("a={x: 1, y: [2, 3]}, b=(4,5),c=6") == ["a={x: 1, y: [2, 3]}", "b=(4,5)", "c=6"]


def test_stored_results_are_a_file_or_a_folder(tmp_path, result):
    for seed in (2, 1):
        result(seed=seed).write(tmp_path / f"{seed}.json")
    assert parse(str(tmp_path)).stored == (tmp_path / "1.json", tmp_path / "2.json")
    one = str(tmp_path / "1.json")
    with opened(None, parse(str(tmp_path)), parse(one), TrialRequest()) as (a, b):
        assert (sorted(a.seeds), sorted(b.seeds), len(a.all())) == ([1, 2], [1], 2)
        assert a.run(2).seed == 2
        with pytest.raises(SideError, match="no stored result of workload seed 7"):
            a.run(7)
        assert a.margin(1, "r0", 0) is None


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"hardware.name": "a100"}, "2.json are not alike.*\n  hardware.name: 'h200' against 'a100'"),
        ({"scenario.expanded.workload.requests": 3}, "workload.requests: 2 against 3"),
        ({"relay.state": "latest"}, "relay.state: .* against 'latest'"),
        ({"tool.git_sha": "f" * 40}, "tool.git_sha: .* against 'f"),
        ({"run.failure": "stage 1 was killed"}, "2.json: broke off: stage 1 was killed"),
        ({"run.cancelled": True}, "2.json: the result is partial"),
    ],
)
def test_the_stored_runs_of_a_side_are_whole_and_alike(tmp_path, result, other, message):
    result(seed=1).write(tmp_path / "1.json")
    result(other, seed=2).write(tmp_path / "2.json")
    one = parse(str(tmp_path / "1.json"))
    with (
        pytest.raises((SideError, LikenessError, WorkloadError), match=message),
        opened(None, one, parse(str(tmp_path)), TrialRequest()),
    ):
        raise AssertionError


@pytest.mark.parametrize("text", ["overlap", "=3", "overlap=true,x"])
def test_invalid_sides_are_refused(text):
    with pytest.raises(SideError, match="expected key=value"):
        parse(text)


def test_unknown_keys_are_errors_of_the_scenario():
    with pytest.raises(ScenarioError, match="did you mean 'overlap'"):
        parse("overlab=true")


def test_missing_results_are_refused(tmp_path, question):
    with pytest.raises(SideError, match=f"no results in this folder.* sglang:{tmp_path}$"):
        parse(str(tmp_path))
    package = tmp_path / "minisgl"
    package.mkdir()
    (package / "__init__.py").touch()
    with pytest.raises(SideError, match=f"mini-sglang:{tmp_path}$"):
        parse(str(tmp_path))
    with (
        pytest.raises(ResultError, match="No such file"),
        opened(question, parse(str(tmp_path / "x.json")), SideSpec("as is"), TrialRequest()),
    ):
        raise AssertionError


def test_a_side_that_runs_needs_a_scenario():
    with (
        pytest.raises(SideError, match="scenario is needed"),
        opened(None, SideSpec("a"), SideSpec("b"), TrialRequest()),
    ):
        raise AssertionError


# ---- here --------------------------------------------------------------------------------------------------


def test_a_trial_has_its_steps_and_tokens(sample):
    assert sample.seed == 1 and sample.exact
    assert {step.kind for step in sample.steps} == {"prefill", "decode"}
    assert {len(steps) for steps in sample.token_steps.values()} == {3}
    assert max(max(steps) for steps in sample.token_steps.values()) < len(sample.steps)
    assert all(row.token_ids is not None for row in sample.result.requests)


def test_a_trial_repeats(question, sample):
    again = run_trial(question, TrialRequest(device="vgpu", seed=1))
    assert again.steps == sample.steps
    assert again.result.metrics == sample.result.metrics


def test_the_steps_of_all_ranks_are_compared():
    """Those of a decode worker too, although it is not the first rank."""
    question = Question.of("disagg_hisparse", ("workload.requests=1", "measure.warmup_requests=0"))
    found = run_trial(question, TrialRequest(device="vgpu"))
    assert Counter(step.kind for step in found.steps) == {
        kind: steps for kind, steps in found.result.steps().items() if "." not in kind
    }


def test_a_side_has_one_relay(question):
    with pytest.raises(ScenarioError, match="a side has one relay"):
        run_trial(question, TrialRequest(("engine.relays=[pr25945, latest]",)))


def test_a_margin_is_found_by_a_second_run(question, sample):
    order = TrialRequest(device="vgpu", seed=1)
    first = sample.result.requests[0].id
    margins = [margin(question, order, first, position) for position in (0, 2)]
    assert all(found is not None and found >= 0 for found in margins)
    assert margins[0] != margins[1]
    assert margin(question, order, sample.result.requests[1].id, 0) != margins[0]
    assert margin(question, order, first, 9) is None
    assert margin(question, order, "absent", 0) is None


def test_without_values_there_is_no_margin(question):
    assert margin(question, TrialRequest(("device.values=none",), 1, "vgpu"), "r0", 0) is None


# ---- in a worker -------------------------------------------------------------------------------------------


def asked(question, **order) -> str:
    whole = {"overrides": [], "seed": 1, "device": "vgpu", "command": ""} | order
    fields = {name: getattr(question, name) for name in ("content", "file", "folder")}
    return json.dumps({"question": {**fields, "overrides": []}, "order": whole})


def test_a_worker_answers_line_by_line(question, sample):
    out = io.StringIO()
    worker.serve([asked(question), asked(question, overrides=["engine.page_size=0"])], out)
    good, bad = map(json.loads, out.getvalue().splitlines())
    there = Sample.of(good, name="w")
    assert (there.steps, there.result.metrics) == (sample.steps, sample.result.metrics)
    assert {request: list(steps) for request, steps in sample.token_steps.items()} == there.token_steps
    assert "engine.page_size" in bad["refused"] and not bad["unable"]


def program(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


@pytest.fixture
def started(question):
    """Connects to a fake worker process."""

    def start(text: str):
        return working("git:x", question, TrialRequest(), sources=Path(), program=program(text))

    return start


def answering(answer: object) -> str:
    """A worker with one answer to everything."""
    return f"import sys\nfor line in sys.stdin:\n    print({json.dumps(answer)!r}, flush=True)"


def test_a_crash_shows_stderr(started):
    with started("import sys; input(); sys.exit('it broke')") as side, pytest.raises(CrashError) as caught:
        side.run(1)
    assert str(caught.value) == "git:x crashed: it broke\nit broke"


def test_a_worker_that_exits_at_once_has_crashed(started):
    with started("raise SystemExit") as side, pytest.raises(CrashError, match="stderr is empty"):
        for seed in range(3):
            side.run(seed)


@pytest.mark.parametrize(("unable", "error"), [(True, MachineError), (False, SideError)])
def test_a_refusal_is_an_error_of_the_side(started, unable, error):
    text = answering({"refused": "no CUDA", "unable": unable})
    with started(text) as side, pytest.raises(error, match="git:x: no CUDA"):
        side.run(1)


def test_a_version_that_refuses_drawn_constants_is_compared_without_draws(started):
    text = answering({"refused": "h200-0.yaml: low: unknown field", "unable": False})
    profile = load("h200")
    known = SimpleNamespace(scenario=SimpleNamespace(seed=1))
    with (
        started(text) as side,
        pytest.raises(SideError, match=r"compare it with --draws 0\ngit:x: h200-0.yaml: low"),
    ):
        list(side.run_each(known, [profile], map))


def test_margins_are_asked_of_the_worker(started):
    text = """
    import json, sys
    for line in sys.stdin:
        request, position = json.loads(line)["margin"]
        print(json.dumps({"margin": position / 2}), flush=True)
    """
    with started(text) as side:
        assert side.margin(1, "r0", 3) == 1.5


# ---- from another commit -----------------------------------------------------------------------------------


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """This program under version control, with a branch that is broken."""
    source, root = here_or_package(), tmp_path_factory.mktemp("repository")
    for room in ROOMS:
        shutil.copytree(
            source / room, root / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    (root / ".gitignore").write_text("__pycache__/\n")
    git(root, "init", "-q", "-b", "good")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "works")
    git(root, "switch", "-q", "-c", "broken")
    (root / "sched" / "__init__.py").write_text("raise ZeroDivisionError('the change did this')\n")
    git(root, "commit", "-q", "-a", "-m", "breaks")
    git(root, "switch", "-q", "good")
    return root


def here_or_package() -> Path:
    return Path(worker.__file__).resolve().parents[2]


def trees(root: Path) -> list[Path]:
    return list((root / ".git" / "worktrees").glob("*"))


@pytest.mark.wide
def test_another_commit_runs_in_its_own_process_and_leaves_nothing(repository, question, sample, tmp_path):
    with (
        worktree(repository, "good") as tree,
        working("git:good", question, TrialRequest(device="vgpu"), sources=tree / SOURCES) as side,
    ):
        there = side.run(1)
        assert side.recorded(1, tmp_path)[0].outputs == there.result.outputs
    assert read_ranks(tmp_path)[0].windows
    assert there.result.outputs == sample.result.outputs
    assert there.steps == sample.steps
    assert there.result.tool.git_sha and not there.result.tool.dirty
    assert not tree.exists() and trees(repository) == []


def test_a_commit_that_crashes_shows_its_traceback_and_leaves_nothing(repository, question):
    with (
        pytest.raises(CrashError, match="ZeroDivisionError: the change did this"),
        worktree(repository, "broken") as tree,
        working("git:broken", question, TrialRequest(device="vgpu"), sources=tree / SOURCES) as side,
    ):
        side.run(1)
    assert not tree.exists() and trees(repository) == []


def test_only_tracked_changes_and_untracked_python_files_of_the_package_are_changes(tmp_path, monkeypatch):
    for folder in ("sched", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "sched" / "loop.py").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "works")
    for name in ("mine.yaml", "docs/try.py", "sched/notes.txt"):
        (tmp_path / name).write_text("2")
    assert changes(tmp_path) == ()
    for name in ("sched/loop.py", "sched/new.py"):
        (tmp_path / name).write_text("2")
    assert changes(tmp_path) == ("sched/loop.py", "sched/new.py")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "profiles" / "record" / "environment.py"))
    first = environment.tool.__wrapped__()
    (tmp_path / "sched" / "new.py").write_text("3")
    second = environment.tool.__wrapped__()
    assert first.changed == second.changed and first.changed_sha256 != second.changed_sha256


def test_what_was_meant_by_a_wrong_side_is_suggested(repository, monkeypatch):
    monkeypatch.chdir(repository)
    for text, meant in {"good": "git:good", "git=goood": "git:good", "latst": "relay=latest"}.items():
        with pytest.raises(SideError, match=f"is no side: .*; did you mean '{meant}'"):
            parse(text)
    with pytest.raises(SideError, match=r"git:goood: no such commit, .*, did you mean 'git:good'\?"):
        commit_of(repository, "goood")


def test_an_unknown_commit_is_refused(repository):
    with pytest.raises(SideError, match="git:nowhere: no such commit"), worktree(repository, "nowhere"):
        raise AssertionError
    with pytest.raises(SideError, match="no such commit"), worktree(repository, "--help"):
        raise AssertionError


def test_stored_sides_have_their_seeds(result):
    side = StoredSide("x", {3: (Sample(result(seed=3)),)})
    assert side.run(None).seed == 3

"""The long errand: stages apart from each other, within their time; its plan is sound without a GPU."""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import resources

import pytest

from schedbench.profiles.cuda import gpu, one, several
from schedbench.profiles.cuda.prediction import gathered
from schedbench.profiles.cuda.probes import PROBES
from schedbench.profiles.cuda.stages import Outcome, Stage, in_process, run_all
from schedbench.sched.relay.states import states


class Clock:
    def __init__(self):
        self.at = 0.0

    def __call__(self):
        return self.at


@pytest.fixture
def clock():
    return Clock()


def stage(name, **more):
    return Stage(name, ("-c", "pass"), **({"deadline": 10} | more))


def told(stages, clock, *, budget=100, takes=1.0, failing=()):
    given = {}

    def run(stage, seconds):
        given[stage.name] = seconds
        clock.at += takes
        return Outcome(stage.name, "failed" if stage.name in failing else "ok", takes)

    outcomes = list(run_all(stages, budget=budget, run=run, now=clock))
    return {o.name: (o.status, o.error) for o in outcomes}, given


def test_one_that_fails_stops_only_those_that_need_it(clock):
    stages = [stage("a"), stage("b"), stage("c", needs=("a", "b")), stage("d")]
    statuses, _ = told(stages, clock, failing=("a",))
    assert statuses == {"a": ("failed", ""), "b": ("ok", ""), "c": ("skipped", "needs a"), "d": ("ok", "")}


def test_what_is_skipped_fails_who_needs_it(clock):
    statuses, _ = told([stage("a", packages=("no_such_package",)), stage("b", needs=("a",))], clock)
    assert statuses["a"] == ("skipped", "not installed: no_such_package")
    assert statuses["b"] == ("skipped", "needs a")


def test_nobody_gets_more_than_what_is_left(clock):
    stages = [stage(name, deadline=40) for name in "abcd"]
    statuses, given = told(stages, clock, budget=100, takes=38)
    assert given == {"a": 40, "b": 40, "c": 24}
    assert statuses["d"] == ("skipped", "no time left")


@pytest.mark.parametrize(
    ("program", "status", "error"),
    [
        ("print('fine')", "ok", ""),
        ("import sys; print('a word'); sys.exit(3)", "failed", "exit code 3: a word\na word"),
        ("raise ValueError('why')", "failed", "exit code 1: ValueError: why\n"),
        ("import time; time.sleep(60)", "failed", "not done after"),
    ],
)
def test_a_stage_is_a_process_with_a_log(tmp_path, program, status, error):
    outcome = in_process(sys.executable, tmp_path)(Stage("s", ("-c", program), 10), 1.5)
    assert outcome.status == status
    assert error in outcome.error
    assert (tmp_path / "s.log").exists()


def test_an_interruption_leaves_no_stage_behind(tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    program = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            in_process(sys.executable, tmp_path)(Stage("s", ("-c", program), 60), 30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "s.log").read_text()), 0)


def test_a_stage_has_its_own_environment(tmp_path):
    program = "import os; print(os.environ['WORD'])"
    in_process(sys.executable, tmp_path)(Stage("s", ("-c", program), 10, environment={"WORD": "x"}), 5)
    assert (tmp_path / "s.log").read_text() == "x\n"


def test_the_plan_is_sound_and_within_eight_minutes(capsys):
    assert gpu.main(["--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "probe-environment" in out.splitlines()[0]
    assert all(f"probe-{name}" in out for name in PROBES)
    assert gpu.BUDGET < 480


def test_a_plan_that_is_not_says_where(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_QWEN", ("model.preset=nobody",))
    assert gpu.main(["--dry-run", "--out", str(tmp_path)]) == 1
    assert "cuda-qwen3-0.6b: ScenarioError" in capsys.readouterr().err


@pytest.mark.parametrize(("failing", "code"), [("", 0), ("b", 1)])
def test_everything_ends_up_in_one_folder(tmp_path, monkeypatch, failing, code):
    stages = [stage("a"), Stage("b", ("-c", "1/0" if failing else "1"), 10), stage("c", needs=("z",))]
    monkeypatch.setattr(gpu, "plan", lambda _: stages)
    out = tmp_path / "results"
    assert gpu.main(["--out", str(out)]) == code
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ok"] is (code == 0)
    assert [s["status"] for s in summary["stages"]] == ["ok", "failed" if failing else "ok", "skipped"]
    assert summary["counts_equal"] is None
    assert "| c | skipped | 0.0 | needs z |" in (out / "summary.md").read_text()


def test_the_comparison_is_in_the_summary(tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps({"equal": False, "lines": [1, 2]}))
    told = gpu.summary([Outcome("a", "ok", 1.0)], tmp_path)
    assert (told["counts_equal"], told["differing_lines"]) == (False, 2)
    assert (told["verified"], told["unexplained"]) == (None, None)


def test_so_is_the_verification(tmp_path):
    (tmp_path / "verify.json").write_text(json.dumps({"agrees": False, "unexplained": [1, 2, 3]}))
    outcomes = [Outcome("a", "ok", 1.0)]
    told = gpu.summary(outcomes, tmp_path)
    assert (told["verified"], told["unexplained"]) == (False, 3)
    assert "agree but for known differences: False" in gpu.markdown(told, outcomes)


def test_the_verification_needs_all_three_runs(tmp_path):
    plan = {stage.name: stage for stage in gpu.plan(tmp_path)}
    assert set(plan["verify"].needs) == {"vgpu", "counted", "cuda"}
    outputs = {name: plan[name].arguments[-1] for name in plan["verify"].needs}
    assert set(outputs.values()) < set(plan["verify"].arguments)
    settings = [plan[name].arguments[5:-2] for name in plan["verify"].needs]
    assert settings[0] == settings[1] == settings[2]


def test_predictions_are_made_on_the_machines_own_profile(tmp_path):
    plan = {stage.name: stage for stage in gpu.plan(tmp_path)}
    names = list(plan)
    profile = plan["calibrate"].arguments[-1]
    for scenario, ladder in gpu.LADDERS.items():
        emulated, measured = (plan[f"prediction-{scenario}-{side}"] for side in ("emulated", "measured"))
        assert emulated.arguments[-2:] == ("--hardware", profile)
        assert emulated.needs == ("calibrate",)
        asked, again = (several.parse(stage.arguments[2:]) for stage in (emulated, measured))
        assert (asked.scenario, asked.states, asked.set) == (again.scenario, again.states, again.set)
        assert (asked.device, again.device) == ("vgpu", "cuda")
        assert {f"{scenario}:{state}" for state in ladder} <= set(plan["prediction"].arguments)
        assert names.index(emulated.name) < names.index("prediction")
    assert set(gpu.LADDERS["mixed"]) == set(states())
    assert names.index("probe-kernels") < names.index("calibrate")


def test_a_ladder_is_run_in_one_process(tmp_path, monkeypatch, capsys):
    small = ["--set", "workload.requests=2", "--set", "workload.output_tokens.max=4"]
    words = ["mixed", "--device", "vgpu", "--side", "emulated", "--folder", str(tmp_path), *small]
    assert several.main([*words, "--states", "pr25945", "latest"]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {f"prediction-mixed-{state}-emulated.json" for state in ("pr25945", "latest")}
    pairs, missing = gathered(tmp_path, [("mixed", "latest")])
    assert (pairs, missing) == ([], ["mixed latest"])

    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(several, "execute", broken)
    assert several.main([*words, "--states", "latest"]) == 1
    assert capsys.readouterr().out == "latest: out of memory"


def test_a_run_on_a_profile_that_a_stage_wrote(tmp_path):
    profile, output = tmp_path / "own.yaml", tmp_path / "out.json"
    base = resources.files("schedbench.profiles.hardware").joinpath("h200.yaml").read_text()
    profile.write_text(base.replace("name: h200", "name: own"))
    small = ["--set", "workload.requests=2", "--set", "workload.output_tokens.max=4"]
    words = ["mixed", "--device", "vgpu", *small, "--hardware", str(profile), "--output", str(output)]
    assert one.main(words) == 0
    assert json.loads(output.read_text())["hardware"]["name"] == "own"

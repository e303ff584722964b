"""The stages of ``make gpu``: each in its own process, within its time; the plan is valid without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

from schedbench.profiles.lab import gpu, prediction_runs, single_run, verification
from schedbench.profiles.lab.prediction import gathered
from schedbench.profiles.lab.probes import PROBES
from schedbench.profiles.lab.speed import LIMITED
from schedbench.profiles.record.result import Result
from schedbench.profiles.run import gpu_stages
from schedbench.profiles.run.gpu_stages import GpuStage, StageOutcome, in_process, run_all, select_stages
from schedbench.scenarios import shipped
from schedbench.scenarios.loader import load
from schedbench.sched.relay.states import states
from tests.json_programs import is_running
from tests.profiles.engines.conftest import interrupt_when, wait_until


def stage(name, **more):
    return GpuStage(name, ("-c", "pass"), **({"deadline": 10} | more))


def statuses_of(stages, *, takes=1.0, failing=()):
    """Returns how each stage ended, and the seconds that each was given, of 100 in all."""
    given = {}

    def run(stage, seconds):
        given[stage.name] = seconds
        return StageOutcome(stage.name, "failed" if stage.name in failing else "ok", takes)

    outcomes = list(run_all(stages, budget=100, run=run, now=lambda: takes * len(given)))
    return {o.name: (o.status, o.error) for o in outcomes}, given


def test_a_failed_or_skipped_stage_skips_only_stages_that_need_it():
    absent = stage("e", packages=("no_such_package",))
    stages = [
        stage("a"),
        stage("b"),
        stage("c", needs=("a", "b")),
        stage("d"),
        absent,
        stage("f", needs=("e",)),
    ]
    statuses, _ = statuses_of(stages, failing=("a",))
    assert statuses == {
        "a": ("failed", ""),
        "b": ("ok", ""),
        "c": ("skipped", "needs a"),
        "d": ("ok", ""),
        "e": ("skipped", "not installed: no_such_package"),
        "f": ("skipped", "needs e"),
    }


def test_no_stage_gets_more_than_the_remaining_time():
    statuses, given = statuses_of([stage(name, deadline=40) for name in "abcd"], takes=38)
    assert given == {"a": 40, "b": 40, "c": 24}
    assert statuses["d"] == ("skipped", "no time left")


@pytest.mark.parametrize(
    ("program", "status", "error"),
    [
        ("print('fine')", "ok", ""),
        ("import os, sys; print(os.environ['WORD']); sys.exit(3)", "failed", "exit code 3: a word\na word"),
        ("raise ValueError('why')", "failed", "exit code 1: ValueError: why\n"),
        ("import time; time.sleep(60)", "failed", "not done after"),
    ],
)
def test_a_stage_is_a_process_with_a_log(tmp_path, program, status, error):
    own = GpuStage("s", ("-c", program), 10, environment={"WORD": "a word"})
    outcome = in_process(sys.executable, tmp_path)(own, 1.5 if "sleep" in program else 600)
    assert outcome.status == status
    assert error in outcome.error
    assert (tmp_path / "s.log").exists()


LATE = """
import os, signal, subprocess, sys, time
signal.signal(2, signal.SIG_IGN)  # the child begins with it
child = subprocess.Popen(["sleep", "600"])
signal.signal(2, signal.default_int_handler)
try:
    print(child.pid, flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("kept", flush=True)
"""


@pytest.fixture
def late(tmp_path, monkeypatch):
    """A function that runs a program as a stage, whose time is over as soon as it has printed something."""
    wait = subprocess.Popen.wait

    def waits(process, timeout=None):
        if timeout != 2.0:
            return wait(process, timeout)
        wait_until((tmp_path / "s.log").read_text, of=process)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waits)
    return lambda program: in_process(sys.executable, tmp_path)(GpuStage("s", ("-c", program), 60), 2.0)


@pytest.mark.wide
def test_a_late_stage_keeps_its_output_and_leaves_no_process(tmp_path, late):
    outcome = late(LATE)
    assert (outcome.status, outcome.error.splitlines()[0]) == ("failed", "not done after 2 s: kept")
    child = int((tmp_path / "s.log").read_text().split()[0])
    wait_until(lambda: not is_running(child))  # a kill takes a moment


@pytest.mark.wide
def test_a_stage_that_ignores_the_interrupt_is_killed(late, monkeypatch):
    monkeypatch.setattr(gpu_stages, "GRACE_SECONDS", 0.2)
    ignores = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    outcome = late(f"{ignores}; print('ready', flush=True); time.sleep(600)")
    assert outcome.status == "failed" and outcome.seconds < 300


@pytest.mark.wide
def test_an_interrupt_ends_the_running_stage(tmp_path):
    log, program = tmp_path / "s.log", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    interrupt_when(lambda: log.exists() and log.read_text())
    with pytest.raises(KeyboardInterrupt):
        in_process(sys.executable, tmp_path)(GpuStage("s", ("-c", program), 60), 600)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().split()[0]), 0)


def test_the_plan_is_valid_and_within_eight_minutes(capsys):
    assert gpu.main(["--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "probe-environment" in out.splitlines()[0]
    assert all(f"probe-{name}" in out for name in PROBES)
    assert gpu.BUDGET < 480


def test_an_invalid_plan_names_its_stage(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_HALF_BILLION", ("model.preset=unknown",))
    assert gpu.main(["--dry-run", "--out", str(tmp_path)]) == 1
    assert "speed-0.6b: ScenarioError" in capsys.readouterr().err


@pytest.mark.parametrize(("failing", "code"), [("", 0), ("b", 1)])
def test_all_results_are_in_one_folder(tmp_path, monkeypatch, failing, code):
    stages = [stage("a"), GpuStage("b", ("-c", "1/0" if failing else "1"), 10), stage("c", needs=("z",))]
    monkeypatch.setattr(gpu, "plan", lambda *_: stages)
    out = tmp_path / "results"
    assert gpu.main(["--out", str(out)]) == code
    summary = json.loads((out / "summary.json").read_text())
    assert summary["ok"] is (code == 0)
    assert [s["status"] for s in summary["stages"]] == ["ok", "failed" if failing else "ok", "skipped"]
    assert summary["verified"] is None
    assert summary["not_run"] == ["c"]


@pytest.mark.wide
def test_a_difference_fails_the_run_and_later_stages_still_run(tmp_path, monkeypatch):
    sample = Result.from_json((Path(__file__).parents[1] / "sample_result.json").read_text())
    for name, syncs in (("predicted", sample.syncs), ("recorded", ())):
        sample.model_copy(update={"syncs": syncs}).write(tmp_path / f"{name}.json")
    (tmp_path / "announced.json").write_text(json.dumps({"steps": {}, "rows": []}))
    stages = [GpuStage("verify", ("-m", verification.__name__, str(tmp_path)), 60), stage("later")]
    monkeypatch.setattr(gpu, "plan", lambda *_: stages)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["ok"], summary["verified"]) == (False, False)
    assert [each["status"] for each in summary["stages"]] == ["failed", "ok"]
    assert "unexplained differences" in summary["stages"][0]["error"]


def test_the_verification_and_the_speed_are_in_the_summary(tmp_path):
    figures = {"met": 2, "missed": 1, "undecided": 0, "runs": [], "overheads": [], "missing": []}
    (tmp_path / "verify.json").write_text(json.dumps({"agrees": False, "unexplained": [1, 2, 3]}))
    (tmp_path / "speed.json").write_text(json.dumps(figures))
    summary = gpu.summary([StageOutcome("a", "ok", 1.0)], tmp_path)
    assert (summary["verified"], summary["unexplained"]) == (False, 3)
    assert (summary["speed"]["met"], summary["speed"]["missed"]) == (2, 1)


def planned(folder, *only):
    """Returns the stages of the plan by name, in their order."""
    return {stage.name: stage for stage in gpu.plan(folder, only)}


def test_the_verification_needs_all_three_runs(tmp_path):
    stages = planned(tmp_path)
    needed = [stages[name].arguments for name in stages["verify"].needs]
    assert {arguments[-1] for arguments in needed} == {
        str(tmp_path / f"{name}.json") for name in verification.SOURCES
    }
    assert len({tuple(w for w in arguments[5:-2] if w != "--counted") for arguments in needed}) == 1


def test_named_stages_run_with_those_that_they_need_and_use():
    stages = [stage("a"), stage("b-1"), stage("b-2", needs=("a",)), stage("c", uses=("b-1",)), stage("d")]
    assert [s.name for s in select_stages(stages, ("b",))] == ["a", "b-1", "b-2"]
    assert [s.name for s in select_stages(stages, ("c", "d"))] == ["b-1", "c", "d"]
    assert select_stages(stages, ("e",)) == []


def test_time_is_reserved_for_summary_stages():
    stages = [stage("a", deadline=90), stage("b", deadline=50), stage("sum", deadline=20, reserved=True)]
    statuses, given = statuses_of(stages, takes=38)
    assert given == {"a": 80, "b": 42, "sum": 20}
    assert statuses["sum"] == ("ok", "")


@pytest.mark.parametrize("only", [[], ["prediction"]])
def test_predictions_use_the_calibrated_profile(tmp_path, only):
    stages = planned(tmp_path, *only)
    names = list(stages)
    emulated = stages["prediction-emulated"]
    where = emulated.arguments.index("--hardware")
    assert emulated.arguments[where + 1] == stages["calibrate"].arguments[-1]
    assert emulated.needs == ("calibrate",)
    asked = [
        prediction_runs.parse(stages[name].arguments[2:]) for name in names if name.startswith("prediction-")
    ]
    assert {one.device for one in asked} == {"vgpu", "cuda"}
    questions = asked[0].questions
    assert questions == [question for one in asked[1:] for question in one.questions]
    assert stages["prediction"].arguments[3:] == tuple(questions)
    assert stages["prediction"].reserved and names.index("prediction") > names.index("prediction-measured")
    assert names.index("probe-kernels") < names.index("calibrate")


def test_predictions_cover_one_scenario_or_every_one():
    """Every scenario of one device, except those that need a user's file."""

    def asked(*only):
        return prediction_runs.parse(planned(Path("x"), *only)["prediction-emulated"].arguments[2:]).questions

    assert {question.partition(":")[0] for question in asked()} == {"mixed"}
    every = asked("prediction")
    files = {"checkpoint", "trace_mooncake"}
    single = {name for name in set(shipped.names()) - files if load(name).engine.ranks == 1}
    assert {question.partition(":")[0] for question in every} == single
    assert len(every) == len(single) * len(states())


@pytest.mark.wide
def test_a_part_of_the_plan_is_valid_and_runs_nothing_else(capsys):
    assert gpu.main(["--dry-run", "--only", "prediction"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    probes = [f"probe-{name}" for name in ("environment", "costs", "copies", "kernels")]
    predictions = ["prediction-emulated", "prediction-measured", "prediction-measured-large", "prediction"]
    assert names == [*probes, "calibrate", *predictions]


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no stage's name starts with spede"):
        gpu.main(["--only", "spede", "--out", str(tmp_path)])


def test_the_plan_check_refuses_values_none_on_cuda(monkeypatch):
    monkeypatch.setattr(gpu, "_HALF_BILLION", ())
    wrong = gpu.check([planned(Path("x"))["speed-0.6b"]])
    assert wrong == ["speed-0.6b: ValueError: on CUDA values are real"]


def test_stages_of_absent_packages_are_not_checked(tmp_path):
    assert planned(tmp_path)["calibrate"].packages == ("scipy",)
    absent = GpuStage("a", ("-m", "no_such_package"), 10, packages=("no_such_package",))
    assert gpu.check([absent]) == []
    assert gpu.check([replace(absent, packages=())])[0].startswith("a: ModuleNotFoundError")


def test_a_new_run_removes_only_its_old_results(tmp_path):
    """Results of other stages stay, also those whose names begin alike."""
    measured = [f"prediction-{each}-latest-measured.json" for each in ("mixed", "overlap_on")]
    others = {measured[1], "recorded-other.json", "other.json"}
    for name in (measured[0], "prediction.json", "recorded.json", "calibrated.yaml", *others):
        (tmp_path / name).write_text("{}")
    asked = {"recorded", "calibrate", "prediction", "prediction-measured"}
    gpu.remove_results([stage for stage in gpu.plan(tmp_path) if stage.name in asked], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others


def test_nvtx_ranges_are_received_by_cupti_where_it_is_found(tmp_path, monkeypatch):
    assert gpu.cupti([tmp_path / "absent", tmp_path]) is None
    library = tmp_path / "libcupti.so.13"
    library.touch()
    assert gpu.cupti([tmp_path / "absent", tmp_path]) == library
    monkeypatch.setattr(gpu, "_libraries", lambda: [tmp_path])
    stages = planned(tmp_path)
    assert stages["overhead-nvtx"].environment == {"NVTX_INJECTION64_PATH": str(library)}
    assert not stages["overhead"].environment


SMALL = ["--set", "workload.requests=2", "--set", "workload.output_tokens={dist: uniform, min: 2, max: 4}"]


@pytest.mark.wide
def test_predictions_can_run_in_their_own_processes(tmp_path):
    words = ["--device", "vgpu", "--workers", "2", "--folder", str(tmp_path), *SMALL]
    assert prediction_runs.main(["mixed:pr25945", *words]) == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"prediction-mixed-pr25945-emulated.json"}
    pairs, missing = gathered(tmp_path, ["mixed:pr25945"])
    assert (pairs, missing) == ([], ["mixed pr25945"])


def test_a_failing_prediction_leaves_the_others_unless_the_device_failed(tmp_path, monkeypatch, capsys):
    own = prediction_runs.execute
    errors = {
        "grammar": MemoryError("out of memory"),
        "penalties": torch.AcceleratorError("an illegal access"),
        "retraction": ValueError("never"),
    }

    def broken(resolved, options, **more):
        if resolved.scenario.name in errors:
            raise errors[resolved.scenario.name]
        return own(resolved, options, **more)

    monkeypatch.setattr(prediction_runs, "execute", broken)
    questions = [f"{name}:latest" for name in ("grammar", "mixed", "penalties", "retraction")]
    assert prediction_runs.main([*questions, "--device", "vgpu", "--folder", str(tmp_path), *SMALL]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "grammar:latest: MemoryError: out of memory",
        "penalties:latest: AcceleratorError: an illegal access",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["prediction-mixed-latest-emulated.json"]


def test_speed_stages_are_timed_only_and_of_the_shape_with_limits(tmp_path):
    stages = planned(tmp_path)
    given = single_run.parse(stages["speed-8b"].arguments[2:])
    assert given.timed and single_run.parse(stages["speed-0.6b"].arguments[2:]).timed
    scenario = load(given.scenario, given.set)
    assert (scenario.model.preset, scenario.engine.max_running_requests) == LIMITED
    assert (scenario.workload.requests, scenario.engine.relay.state) == (256, "latest")
    assert scenario.engine.kv_tokens >= 64 * (1024 + 1024)
    assert stages["speed"].reserved and list(stages)[-1] == "speed"


def test_a_prediction_runs_on_the_profile_that_a_stage_wrote(tmp_path):
    profile = tmp_path / "own.yaml"
    base = resources.files("schedbench.profiles.hardware").joinpath("h200.yaml").read_text()
    profile.write_text(base.replace("name: h200", "name: own"))
    where = ["--device", "vgpu", "--folder", str(tmp_path), "--hardware", str(profile)]
    assert prediction_runs.main(["mixed:latest", *where, *SMALL]) == 0
    written = json.loads((tmp_path / "prediction-mixed-latest-emulated.json").read_text())
    assert written["hardware"]["name"] == "own"


@pytest.mark.wide
def test_kineto_reads_the_size_of_its_buffers(tmp_path):
    conf = tmp_path / "kineto.conf"
    conf.write_text(gpu.KINETO)
    program = (
        "from torch.profiler import ProfilerActivity as Of, profile\nwith profile(activities=[Of.CPU]): pass"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KINETO_CONFIG": str(conf), "KINETO_LOG_LEVEL": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = int(gpu.KINETO.partition("=")[2])
    assert wanted << 20 < 1 << 31, "torch 2.11 counts in an int"
    assert f"Max GPU buffer size: {wanted}MB" in done.stdout + done.stderr


def test_without_an_installation_the_callers_folders_are_searched_too(tmp_path):
    root = Path(__file__).resolve().parents[3]
    asked = ["make", "-s", "--no-print-directory", "gpu", "VENV=", "PYTHON=printenv PYTHONPATH #"]
    done = subprocess.run(
        asked,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [f".typing:{tmp_path}"]

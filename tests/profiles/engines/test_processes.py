"""Engines in their own processes: every failure is reported in one sentence, and no process is left running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from schedbench.profiles.check.engine import examine_engine
from schedbench.profiles.check.report import Evidence
from schedbench.profiles.engines import client
from schedbench.profiles.engines.client import EngineFailedError, opened_engine
from schedbench.profiles.engines.failures import Answer
from schedbench.profiles.engines.names import EngineError
from schedbench.profiles.engines.process import EnginePipes
from schedbench.profiles.engines.server import NEEDED, lacking
from schedbench.profiles.judge import local
from schedbench.profiles.judge.gates import check, parse
from schedbench.profiles.platform.engine_choice import EngineChoice
from schedbench.profiles.platform.pool import pool
from schedbench.profiles.platform.resolve import Resolved, ask
from schedbench.profiles.ranks.execute import Options, execute
from schedbench.profiles.record.environment import tool
from schedbench.scenarios.problems import ScenarioError

from .checkouts import write_package
from .conftest import (
    ADAPTER,
    QUIET,
    SLEEP,
    Scripted,
    WriteEngine,
    end_once_it_hangs,
    interrupt_when,
    run,
    sleepers,
    wait_until,
)

pytestmark = pytest.mark.wide


@pytest.fixture
def ended_engines() -> Iterator[None]:
    """For tests whose engine no other test uses."""
    yield
    client.end_engines()


def failure(question: Resolved, engine: str) -> str:
    with pytest.raises(EngineFailedError) as caught:
        run(question, engine)
    return str(caught.value)


def test_a_result_has_the_engines_label_and_source_lines(question: Resolved, scripted: Scripted) -> None:
    result = run(question, scripted("import torch\ntorch.zeros(1, device=device).item()"))
    part = result.labels.engine
    assert part is not None
    assert (part.name, part.version, part.commit) == ("toy_adapter", "1.0", None)
    assert {row.status for row in result.requests} == {"finished"}
    assert {(row.site.file, row.site.line, row.site.statement) for row in result.copies if row.site} == {
        ("python/toy/script.py", 2, "torch.zeros(1, device=device).item()")
    }
    assert result.run.import_s is not None
    assert result.document()["labels"]["engine"]["sha256"] == part.sha256


def test_lines_of_a_package_at_the_top_of_its_folder_are_named_as_in_a_checkout(
    question: Resolved, tmp_path: Path
) -> None:
    text = "import torch\ndef step(device):\n    torch.zeros(1, device=device).item()\n"
    write_package(tmp_path / "toy", text)
    result = run(question, f"{ADAPTER}:{tmp_path}")
    client.end_engines()
    assert {(row.site.file, row.site.line) for row in result.copies if row.site} == {
        ("python/toy/loop.py", 3)
    }


def test_runs_share_only_the_import(question: Resolved, scripted: Scripted, tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = f"""
        import os, toy
        toy.runs = getattr(toy, "runs", 0) + 1
        print(os.getppid(), toy.runs, file=open({str(log)!r}, "a"))
        """
    first, second = run(question, scripted(text)), run(question, scripted(text))
    lines = log.read_text().splitlines()
    assert lines[0] == lines[1]
    assert lines[0].endswith(" 1")
    assert first.run.import_s == second.run.import_s
    assert first.outputs == second.outputs


@pytest.mark.usefixtures("ended_engines")
def test_the_environment_of_an_adapter_is_set_before_the_import(question: Resolved, toy: WriteEngine) -> None:
    run(question, toy(f"import os; assert os.environ['TOY'] == '1'\n{QUIET}"))


BAD_INDEX = """import torch; from schedbench.sched.kernels.rows import resolve_negative
resolve_negative(*(torch.tensor([n], device=device) for n in (-9, 0)))"""


AT = "(at python/toy/script.py:1)\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise ValueError('bad batch')", f"the run failed: ValueError: bad batch {AT}"),
        ("assert False", f"the run failed: AssertionError {AT}"),
        ("exit(2)", f"the run failed: exited with 2 {AT}"),
        (
            "input()",
            "the run failed: EOFError: EOF when reading a line; an engine has no standard input (at ",
        ),
        ("import os; os._exit(0)", "the run did not end: its process exited with 0"),
        (
            "import os; print('seen'); os._exit(137)",
            "its process exited with 137\nWhat it printed:\nseen",
        ),
        ("import os; os.kill(os.getpid(), 11)", "the run did not end: its process was ended by SIGSEGV"),
        (
            "import torch; torch.zeros(1, device='cuda:1')",
            "the run failed: RuntimeError: invalid device ordinal",
        ),
        ("import gone", f"the run failed: ModuleNotFoundError: No module named 'gone' {AT}"),
        ("import os; os.close(2); os.closerange(3, 99)", "the run did not end: its process exited with "),
        (
            "import torch; torch.zeros(2, device=device) + torch.zeros(3, device=device)",
            f"must match the size of tensor b (3) at non-singleton dimension 0 {AT}",
        ),
        (
            BAD_INDEX,
            "index 9 is out of bounds for dimension 0 with size 1 (at python/toy/script.py:2; raised in schedbench's"
            " stub, with the engine's data, at sched/kernels/rows.py:",
        ),
        (
            "import torch; torch.cuda.Stream().wait_event(None)",
            f"'NoneType' object has no attribute 'wait' {AT}",
        ),
        (
            "import torch; torch.cuda.CUDAGraph().replay()",
            f"the run failed: RuntimeError: replay of a graph that was not captured {AT}",
        ),
    ],
)
def test_a_failing_run_is_described(question: Resolved, scripted: Scripted, text: str, says: str) -> None:
    assert says in failure(question, scripted(text))


def test_what_schedbench_finds_in_a_run_is_one_sentence(question: Resolved, scripted: Scripted) -> None:
    error = "schedbench.profiles.engines.failures import EngineFaultError"
    text = f"from {error}\nraise EngineFaultError('a row was freed twice')"
    assert failure(question, scripted(text)).endswith(": the run failed: a row was freed twice")


def test_memory_that_an_engine_holds_fails_its_run_and_check_asks_all(
    question: Resolved, scripted: Scripted
) -> None:
    engine = scripted("import toy.loop; toy.loop.leak = '4 rows were not freed'")
    assert ": the run failed: 4 rows were not freed" in failure(question, engine)
    asked = replace(question, engine=EngineChoice(engine))
    checks = {check.name: check for check in examine_engine(asked, (0,)).checks}
    assert checks["run"].evidence == (Evidence("4 rows were not freed"),)
    others = {name: checks[name].verdict for name in ("tokens", "overlap", "adversary")}
    assert others == dict.fromkeys(others, "passed")


STREAMS = "schedbench.profiles.vgpu.streams"


@pytest.mark.parametrize(
    ("text", "error", "file"),
    [
        ("from schedbench.sched.batch import draft_step\ndraft_step(None)", "TypeError", "sched/batch.py"),
        (
            f"import {STREAMS} as ours; del ours.CURRENT\nours.Event()",
            "NameError",
            "profiles/vgpu/streams.py",
        ),
    ],
    ids=["scheduler", "device"],
)
def test_an_error_of_our_own_is_not_the_engines(
    question: Resolved, scripted: Scripted, text: str, error: str, file: str
) -> None:
    said = failure(question, scripted(text))
    assert f"the run failed: an error in schedbench's own code, not the engine's: {error}: " in said
    assert re.search(rf" \(at {file}:\d+, called at python/toy/script\.py:2\)\n", said)


@pytest.mark.parametrize(
    ("module", "error", "says"),
    [
        ("engines.names", "EngineError", "no such mode"),
        (
            "programs.hollow",
            "HollowKernelError",  # of a kernel whose effect is unknown
            "the engine cannot be run with this scenario: no such mode",
        ),
    ],
)
def test_what_an_engine_cannot_run_keeps_its_message(
    question: Resolved, scripted: Scripted, module: str, error: str, says: str
) -> None:
    with pytest.raises(EngineError, match=f"^{says}$"):
        run(
            question,
            scripted(f"from schedbench.profiles.{module} import {error}\nraise {error}('no such mode')"),
        )


OUTSIDE = """
import torch, triton
import triton.language as tl
@triton.jit
def put(x, place: tl.constexpr):
    tl.store(x + place, 1)
put[(1,)](torch.zeros(4, dtype=torch.int32, device="cuda"), place=1 << 40)
"""


def test_a_kernel_that_writes_outside_its_tensors_is_an_error_of_the_engine(
    question: Resolved, scripted: Scripted
) -> None:
    said = failure(question, scripted(OUTSIDE))
    assert "KernelBoundsError: put writes memory that belongs to no tensor of the virtual GPU" in said
    assert "(at python/toy/script.py:6)" in said


def test_a_traceback_has_the_engines_frames_and_the_stubs_line(
    question: Resolved, scripted: Scripted
) -> None:
    said = failure(question, scripted(BAD_INDEX))
    frames = re.findall(r'^  File "(.+)", line \d+, in (\w+|<\w+>)$', said, re.MULTILINE)
    assert frames == [
        ("python/toy/loop.py", "step"),
        ("python/toy/script.py", "<module>"),
        ("sched/kernels/rows.py", "resolve_negative"),
    ]


def test_an_engine_may_signal_its_parent(question: Resolved, scripted: Scripted) -> None:
    """SGLang's scheduler signals its parent when it fails."""
    engine = scripted("import os, signal; os.kill(os.getppid(), signal.SIGQUIT); os._exit(1)")
    process = opened_engine(EngineChoice(engine))
    process.start()
    before = process.pid
    assert "its process exited with 1" in failure(question, engine)
    assert process.pid == before


def test_a_forked_process_sends_no_second_result(question: Resolved, scripted: Scripted) -> None:
    engine = scripted("import os\nif os.fork():\n    os.wait()")
    assert run(question, engine).outputs == run(question, engine).outputs


@pytest.mark.parametrize(
    "late", ["late()", "x = {1}; one = weakref.ref(x, lambda _: late()); del x\ntime.sleep(1000)"]
)
def test_an_interrupted_run_ends_and_is_marked(
    question: Resolved, scripted: Scripted, tmp_path: Path, late: str
) -> None:
    """Also where it is interrupted in the callback of a weak reference, in which errors are lost."""
    started = tmp_path / "started"
    waits = f"open({str(started)!r}, 'w').close()\n    time.sleep(1000)"
    engine = scripted(f"import time, weakref\ndef late():\n    {waits}\n{late}")
    interrupt_when(started.exists)
    assert run(question, engine).run.cancelled


def test_an_interruption_is_not_lost_behind_the_answer_of_a_run(
    question: Resolved, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives when the answer has been sent, and has not been read."""
    following = EnginePipes.next

    def interrupted(pipes: EnginePipes, patience: float) -> Answer | None:
        answer = following(pipes, patience)
        if answer is not None and "result" in answer:
            monkeypatch.undo()
            pipes._buffer = json.dumps(answer).encode() + b"\n" + pipes._buffer
            signal.raise_signal(signal.SIGINT)
        return answer

    monkeypatch.setattr(EnginePipes, "next", interrupted)
    assert run(question, scripted("")).run.cancelled


def test_a_run_succeeds_after_a_hang_or_a_killed_process(
    question: Resolved, scripted: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    engine = scripted(f"import time\nprint('seen'); open({str(seen)!r}, 'w').close()\ntime.sleep(1000)")
    with monkeypatch.context() as patch:
        end_once_it_hangs(patch, engine, 2, seen.exists)
        said = failure(question, engine)
    assert said.endswith(
        ": the run made no progress for 2 s (--engine-timeout), and was ended at python/toy/script.py:3\n"
        "What it printed:\nseen\nStack of rank 0 (most recent call last):\n"
        '  File "python/toy/loop.py", line 5, in step\n'
        '    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), {"device": device, "rank": rank})\n'
        '  File "python/toy/script.py", line 3, in <module>\n'
        "    time.sleep(1000)"
    )
    assert "the run did not end: the engine's process was ended by SIGKILL" in failure(
        question, scripted("import os; os.killpg(0, 9)")
    )
    assert len(run(question, scripted("")).requests) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "raise ImportError('needs a GPU')",
            "its import failed: ImportError: needs a GPU (at python/toy/loop.py:1)\n",
        ),
        (
            "def f(:",
            ': invalid syntax (loop.py, line 1) (at python/toy/loop.py:1)\n  File "python/toy/loop.py", line 1\n',
        ),
        (
            "import os, signal; os.kill(os.getppid(), signal.SIGQUIT); os._exit(7)",
            "its import did not end: the engine's process exited with 7",
        ),
    ],
)
@pytest.mark.usefixtures("ended_engines")
def test_a_failing_import_is_described(question: Resolved, toy: WriteEngine, text: str, says: str) -> None:
    """test_engine_failures.py has an import that takes too long."""
    assert says in failure(question, toy(f"{text}\n{QUIET}"))


def test_engines_end_with_the_program(toy: WriteEngine, tmp_path: Path) -> None:
    engine = toy(f"import subprocess\ndef step(device):\n    subprocess.run({SLEEP.split()})\n")
    program = subprocess.Popen(
        [sys.executable, "-m", "schedbench", "run", "mixed", "--engine", engine],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    wait_until(sleepers, of=program)
    program.kill()
    program.wait()
    wait_until(lambda: not sleepers() and not list(tmp_path.glob("schedbench-*")))


@pytest.mark.usefixtures("ended_engines")
def test_temporary_files_of_a_killed_run_end_with_the_engine(
    question: Resolved, toy: WriteEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    killed = "def step(device):\n    tempfile.mkdtemp('of-the-run')\n    os._exit(9)\n"
    failure(question, toy(f"import os, tempfile\n{killed}"))
    assert len([*folder.rglob("*of-the-run")]) == 1
    client.end_engines()
    assert not [*folder.iterdir()]


def test_an_interrupted_import_ends_with_its_processes(toy: WriteEngine) -> None:
    engine = toy(f"import subprocess\nsubprocess.run({SLEEP.split()})\n{QUIET}")
    program = subprocess.Popen(
        [sys.executable, "-m", "schedbench", "doctor", "--engine", engine], stderr=subprocess.PIPE, text=True
    )
    wait_until(sleepers, of=program)
    program.send_signal(signal.SIGINT)
    _, said = program.communicate()
    assert (program.returncode, said) == (130, "schedbench: interrupted: there is no result\n")
    wait_until(lambda: not sleepers())


REFUSING = "needs = lambda self, scenario: [f'{scenario.name} needs a mixer (Loop.mix)']"


@pytest.mark.usefixtures("ended_engines")
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "import toy.loop",
            "import json as toy; toy.loop = None",
            "toy was imported from None, not from its source",
        ),
        (
            "str] = {}",
            "str] = {'not_installed': 'not-installed==1'}",
            r"lacks not_installed; .* -m pip install .* 'not-installed==1'$",
        ),
        (
            "def load(self",
            f"{REFUSING}\n\n    def load(self",
            r"cannot be run with this scenario: mixed needs a mixer \(Loop\.mix\)$",
        ),
    ],
    ids=["package from elsewhere", "missing requirement", "refused scenario"],
)
def test_an_adapter_refuses_before_the_import_of_its_package(
    question: Resolved, toy: WriteEngine, tmp_path: Path, old: str, new: str, says: str
) -> None:
    adapter, text = tmp_path / "changed.py", ADAPTER.read_text()
    assert old in text
    adapter.write_text(text.replace(old, new))
    with pytest.raises(EngineError, match=says):
        run(question, toy("raise OSError").replace(str(ADAPTER), str(adapter)))


@pytest.mark.usefixtures("ended_engines")
def test_a_file_other_than_an_interpreter_is_refused(
    question: Resolved, toy: WriteEngine, tmp_path: Path
) -> None:
    for python, why in (
        (str(tmp_path / "python"), " cannot be started: No such file"),
        (str(tmp_path), " is a folder"),
        ("/bin/false", ", which exited with 1"),
    ):
        with pytest.raises(EngineError, match=f"^no Python interpreter: {re.escape(python)}{why}"):
            run(question, toy(), python=python)


def interpreter(file: Path, *folders: str) -> str:
    """This Python without its environment, and with the packages of these folders."""
    path = "".join(f":{folder}" for folder in folders)
    file.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH{path}" exec {sys.executable} -S "$@"\n')
    file.chmod(0o755)
    return str(file)


@pytest.mark.usefixtures("ended_engines")
def test_another_interpreter_imports_only_our_package(
    question: Resolved, toy: WriteEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(EngineError, match=r"bare lacks torch, numpy, .* -m pip install 'torch>="):
        run(question, toy(), python=interpreter(tmp_path / "bare"))
    found = run(question, toy(), python=interpreter(tmp_path / "full", sysconfig.get_path("purelib")))
    assert found.tool == tool()


def test_another_interpreter_must_have_our_dependencies() -> None:
    assert lacking((3, 9), {}, ours=True) == "is Python 3.9; schedbench needs 3.11 or newer"
    requires = {"json": "json", "gone": "gone>=1"}
    pip = f"{sys.executable} -m pip install 'gone>=1'"
    assert lacking((3, 12), requires, ours=False) == f"lacks gone: {pip}"
    assert lacking((3, 12), requires, ours=True).endswith(
        f"for --engine-python engine-venv/bin/python: {sys.executable} -m venv engine-venv"
        " && engine-venv/bin/python -m pip install 'json' 'gone>=1'"
    )
    assert lacking((3, 12), {"json": "json"}, ours=True) == ""


def test_required_packages_equal_those_of_the_project() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert set(NEEDED.values()) <= {stated.partition(";")[0] for stated in project["dependencies"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "defines no ADAPTER"),
        ("ADAPTER = 1", "ADAPTER has no package, no python_path"),
        ("import gone", "ModuleNotFoundError: No module named 'gone'"),
        (None, "no such file with an adapter"),
    ],
)
def test_an_adapter_of_the_user_is_checked(
    question: Resolved, toy: WriteEngine, tmp_path: Path, text: str | None, says: str
) -> None:
    adapter = tmp_path / "mine.py"
    if text is not None:
        adapter.write_text(text)
    with pytest.raises(EngineError, match=says):
        run(question, toy().replace(str(ADAPTER), str(adapter)))


ABSENT_KERNEL = """
import toy_kernels
toy_kernels.registered()
settled_before = []
def step(device):
    toy_kernels.begun()
def settled(device):
    if len(settled_before) == 2:
        toy_kernels.plan(3)
    settled_before.append(device)
"""


@pytest.mark.usefixtures("ended_engines")
@pytest.mark.parametrize("recorded", [False, True])
def test_kernels_of_an_absent_package_are_not_counted(
    question: Resolved, toy: WriteEngine, tmp_path: Path, recorded: bool
) -> None:
    """Only the third step and later ones decode."""
    budget = ask("mixed").scenario.expect
    scenario = question.scenario.model_copy(update={"expect": budget})
    engine = EngineChoice(toy(ABSENT_KERNEL))
    options = Options(record=tmp_path if recorded else None)
    result = execute(replace(question, scenario=scenario, engine=engine), options)
    part = result.labels.engine
    assert part is not None
    assert part.edge.without_effect == ("toy_kernels.begun", "toy_kernels.plan")
    reason = "toy_kernels.plan was called, which is not installed: what it launches is unknown"
    assert part.edge.uncounted == {"decode": reason}
    assert set(result.per_step) == {"prefill", "mixed"}
    assert {row.kind for row in (*result.copies, *result.syncs)} <= {"prefill", "mixed", "none"}
    assert result.not_asked == {"decode.steady": reason}
    gate = check(parse("decode.steady.schedule.sync:0"), {}, a=[result], b=[result], more=[])
    assert (gate.outcome, gate.why) == ("undecided", reason)


@pytest.mark.processes
def test_draws_of_an_engine_run_in_parallel_where_that_is_faster(
    question: Resolved, scripted: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each process of a pool imports the engine once."""
    log = tmp_path / "log"
    engine = scripted(f"import os\nprint(os.getppid(), file=open({str(log)!r}, 'a'))")
    asked = replace(question, engine=EngineChoice(engine))
    known, profiles = run(question, engine), [question.hardware] * 4
    serially = list(local.run_each(map, asked, known, profiles))
    assert len(set(log.read_text().split())) == 1
    monkeypatch.setattr(local, "saves_time", lambda *_: True)
    with pool(2) as each:
        found = list(local.run_each(each, asked, known, profiles))
    assert [result.metrics for result in found] == [result.metrics for result in serially]
    assert len(set(log.read_text().split())) in (2, 3)


def test_several_ranks_and_a_real_device_are_refused(question: Resolved, toy: WriteEngine) -> None:
    engine = EngineChoice(toy())
    stages, single = (replace(asked, engine=engine) for asked in (ask("pp2"), question))
    with pytest.raises(EngineError, match="runs on one rank, and the scenario has 2"):
        execute(stages, Options())
    with pytest.raises(EngineError, match="runs on the virtual GPU"):
        execute(single, Options(device="cuda"))


def test_a_model_runner_of_an_engines_own_is_refused_where_there_is_none(toy: WriteEngine) -> None:
    question = ask("mixed", ["engine.model_runner=own"])
    with pytest.raises(EngineError, match="its adapter has no model runner of the engine's own"):
        run(question, toy())
    with pytest.raises(ScenarioError, match="name one with --engine"):
        execute(question, Options(device="vgpu"))


def test_child_processes_of_an_engine_end_with_it(question: Resolved, scripted: Scripted) -> None:
    """The last test of the file, because all others share the engine that ends here."""
    run(question, scripted(f"import subprocess; subprocess.Popen({SLEEP.split()})"))
    assert sleepers()
    client.end_engines()
    wait_until(lambda: not sleepers())  # they were killed, and end when they get a processor

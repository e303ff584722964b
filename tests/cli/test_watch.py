"""``schedbench watch`` as a command: exit codes, output, and wrong input."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import RunCommand
from tests.json_programs import is_running

GOOD = "import torch\nx = torch.ones(3, device='cuda')\nprint('sum', x.sum().item())\n"
RACE = """import torch
side, x = torch.cuda.Stream(), torch.zeros(3, device="cuda")
with torch.cuda.stream(side):
    x + 1
"""


@pytest.fixture
def watch(run_parent_command: RunCommand) -> RunCommand:
    return partial(run_parent_command, "watch")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


@pytest.mark.wide
def test_programs_have_results_that_are_compared_by_line(
    watch: RunCommand, run_parent_command: RunCommand, script: Path, tmp_path: Path
) -> None:
    script.write_text(GOOD)
    done = watch("--output-dir", tmp_path / "good", "--format", "json", "--", "python", script)
    assert (done.code, done.err) == (0, "sum 3.0\n")
    document = json.loads(done.out)
    assert document == json.loads((tmp_path / "good" / "result.json").read_text())
    assert [row["site"]["statement"] for row in document["syncs"]] == ["print('sum', x.sum().item())"]

    script.write_text(RACE)
    done = watch("--output-dir", tmp_path / "race", "--", "python", script)
    assert done.code == 1
    said = " ".join(done.out.split())
    assert said.startswith("1 hazard: ")
    assert "; the host never waited for the device. " in said
    assert "\n\nwhere the host waited: none\n" in done.out
    assert "undeclared" not in said
    assert re.search(r"\nhazards\n.*\n    program.py:4  x \+ 1\n", done.out, re.DOTALL)

    good, race = (tmp_path / name / "result.json" for name in ("good", "race"))
    compared = " ".join(run_parent_command("compare", good, race).out.split())
    assert "program default d2h 1 -> 0, program default sync 1 -> 0" in compared
    assert "same engine" not in run_parent_command("compare", good, good).out.replace("\n", " ")


def test_a_failing_program_shows_its_traceback_and_one_sentence(watch: RunCommand, script: Path) -> None:
    script.write_text("def load():\n    raise ValueError('bad data')\nload()\n")
    done = watch("--", "python", str(script))
    assert (done.code, done.out) == (4, "")
    assert done.err.startswith(f'Traceback (most recent call last):\n  File "{script}", line 3, in <module>')
    assert done.err.endswith(f"schedbench: {script}: ValueError: bad data\n")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("end", "failure"),
    [
        ("raise SystemExit(3)", "exited with 3"),
        ("x.gone", "AttributeError: "),
        ("raise GeneratorExit", "GeneratorExit"),
    ],
)
def test_a_program_that_fails_after_it_used_the_gpu_shows_what_it_did(
    watch: RunCommand, script: Path, tmp_path: Path, end: str, failure: str
) -> None:
    script.write_text(f"import os\nos.chdir('/')\n{GOOD}{end}\n")
    done = watch("--output-dir", tmp_path, "--", "python", str(script))
    assert done.code == 4
    said = " ".join(done.out.split())
    assert said.startswith(f"broke off: {failure}") and "in 1 call; all of it at program.py:5." in said
    assert "broke off: partial" in done.out
    assert done.err.splitlines()[-1].startswith(f"schedbench: {script}: {failure}")
    assert json.loads((tmp_path / "result.json").read_text())["run"]["failure"].startswith(failure)


@pytest.mark.wide
def test_a_process_that_the_program_forks_gives_no_second_result(
    watch: RunCommand, script: Path, tmp_path: Path
) -> None:
    """And the result does not wait for it."""
    left = tmp_path / "left"
    script.write_text(
        f"{GOOD}import atexit, os, time\n"
        f"os.system('sleep 1000 & echo $! > {left}')\n"
        "if os.fork():\n    print('ended with', os.wait()[1] >> 8, flush=True)\n"
        "    atexit.register(lambda: x.sum().item())\n"
        "else:\n    if not (process := os.fork()):\n        time.sleep(1000)\n"
        f"    print(process, file=open('{left}', 'a'), flush=True)\n"
        "    try:\n        x.sum().item()\n    except RuntimeError as error:\n        print(error, flush=True)\n"
        "    raise SystemExit(7)\n"
    )
    done = watch("--format", "json", "--", "python", str(script))
    processes = [int(number) for number in left.read_text().split()]
    assert done.code == 0 and [is_running(process) for process in processes] == [True] * 2
    for process in processes:
        os.kill(process, signal.SIGKILL)
    assert done.err.startswith("sum 3.0\nCannot re-initialize CUDA in forked subprocess.")
    assert done.err.endswith("ended with 7\n")
    assert sum(row["count"] for row in json.loads(done.out)["syncs"]) == 2


@pytest.mark.wide
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import os; os._exit(1)", "exited with 1 before it was done"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "was ended by signal 9 before it was done",
        ),
        ("def f(:", "SyntaxError"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("import torch; torch.zeros(1, device='cuda:3')", "invalid device ordinal"),
    ],
    ids=["_exit", "killed", "syntax", "import", "no such device"],
)
def test_a_process_that_ends_early_is_reported(
    watch: RunCommand, script: Path, body: str, message: str
) -> None:
    script.write_text(body)
    done = watch("--", "python", str(script))
    assert (done.code, done.out) == (4, "")
    assert message in done.err


@pytest.mark.wide
def test_the_program_ends_with_a_killed_parent(script: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    script.write_text(
        f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    )
    command = [sys.executable, "-m", "schedbench", "watch", "--", "python", str(script)]
    parent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 100
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    program = int(started.read_text())
    while Path(f"/proc/{program}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{program}").exists()


ENDLESS = f"""{GOOD}
layer, looping = torch.nn.Linear(3, 3, device="cuda"), False
try:
    while True:
        layer(x).sum().backward()
        if not looping:
            looping = not print("ready", flush=True)
except KeyboardInterrupt:
    print("caught", flush=True)
    END
"""


@pytest.mark.wide
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_program_has_a_result_of_what_it_did(
    script: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    script.write_text(ENDLESS.replace("END", "raise"))
    with _ready(script, "--output-dir", str(tmp_path), patience=100) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (code, "caught\n")
    assert out.startswith("interrupted; the host waited ")
    assert "cancelled: partial" in out and "program.py:3" in out
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["run"]["cancelled"] and "failure" not in document["run"]


@pytest.mark.wide
def test_a_second_interruption_ends_a_program_that_goes_on_after_the_first(script: Path) -> None:
    script.write_text(ENDLESS.replace("END", "import time; time.sleep(300)"))
    with _ready(script) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None and process.stderr.readline() == "caught\n"
        assert "has not ended yet; a second interruption" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=100) == ("", "schedbench: interrupted: there is no result\n")
    assert process.returncode == 130


def _ready(script: Path, *options: str, patience: float = 2) -> subprocess.Popen[str]:
    """The command with that script, which is in its loop, and which may take ``patience`` seconds to end after an
    interruption."""
    program = (
        "from schedbench.cli.app import console\nfrom schedbench.profiles.programs import watch\n"
        f"watch._ENDS_S = {patience}\nconsole()"
    )
    command = [sys.executable, "-c", program, "watch", *options, "--", "python", str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert [process.stderr.readline() for _ in range(2)] == ["sum 3.0\n", "ready\n"]
    return process


def test_wrong_options_and_interpreters_are_refused(watch: RunCommand, script: Path) -> None:
    script.write_text(GOOD)
    assert watch("--hardware", "h999", "--", "python", str(script)).code == 2
    assert watch("--map", "nosuch", "--", "python", str(script)).code == 2
    done = watch("--", "nosuch/python", str(script))
    assert done.code == 2 and "nosuch/python: no such interpreter" in done.err


@pytest.mark.wide
def test_a_hollow_package_is_named(watch: RunCommand, script: Path) -> None:
    script.write_text("import absent_kernels, torch\nabsent_kernels.norm(torch.ones(3, device='cuda'))\n")
    refused = watch("--hollow", "absent_kernels", "--hollow", "absent", "--", "python", str(script))
    assert refused.code == 4
    assert "absent_kernels.norm was called with a tensor of the virtual GPU" in refused.err

"""``--relay FILE.py:NAME``: a state defined in a file, and the guide of docs/first-change.md about it."""

from __future__ import annotations

import pickle
import re
import shlex
from pathlib import Path

import pytest

from schedbench.cli.errors import scheduler_line
from schedbench.profiles.platform.resolve import ask
from schedbench.profiles.platform.user_files import imported
from schedbench.profiles.run.crash import crash_of
from schedbench.scenarios.problems import ScenarioError
from tests.cli.test_documented_commands import scripts
from tests.cli.test_shown_output import comparable
from tests.conftest import RunCommand

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/first-change.md").read_text().split("## Your own relay variant")[1]
SMALL = [word for one in ("requests=2", "output_tokens=4", "values=none") for word in ("--set", one)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which has the guide's file."""
    found = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    (tmp_path / "my_relay.py").write_text(found[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def shown(verb: str) -> list[str]:
    """The paragraphs that the guide shows after the command."""
    block = GUIDE.split(f"    schedbench {verb}")[1].split("```\n")[1]
    return [comparable(part) for part in block.split("\n\n")]


def command(verb: str) -> str:
    found = re.search(rf"^    schedbench ({verb} .*)$", GUIDE, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("verb", ["check", "compare"])
@pytest.mark.usefixtures("folder")
def test_a_command_of_the_guide_passes_as_shown(run_command: RunCommand, verb: str) -> None:
    said = run_command(*shlex.split(command(verb)))
    assert said.code == 0, said.out
    assert all(part in comparable(said.out) for part in shown(verb))


def test_the_workflow_passes_where_the_state_of_the_guide_is_engaged_and_only_there(
    run_command: RunCommand,
    folder: Path,  # noqa: ARG001
) -> None:
    _, compare = scripts(ROOT / "docs/relay-pull-request.yml")
    line = [*shlex.split(compare.partition(" >> ")[0]), "--quick"]
    said = run_command(*line)
    assert said.code == 0 and "engaged in 375 of 375 decode steps" in said.out
    line[1] = "cases/overlap-wins"
    said = run_command(*line)
    assert said.code == 1 and "NOT_ENGAGED" in said.out


def test_a_state_of_a_file_runs_in_processes_and_its_digest_is_stored(
    run_command: RunCommand, folder: Path
) -> None:
    resolved = ask("mixed", ["relay=my_relay.py:pinned"])
    again = pickle.loads(pickle.dumps(resolved.relays[0]))
    assert again.state.name == "pinned"
    assert again.state.overlapped.penalty_tokens is resolved.relays[0].state.overlapped.penalty_tokens
    run_command("run", "mixed", "--relay", "my_relay.py:pinned", *SMALL, "--output-dir", folder)
    written = (folder / "result.json").read_text()
    assert '"file": "my_relay.py", "key": "engine.relay"' in written


@pytest.mark.parametrize(
    ("relay", "message"),
    [
        ("none.py:mine", "none.py: no such file with a relay state"),
        ("broken.py:mine", "ZeroDivisionError: division by zero"),
        ("exits.py:mine", "SystemExit: 0"),
        ("my_relay.py:pinned_tokens", "pinned_tokens is no State"),
        ("named.py:latest", "latest is the name of a shipped state"),
    ],
)
def test_a_file_without_the_state_is_refused(folder: Path, relay: str, message: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "exits.py").write_text("raise SystemExit(0)\n")
    (folder / "named.py").write_text(
        "from schedbench.sched.relay.states import states\nlatest = states()['latest']\n"
    )
    with pytest.raises(ScenarioError, match=message):
        ask("mixed", [f"relay={relay}"])


def test_a_crash_in_a_file_of_the_users_names_its_line(folder: Path) -> None:
    """Also in one of two files of one name."""
    (folder / "old").mkdir()
    for file in (bad := folder / "old/bad.py", folder / "bad.py"):
        file.write_text("def fail():\n    1 / 0\n")
    modules = [imported(file, "a relay state") for file in (bad, folder / "bad.py")]
    for module, line in zip(modules, ("old/bad.py:2", "bad.py:2"), strict=True):
        with pytest.raises(ZeroDivisionError) as raised:
            module.fail()
        assert scheduler_line(raised.value) == line
        assert str(crash_of(raised.value)).endswith(f" (at {line}: 1 / 0)")


def test_two_versions_of_a_file_are_compared(run_command: RunCommand, folder: Path) -> None:
    (folder / "old").mkdir()
    text = (folder / "my_relay.py").read_text()
    (folder / "old/my_relay.py").write_text(text.replace("return pinned.to(", "return pinned.clone().to("))
    sides = ("--a", "relay=old/my_relay.py:pinned", "--b", "relay=my_relay.py:pinned")
    said = run_command("compare", "cases/h2d-blocking-output-ids", *sides, *SMALL, "--seeds", "1")
    assert said.code == 0, said.err
    assert "compared: engine.relay, contents of my_relay.py" in said.out


def test_a_policy_waits_for_the_device_by_the_module_that_the_guide_names(
    run_command: RunCommand, folder: Path
) -> None:
    module, file = "torch.get_device_module(context.device)", folder / "my_relay.py"
    assert f"`{module}`" in GUIDE
    file.write_text(file.read_text().replace("    return", f"    {module}.synchronize()\n    return"))
    asked = ("cases/h2d-blocking-output-ids", "--relay", "my_relay.py:pinned", *SMALL)
    said = run_command("run", *asked, "--all")
    assert "my_relay.py:15 cudaDeviceSynchronize" in " ".join(said.out.split())
    assert run_command("check", *asked, "--quick").code == 0


@pytest.mark.parametrize("code", [0, 1])
def test_a_policy_that_exits_is_a_crash_of_the_scheduler(
    run_command: RunCommand, folder: Path, code: int
) -> None:
    file = folder / "my_relay.py"
    file.write_text(re.sub(r"    last = .*", f"    raise SystemExit({code})", file.read_text()))
    asked = ("cases/h2d-blocking-output-ids", "--relay", "my_relay.py:pinned", *SMALL)
    said = run_command("run", *asked)
    assert said.code == 4 and said.err.startswith("Traceback")
    assert "crashed at my_relay.py" in said.err.splitlines()[-1]
    said = run_command("check", *asked, "--quick")
    assert said.code == 1 and f"run: ExitedError: sys.exit({code}) (at my_relay.py" in " ".join(
        said.out.split()
    )

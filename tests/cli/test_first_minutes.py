"""init, explain KEY and schema: the way to a first scenario."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from schedbench.cli.init import scenario_text
from schedbench.profiles.judge.worker import SideError, here
from schedbench.scenarios.describe import SCHEMA_FILE, json_schema, keys
from schedbench.scenarios.loader import load
from schedbench.scenarios.overrides import keys as paths
from schedbench.sched.relay.names import SWITCH_VALUES
from tests.conftest import RunCommand

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "scenarios").rglob("*.yaml"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_key_has_a_description() -> None:
    facts = {fact.path: fact for fact in keys()}
    switches = {("engine", "relay", switch) for switch in SWITCH_VALUES}
    assert {path for path in facts if "KIND" not in path} == {*paths(), *switches}
    assert all(fact.about.endswith(".") and fact.values for fact in facts.values())


@pytest.mark.wide
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_editors_accept_a_shipped_scenario_and_find_the_schema(path: Path) -> None:
    text = path.read_text()
    jsonschema.validate(yaml.safe_load(text), json_schema())
    named = text.splitlines()[-1].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == ROOT / "scenarios" / SCHEMA_FILE


@pytest.mark.parametrize("wrong", [{"engine": {"overlp": True}}, {"engine": {"policy": "lifo"}}, {"name": 1}])
def test_editors_refuse_what_the_loader_refuses(wrong: dict[str, object]) -> None:
    good = yaml.safe_load((ROOT / "scenarios/mixed.yaml").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good, **wrong}, json_schema())


@pytest.mark.parametrize(
    ("verb", "form", "file"),
    [
        ("schema", "json", f"scenarios/{SCHEMA_FILE}"),
        ("schema", "md", "docs/scenarios.md"),
        ("explain", "md", "profiles/record/metrics.md"),
    ],
)
def test_the_reference_page_equals_the_commands_output(
    run_command: RunCommand, verb: str, form: str, file: str
) -> None:
    assert run_command(verb, "--format", form).out == (ROOT / file).read_text()


def test_a_key_is_explained_also_by_its_short_name(run_command: RunCommand) -> None:
    for name in ("engine.chunked_prefill_size", "chunked_prefill_size"):
        assert run_command("explain", name).out == (
            "engine.chunked_prefill_size\n"
            "\n"
            "Tokens of a prompt that one step prefills at most; none: whole prompts.\n"
            "\n"
            "values   an integer, at least 1 or none or null\n"
            "default  8192\n"
        )


@pytest.mark.parametrize(
    ("name", "values", "default"),
    [
        ("engine.hisparse", "a section", "{}"),
        ("about", "a text", '""'),
        ("workload", "a section", "none, it has to be given"),
        ("workload.prompt_tokens.max", "an integer, at least 1 or null", "null; has to be given in uniform"),
    ],
)
def test_a_key_is_explained_with_each_value_once_and_its_default(
    run_command: RunCommand, name: str, values: str, default: str
) -> None:
    assert run_command("explain", name).out.endswith(f"\nvalues   {values}\ndefault  {default}\n")


def test_init_writes_a_scenario_with_the_given_values(run_command: RunCommand, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert run_command("init", file, "--set", "requests=3", "--set", "temperature=0.5").code == 0
    scenario = load(str(file))
    assert (scenario.name, scenario.workload.requests) == ("mine", 3)
    assert scenario.workload.sampling.temperature == 0.5
    assert json.loads((tmp_path / SCHEMA_FILE).read_text()) == json_schema()
    assert "# Tokens of a prompt that one step prefills at most" in file.read_text()
    assert "# When requests arrive; the other keys of the section depend on it. (burst or" in file.read_text()
    again = run_command("init", file)
    assert again.code == 2 and "exists; --force replaces it" in again.err
    wrong = run_command("init", tmp_path / "other.yaml", "--set", "requests=many")
    assert wrong.code == 2 and "workload.requests: expected an integer" in wrong.err
    assert not (tmp_path / "other.yaml").exists()
    nowhere = run_command("init", tmp_path / "nowhere" / "x.yaml")
    assert nowhere.code == 2 and f"{tmp_path / 'nowhere'}: no such folder" in nowhere.err


@pytest.mark.parametrize(
    "values",
    [
        ("trace=t.jsonl", "format=jsonl", "requests=2"),
        ("arrival.process=burst", "barrier=off", "name=other"),
        (
            "arrival=burst",
            "expect.decode.steady.copy={d2h: 2}",
            "output_tokens={dist: uniform, min: 1, max: 2}",
        ),
    ],
)
def test_init_writes_a_scenario_that_runs(run_command: RunCommand, tmp_path: Path, values: list[str]) -> None:
    file, options = tmp_path / "mine.yaml", [option for value in values for option in ("--set", value)]
    assert run_command("init", file, *options).code == 0
    assert load(str(file)).expanded() == load(str(file), values).expanded()


def test_init_asks_a_terminal(
    run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["tiny-llama", *[""] * 20]
    monkeypatch.setattr(sys, "stdin", Terminal("\n".join(answers)))
    said = run_command("init", tmp_path / "mine.yaml")
    assert said.code == 0, said.err
    assert load(str(tmp_path / "mine.yaml")).model.preset == "tiny-llama"
    assert "A shape with seeded weights" in said.err


def test_a_name_that_yaml_would_convert_is_quoted() -> None:
    assert yaml.safe_load(scenario_text({"name": "on"}, {}))["name"] == "on"


def test_commits_are_looked_up_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "sched/loop"
    for folder in (tmp_path / ".git", tmp_path / ".typing/schedbench", inside):
        folder.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert here() == tmp_path
    monkeypatch.chdir("/")
    assert here() == ROOT
    other = tmp_path / "sched/engine"
    (other / ".git").mkdir(parents=True)
    monkeypatch.chdir(other)
    with pytest.raises(SideError, match=r"engine is not a checkout of schedbench; .* --a sglang:FOLDER@REF"):
        here()


@pytest.mark.wide
def test_quick_leaves_out_what_takes_longest(run_command: RunCommand) -> None:
    tiny = ("--set", "requests=4", "--set", "output_tokens=4", "--set", "values=none", "--quick")
    checked, worth = (
        json.loads(run_command(verb, "mixed", *tiny, "--format", "json").out) for verb in ("check", "worth")
    )
    [adversary] = [row for row in checked["reports"][0]["checks"] if row["name"] == "adversary"]
    assert "strategies" in adversary["about"] and "random" not in adversary["about"]
    assert {str(row["room_us"]) for row in worth["worth"]["rows"]} == {"None"}
    sides = ("mixed", "--a", "relay=pr25945", "--b", "relay=latest", "--seeds", "1")
    for command in (("compare", *sides), ("sweep", "start", "--over", "concurrency=1,4")):
        said = " ".join(run_command(*command, *tiny).out.split())
        assert "constants, because --quick or --draws 0 leaves it out; --draws 16" in said, command

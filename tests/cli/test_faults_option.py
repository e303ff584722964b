"""``run --fault`` and ``list faults``: faults are named in the result, and impossible ones are refused."""

from __future__ import annotations

import json
from functools import partial

import pytest
from typer.testing import CliRunner, Result

from schedbench.cli.app import app
from schedbench.sched.relay.faults import awaited_faults, faults
from tests.conftest import RunCommand

SMALL = (
    *("run", "mixed", "--device", "vgpu", "--set", "requests=4", "--set", "arrival=burst"),
    *("--set", "output_tokens.max=8", "--set", "warmup_requests=0"),
)


@pytest.fixture
def run(run_command: RunCommand) -> RunCommand:
    return partial(run_command, *SMALL)


def listed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["list", "faults", *arguments])


def test_the_document_names_the_faults(run: RunCommand) -> None:
    code, out, _ = run("--fault", "no-barrier", "--fault", "staging-refilled", "--format", "json")
    relay = json.loads(out)["relay"]
    assert code == 0 and relay["faults"] == ["no-barrier", "staging-refilled"]
    assert (relay["policies"]["barrier"], relay["policies"]["staging"]) == ("no_barrier", "refilled")


def test_a_hazard_of_a_fault_is_not_declared(run: RunCommand) -> None:
    code, out, _ = run("--fault", "staging-refilled", "--hazards", "on", "--format", "json")
    findings = json.loads(out)["hazards"]["findings"]
    assert code == 1 and [finding["resource"] for finding in findings] == ["pinned memory"]


def test_an_error_caused_by_a_fault_names_the_fault(run: RunCommand) -> None:
    code, out, err = run("--fault", "never-resolve")
    assert code == 4 and not out
    assert err.startswith(
        "schedbench: with fault never-resolve the run broke down: ValueError: step 0 has no"
    )
    assert "(at sched/loop/launch.py:" in err and "Traceback" not in err


def test_every_fault_is_listed_with_its_place() -> None:
    entries = json.loads(listed("--format", "json").output)
    assert [entry["name"] for entry in entries] == [*faults(), *awaited_faults()]
    for entry in entries:
        assert entry["about"] and entry["reference"]
        assert bool(entry["states"] and entry["loops"]) != bool(entry["waits_for"])


def test_the_list_reads_as_paragraphs() -> None:
    paragraphs = {text.split()[0]: text.splitlines() for text in listed().output.strip().split("\n\n")}
    assert paragraphs["no-barrier"] == [
        "no-barrier  5.13, #18746, #18744, before #26380",
        "  Nothing makes the schedule wait before it reuses a slot or rewrites a row that a forward still reads.",
        "  in pr25945, latest, pr25945-before; overlapped loop",
    ]
    assert paragraphs["never-resolve"][2] == "  in pr25945, latest; overlapped and serial loops"
    assert paragraphs["draft-extends-lengths"][2].endswith("serial loop; needs engine.speculative.mode=v2")
    assert paragraphs["rejoin-without-mirror"][2].endswith("; needs engine.hisparse.enabled=true")
    assert paragraphs["stage-without-stash"][2] == "  in pr25945; pipelined loop"

"""``import schedbench``: the results of the commands as objects, with the same figures and messages."""

from __future__ import annotations

import json
import pydoc
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import schedbench as sb
from schedbench.cli import answers, api
from schedbench.cli.errors import UsageError
from schedbench.profiles.record.result import ResultError
from schedbench.scenarios.problems import ScenarioError
from tests.conftest import RunCommand

SMALL = {"requests": 4, "output_tokens": 4, "values": "none"}
TINY = {"requests": 1, "output_tokens": 2, "values": "none"}


@pytest.fixture(scope="module")
def overlapped() -> sb.RunAnswer:
    return sb.run("mixed", save_tokens=True, **SMALL)


@pytest.fixture(scope="module")
def serial() -> sb.RunAnswer:
    return sb.run("mixed", overlap=False, save_tokens=True, **SMALL)


def test_it_has_the_names_that_it_lists_and_no_others() -> None:
    """Every function of ``cli.api``, and every answer."""
    functions = {
        name
        for name, value in vars(api).items()
        if hasattr(value, "__wrapped__") or getattr(value, "__module__", "") == api.__name__
    }
    kinds = {name for name in vars(answers) if name.endswith("Answer")} - {"DocumentAnswer"}
    assert {*sb.__all__} == functions | kinds and {"run", "compare", "check", "worth", "load"} <= functions
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        sb.rum  # noqa: B018


def test_a_run_equals_that_of_the_command(overlapped: sb.RunAnswer, run_command: RunCommand) -> None:
    overrides = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    said = json.loads(run_command("run", "mixed", *overrides, "--save-tokens", "--format", "json").out)
    assert {key: said[key] for key in said if key not in ("run", "environment")} == {
        key: overlapped.document[key] for key in said if key not in ("run", "environment")
    }
    assert overlapped.passed and str(overlapped) == said["conclusion"]
    assert overlapped.document["run"]["command"].startswith("schedbench.run('mixed', save_tokens=True, requ")


def test_options_of_the_command_are_arguments(tmp_path: Path) -> None:
    keys = {"output_tokens": 2, "values": "none"}
    found = sb.run(
        "mixed", overrides=["requests=1"], relay="latest", adversarial=1, output_dir=tmp_path, **keys
    )
    assert found.document["relay"]["state"] == "latest" and len(found.result.requests) == 1
    assert sb.load(tmp_path).document == found.document


def test_help_has_the_types_of_arguments_and_the_options_descriptions() -> None:
    shown = pydoc.plain(pydoc.render_doc(sb.compare))
    assert "seeds: int = 5" in shown and "-> schedbench.cli.answers.ComparisonAnswer" in shown
    assert "        quick: Without the draws: draws 0.\n" in shown
    assert "Exit codes" not in shown and "--" not in shown


def test_budgets_are_checked_as_by_expect(overlapped: sb.RunAnswer, serial: sb.RunAnswer) -> None:
    overlapped.assert_budget("decode.steady", schedule={"sync": 0, "h2d": 0})
    with pytest.raises(AssertionError, match=r"decode.steady schedule sync: 1 in the worst step, 0 allowed"):
        serial.assert_budget("decode.steady", schedule={"sync": 0})
    with pytest.raises(AssertionError, match="no step was of kind verify"):
        serial.assert_budget("verify", schedule={"sync": 0})


@pytest.mark.parametrize(
    ("kind", "stream", "counter", "message"),
    [
        ("decode.stedy", "schedule", "sync", "did you mean 'decode.steady'"),
        ("decode", "schedul", "sync", "did you mean 'schedule'"),
        ("decode", "schedule", "synk", "did you mean 'sync'"),
    ],
)
def test_a_misspelt_budget_is_refused(
    overlapped: sb.RunAnswer, kind: str, stream: str, counter: str, message: str
) -> None:
    with pytest.raises(ScenarioError, match=message):
        overlapped.assert_budget(kind, **{stream: {counter: 0}})


@pytest.mark.parametrize("streams", [{}, {"schedule": {}}, {"schedule": {"sync": 0}, "forward": {}}])
def test_a_budget_that_bounds_nothing_is_refused(
    overlapped: sb.RunAnswer, streams: dict[str, dict[str, int]]
) -> None:
    with pytest.raises(ValueError, match="expected a bound for each stream, at least one"):
        overlapped.assert_budget("decode", **streams)


def test_tokens_are_compared_with_those_of_another_run(
    overlapped: sb.RunAnswer, serial: sb.RunAnswer
) -> None:
    overlapped.assert_same_tokens(serial)
    other = sb.run("mixed", save_tokens=True, **{**SMALL, "measure.seed": 1})
    with pytest.raises(AssertionError, match=r"tokens differ, first with seed 0 in request .* at position 0"):
        overlapped.assert_same_tokens(other)
    fewer = sb.run("mixed", save_tokens=True, **{**SMALL, "workload.requests": 1})
    with pytest.raises(AssertionError, match=r"cannot be compared: workload\.requests: \d+ against 1"):
        overlapped.assert_same_tokens(fewer)


def test_two_results_are_compared_as_stored_ones(
    overlapped: sb.RunAnswer, serial: sb.RunAnswer, tmp_path: Path, run_command: RunCommand
) -> None:
    found = sb.compare(overlapped, serial)
    for name, answer in (("a.json", overlapped), ("b.json", serial), ("compare.json", found)):
        answer.save(tmp_path / name)
    said = json.loads(
        run_command("compare", tmp_path / "a.json", tmp_path / "b.json", "--format", "json").out
    )
    for field in ("verdict", "reasons", "metrics", "counts", "lines", "idle", "engagement", "tokens"):
        assert said["comparison"][field] == found.document["comparison"][field]
    stored = sb.load(tmp_path / "compare.json")
    assert isinstance(stored, sb.ComparisonAnswer) and stored.document == found.document
    assert found.passed and found.verdict == "inconclusive"
    assert sb.load(tmp_path / "a.json").document == overlapped.document
    comparison = {key: part for key, part in found.document["comparison"].items() if key != "passed"}
    (tmp_path / "later.json").write_text(json.dumps({**found.document, "schema_version": "9.9"}))
    with pytest.raises(ValueError, match=r"its schema_version, 9\.9, is not understood"):
        sb.load(tmp_path / "later.json")
    earlier = {**found.document, "schema_version": "1.2", "comparison": comparison}
    (tmp_path / "compare.json").write_text(json.dumps(earlier))
    with pytest.raises(ValueError, match=r"its schema_version, 1\.2, is not understood"):
        sb.load(tmp_path / "compare.json")


def test_sides_of_a_scenario_and_gates() -> None:
    found = sb.compare(
        "mixed",
        a={"relay": "pr25945"},
        b="relay=latest",
        seeds=1,
        draws=0,
        gates=["decode.steady.schedule.kernel:0"],
        **SMALL,
    )
    assert found.conclusion.startswith("relay=latest against relay=pr25945 on mixed (emulated h200, 1 seed)")
    assert not found.passed


@pytest.mark.wide
def test_a_check_has_its_whole_document(tmp_path: Path) -> None:
    found = sb.check("mixed", seeds=0, **TINY)
    found.save(tmp_path / "check.json")
    stored = sb.load(tmp_path / "check.json")
    assert found.passed and stored.document == found.document
    assert list(found.frame("pandas").query("verdict == 'passed'")["check"])[:2] == ["run", "invariants"]


@pytest.mark.wide
def test_worth_has_a_row_for_each_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedbench.profiles.worth.worth.spread", lambda *_: nullcontext(map))
    monkeypatch.setattr("schedbench.profiles.worth.worth.source_lines", lambda *_: [])
    part = sb.worth("mixed", rooms=0, **TINY).result.worth
    assert part is not None and {row.change for row in part.rows} == {"half"}


@pytest.mark.wide
def test_worker_processes_do_not_run_a_script_without_a_guard_again(tmp_path: Path) -> None:
    sides = {"a": "relay=pr25945", "b": "relay=latest"}
    (tmp_path / "script.py").write_text(
        f"import schedbench as sb\nprint(sb.compare('mixed', seeds=1, draws=1, **{sides | TINY!r}).passed)\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["True"], done.stderr


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: sb.run("mixd"), "mixd: no such file, unknown scenario, did you mean 'mixed'"),
        (
            lambda: sb.run("mixed", overlp=True),
            "keyword argument: overlp: unknown key, did you mean 'overlap'",
        ),
        (
            lambda: sb.compare("mixed", b="relay=latest", quick=True, overlp=True),
            "keyword argument: overlp: unknown key, did you mean 'overlap'",
        ),
        (
            lambda: sb.run("mixed", engine_pythn="x"),
            "engine_pythn: unknown key, did you mean 'engine_python'",
        ),
        (lambda: sb.run("mixed", overlap=3), "engine.overlap: expected true, false or auto, got 3"),
        (lambda: sb.run("ladder"), "engine.relays: an answer has one relay"),
        (
            lambda: sb.compare("mixed", "a", "b"),
            "compare takes a scenario with a and b, or two stored results",
        ),
        (lambda: sb.run("mixed", device="cpu"), "device: expected auto, cuda or vgpu, got 'cpu'"),
        (lambda: sb.compare(1, 2), "a: expected keys, a path, or answers of run, got 1"),
        (lambda: sb.compare("a.json", "b.json", gates="added:0"), "gates: expected a list, got 'added:0'"),
        (lambda: sb.compare("mixed"), "compare needs a and b, or one of them against the scenario"),
        (lambda: sb.compare("mixed", b="relay=no"), "b: engine.relay: unknown relay state"),
        (lambda: sb.run("mixed", expect=["syncs=1"]), "expect: expect.syncs: unknown key"),
        (lambda: sb.run("mixed", engine_python="python"), "engine_python: no engine is named"),
        (
            lambda: sb.run("mixed", engine="sglang:.", engine_timeout=0),
            "engine_timeout: expected 1 or more, got 0",
        ),
        (lambda: sb.check("mixed", against="sglang:."), "against is about sources of an engine: name one"),
        (lambda: sb.worth("mixed", rooms=-1), "rooms: expected 0 or more, got -1"),
        (lambda: sb.load("there/is/none.json"), "none.json: No such file"),
    ],
)
def test_errors_have_the_messages_of_the_command(ask, message) -> None:
    with pytest.raises((ScenarioError, UsageError, ResultError, OSError)) as refused:
        ask()
    assert message in str(refused.value) or message in f"{refused.value.filename}: {refused.value.strerror}"


def test_frames_have_the_rows_of_csv(overlapped: sb.RunAnswer, serial: sb.RunAnswer) -> None:
    frame = overlapped.frame("pandas").set_index("metric")
    assert (
        frame.loc["output_throughput", "value"]
        == overlapped.document["metrics"]["output_throughput"]["values"][0]
    )
    found = sb.compare(overlapped, serial)
    compared = found.frame("pandas").set_index("metric")
    assert compared.loc["output_throughput", "delta_pct"] == pytest.approx(
        found.document["comparison"]["metrics"]["output_throughput"]["delta_pct"]
    )


def test_a_frame_needs_a_library(overlapped: sb.RunAnswer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedbench.cli.answers.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pandas or polars has to be installed"):
        overlapped.frame()


def test_notebooks_show_the_page_of_the_command(overlapped: sb.RunAnswer) -> None:
    shown = overlapped._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "&lt;!DOCTYPE html&gt;" in shown
    assert "copies" in shown and repr(overlapped) == f"<RunAnswer: {overlapped.conclusion}>"

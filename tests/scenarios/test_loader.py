"""Loading: shipped names, paths, overrides, and the messages of refused scenarios."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from schedbench.scenarios.loader import load, loads
from tests.scenarios.refusals import refused

SOUND = """\
name: sound
model: {preset: tiny-llama}
engine:
  page_size: 1
workload:
  requests: 4
  prompt_tokens: {dist: fixed, value: 8}
  output_tokens: {dist: fixed, value: 8}
"""


def problems(text: str, *overrides: str) -> list[str]:
    return refused(loads, text.encode(), file="f", overrides=overrides)


def test_all_problems_are_reported_at_once_in_order_of_line() -> None:
    text = """\
name: broken
modle: {preset: tiny-llama}
model: {preset: tiny-llama, dtype: fp32}
engine:
  overlap: maybe
  overlp: true
  page_size: "64"
  page_size: 2
  mixed_chunk: yes
  chunked_prefill_size: none
  speculative: {algorithm: eagel, acceptance: {mean: 0.5}}
workload:
  requests: 0
  arrival: {process: poisson, rat: 200, concurrency: 3}
  prompt_tokens: {dist: unifrm, min: 16, max: 700}
  output_tokens: {min: 4, max: 64}
  sampling: {grammar: {choise: [a]}, stop_token_ids: [1, x, 2.5]}
  encoder_tokens: many
expect:
  decode.stedy: {schedule: {h2d: 0}}
  decode: {schedule: {h2d: -1}}
"""
    assert problems(text) == [
        "f:2: modle: unknown key, did you mean 'model'?",
        "f:3: model.dtype: expected float32, float64, bfloat16, float16 or auto, got 'fp32'",
        "f:5: engine.overlap: expected true, false or auto, got 'maybe'",
        "f:6: engine.overlp: unknown key, did you mean 'overlap'?",
        "f:8: engine.page_size: duplicate key, first given at line 7",
        "f:9: engine.mixed_chunk: mixed chunk cannot be combined with unchunked prefill: "
        "there is no chunk to mix decodes into",
        "f:11: engine.speculative.algorithm: expected none or eagle, got 'eagel', did you mean 'eagle'?",
        "f:11: engine.speculative.acceptance.mean: expected at least 1, got 0.5",
        "f:13: workload.requests: expected at least 1, got 0",
        "f:14: workload.arrival.rate: required, but not given",
        "f:14: workload.arrival.rat: unknown key where process is poisson, did you mean 'rate'?",
        "f:14: workload.arrival.concurrency: unknown key where process is poisson, known: process, rate",
        "f:15: workload.prompt_tokens.dist: expected fixed, uniform, normal or lognormal, got 'unifrm', "
        "did you mean 'uniform'?",
        "f:16: workload.output_tokens.dist: required, but not given",
        "f:17: workload.sampling.stop_token_ids.1: expected an integer, got 'x'",
        "f:17: workload.sampling.stop_token_ids.2: expected an integer, got 2.5",
        "f:17: workload.sampling.grammar.choise: unknown key, did you mean 'choice'?",
        "f:18: workload.encoder_tokens: expected an integer or a mapping, got 'many'",
        "f:20: expect.decode.stedy: unknown key, did you mean 'decode.steady'?",
        "f:21: expect.decode.schedule.h2d: expected at least 0, got -1",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("measure: 3", "f:9: measure: expected a mapping, got 3"),
        ("faults: a", "f:9: faults: expected a list, got 'a'"),
        ("about: 3", "f:9: about: expected a text, got 3"),
        ("measure: {seed: 1.5}", "f:9: measure.seed: expected an integer, got 1.5"),
        ("measure: {seed: true}", "f:9: measure.seed: expected an integer, got true"),
        ("measure: {repeat: 0}", "f:9: measure.repeat: expected at least 1, got 0"),
        ("device: {host: guessed}", "f:9: device.host: expected modelled or measured, got 'guessed'"),
        ("device: {values: non}", "f:9: device.values: expected real or none, got 'non', did you mean 'none'?"),
        ("expect: {decode: {schedule: {h2: 0}}}", "f:9: expect.decode.schedule.h2: unknown key, did you mean 'h2d'?"),
        (
            "expect: {decode: {main: {h2d: 0}}}",
            "f:9: expect.decode.main: unknown key, known: schedule, forward, copy, lengths, staging, backup, transfer, "
                "link, when",
        ),
        ('"?\\n": 1', "f:9: '?\\n': unknown key, known: name, about, model, device, engine, workload, measure, "
         "faults, expect, case"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_was_expected(line: str, problem: str) -> None:
    assert problems(SOUND + line) == [problem]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("engine.schedule_conservativeness=1e999", "expected a finite number, got inf"),
        ("engine.schedule_conservativeness=high", "expected a number, got 'high'"),
        ("engine.page_size=99999999999999", "expected at most 1099511627776, got 99999999999999"),
        ("engine.schedule_conservativeness=1" + "0" * 400, "expected a number, got 1" + "0" * 39 + "..."),
        ("workload.sampling.top_p=0", "expected more than 0, got 0"),
        ("measure.warmup_requests=1000000000000", "expected at most 10000000, got 1000000000000"),
        ("workload.prompt_tokens={dist: normal, mean: 1.0e-300, std: 1}", "expected at least 1e-06, got 1e-300"),
        ("workload.prompt_tokens={dist: uniform, min: 9, max: 3}", "expected at most max, 3, got 9"),
        ("workload.sampling.grammar={}", "expected regex or choice, and not both"),
        ("workload.abort={fraction: 0.5, requests: [r1]}", "expected fraction or requests, and not both"),
        ("workload.arrival=trace", "means something only with a trace"),
        ("workload.format=azure", "means something only with a trace"),
        ("workload.requests=null", "required without a trace"),
        ("workload.arrival=sometimes", "expected burst, constant, poisson, gamma, trace or closed, got 'sometimes'"),
        ("engine.page_size.x=1", "holds a value, not a section: set it as a whole"),
        ("engine.page_size=[", "not YAML: while parsing a flow node expected the node content, "
         "but found '<stream end>'"),
    ],
)  # fmt: skip
def test_overrides_are_refused_in_the_same_words(override: str, problem: str) -> None:
    assert [message.split(": ", 2)[2] for message in problems(SOUND, override)] == [problem]


def test_problems_of_overrides_name_set() -> None:
    assert problems(SOUND, "engine.page_sise=2", "nonsense") == [
        "--set: expected KEY=VALUE, got 'nonsense'",
        "--set: engine.page_sise: unknown key, did you mean 'page_size'?",
    ]


ROOT = "f:1: expected a mapping of name, model, workload and so on, got"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [f"{ROOT} nothing"]),
        ("# nothing\n", [f"{ROOT} nothing"]),
        ("null", [f"{ROOT} nothing"]),
        ("- a\n- b", [f"{ROOT} a list"]),
        ('{"schema_version": "1.0", "name": "a"}', [f"{ROOT} a stored result"]),
        ("name: a", [f"f:1: {section}: required, but not given" for section in ("model", "workload")]),
        (
            SOUND.replace("preset: tiny-llama", "preset: tiny-llama, path: there"),
            ["f:2: model: expected preset or path, and not both"],
        ),
        (
            SOUND + "  trace: somewhere\n",
            [
                "f:5: workload.format: required with a trace",
                "f:7: workload.prompt_tokens: cannot be combined with a trace, which has its own",
                "f:8: workload.output_tokens: cannot be combined with a trace, which has its own",
            ],
        ),
        # The consequences of an unknown key are not reported.
        (
            SOUND.replace("engine:", "engine:\n  disaggregation: {mod: pair, prefill: 2}"),
            ["f:4: engine.disaggregation.mod: unknown key, did you mean 'mode'?"],
        ),
    ],
)
def test_a_document_is_refused_with_what_it_lacks_or_has_too_much(text: str, expected: list[str]) -> None:
    assert problems(text) == expected


def test_overriding_one_alternative_replaces_the_other() -> None:
    scenario = loads(SOUND.encode(), overrides=["model.path=there", "engine.relays=[pr25774, latest]"])

    assert scenario.model.preset is None
    assert [relay.state for relay in scenario.relays.values()] == ["pr25774", "latest"]


def test_overriding_a_kind_drops_the_keys_of_the_old_kind() -> None:
    overrides = [
        "workload.arrival={process: gamma, rate: 5, burstiness: 2}",
        "workload.arrival.process=poisson",
    ]
    scenario = loads(SOUND.encode(), overrides=overrides)

    assert scenario.workload.arrival is not None
    assert scenario.workload.arrival.model_dump() == {"process": "poisson", "rate": 5.0}


def test_a_bare_relay_becomes_a_section_when_a_switch_is_set() -> None:
    scenario = load("mixed", ["engine.relay.barrier=off", "engine.relay.flatten=numpy"])

    assert scenario.engine.relay.state == "pr25945"
    assert scenario.engine.relay.switches == {"barrier": False, "flatten": "numpy"}


def test_a_bare_word_replaces_the_speculative_section() -> None:
    off = load("spec_v1", ["engine.speculative=none"]).engine.speculative
    assert (off.algorithm, off.mode, off.topk, off.draft_tokens) == ("none", "v2", 1, None)

    on = load("overlap_on", ["device.values=real", "engine.speculative=eagle", "engine.speculative.steps=2"])
    assert (on.engine.speculative.algorithm, on.engine.speculative.steps) == ("eagle", 2)


def test_incomplete_removal_of_speculation_is_refused_with_the_remedy() -> None:
    found = "\n".join(refused(load, "spec_v1", ["engine.speculative.algorithm=none"]))
    assert re.search(r"mode: means something only with .*; engine.speculative=none drops", found)


MANY = "engine.pipeline.async_depth=2"
DIES = "faults=[{rank: stage 1, dies: forward}]"


@pytest.mark.parametrize(
    ("name", "broken", "message", "follows"),
    [
        ("disagg", "engine.disaggregation.mode=pear", "expected none or pair", ()),
        ("spec_v1", "engine.speculative.algorithm=egle", "expected none or eagle", ()),
        ("spec_v1", "engine.speculative.mode=v3", "expected v1 or v2", ()),
        ("dp_idle", "engine.data_parallel.ranks=two", "expected an integer", ()),
        ("pp2", "engine.pipeline.stages=two", "expected an integer", (MANY, DIES)),
        ("mixed", "workload.trace=5", "expected a text", ("workload.format=jsonl",)),
    ],
)
def test_consequences_of_a_broken_key_are_not_reported(
    name: str, broken: str, message: str, follows: tuple[str, ...]
) -> None:
    key, _, value = broken.partition("=")
    [problem] = refused(load, name, [*follows, broken])
    assert problem.startswith(f"--set: {key}: {message}, got ") and value in problem


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("spec_v2", "engine.speculative.mode=v1"),
        ("mixed", "engine.speculative=eagle"),
        ("mixed", "engine.chunked_prefill_size=none"),
    ],
)
def test_a_refusal_names_the_key_that_was_typed(name: str, override: str) -> None:
    assert all(problem.startswith("--set: ") for problem in refused(load, name, [override]))


def test_budgets_of_steady_steps_can_be_overridden() -> None:
    scenario = load("mixed", ["expect.decode.steady.copy.d2h=2"])

    budget = scenario.expanded()["expect"]["decode.steady"]
    assert budget["copy"] == {"d2h": 2}
    assert budget["schedule"]["h2d"] == 0


@pytest.mark.parametrize("count", [0, 257])
@pytest.mark.parametrize(
    "key",
    [
        *("disaggregation.prefill", "disaggregation.decode", "replicas"),
        *("data_parallel.ranks", "pipeline.stages"),
    ],
)
def test_the_number_of_ranks_is_bounded(key: str, count: int) -> None:
    assert any(f"engine.{key}" in problem for problem in refused(load, "disagg", [f"engine.{key}={count}"]))


@pytest.mark.parametrize(
    ("word", "value"), [("on", True), ("off", False), ("Yes", True), ("no", False), ("true", True)]
)
def test_booleans_may_be_words(word: str, value: bool) -> None:
    assert loads(SOUND.encode(), overrides=[f"engine.cuda_graph={word}"]).engine.cuda_graph is value


def test_short_forms_of_lengths_and_arrivals() -> None:
    scenario = loads(SOUND.encode(), overrides=["workload.prompt_tokens=32", "workload.arrival=burst"])

    assert scenario.expanded()["workload"]["prompt_tokens"] == {"dist": "fixed", "value": 32}
    assert scenario.expanded()["workload"]["arrival"] == {"process": "burst"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixd", "no such file, unknown scenario, did you mean 'mixed'?"),
        ("cases/sync-count-nul", "no such file, did you mean 'cases/sync-count-null'?"),
        ("faults/mixin", "no such file, did you mean 'faults/mixing'?"),
        ("absent/mixd.yaml", "no such file, did you mean 'mixed'?"),
        (".", "cannot be read: Is a directory"),
    ],
)
def test_an_unknown_name_or_a_path_that_cannot_be_read_is_refused(name: str, message: str) -> None:
    assert refused(load, name) == [f"{name}: {message}"]


def test_a_path_with_a_null_byte_is_refused() -> None:
    [problem] = refused(load, "a\0b")
    assert problem.startswith("'a\\x00b': cannot be read: ") and "embedded null" in problem


def test_a_file_with_the_other_suffix_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    [problem] = refused(load, str(tmp_path / "mine.yml"))
    assert problem.endswith(f"no such file, did you mean '{tmp_path}/mine.yaml'?")


def test_a_path_in_the_file_starts_at_the_file(tmp_path: Path) -> None:
    file = tmp_path / "replay.yaml"
    file.write_text("name: r\nmodel: {preset: tiny-llama}\nworkload: {trace: t.jsonl, format: jsonl}\n")
    key = ("workload", "trace")

    assert load(str(file)).source.locate(key, "t.jsonl") == tmp_path / "t.jsonl"
    for override in ("workload.trace=u.jsonl", "workload={trace: u.jsonl, format: jsonl}"):
        assert load(str(file), [override]).source.locate(key, "u.jsonl") == Path("u.jsonl")


@pytest.mark.parametrize(
    ("key", "overrides", "in_file"),
    [
        ("relay", (), True),
        ("relay", ("engine.relay.penalties=exact",), True),
        ("relay", ("engine.relay=own.py:MINE",), False),
        ("relay.state", ("engine.relay.state=own.py:MINE",), False),
        ("relays.0", ("engine.relays=[own.py:MINE]",), False),
    ],
)
def test_a_relay_state_in_an_override_starts_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, overrides: tuple[str, ...], in_file: bool
) -> None:
    folder = tmp_path / "scenarios"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    (folder / "own.yaml").write_text(SOUND.replace("engine:", "engine:\n  relay: own.py:MINE"))
    states = (folder if in_file else tmp_path) / "own.py"
    states.touch()

    load("scenarios/own.yaml", overrides)  # the file is found

    states.unlink()
    found = "\n".join(refused(load, "scenarios/own.yaml", overrides))
    assert re.search(rf"engine\.{key}: .*own\.py: no such file", found)


def test_a_problem_found_later_names_its_line() -> None:
    scenario = loads(SOUND.encode(), file="f")
    refusal = scenario.source.refuse(("engine", "relay"), "unknown state")

    assert str(refusal) == "f:3: engine.relay: unknown state"


def test_an_expanded_scenario_is_a_scenario_with_the_same_digest() -> None:
    scenario = load("mixed", ["engine.relay.barrier=off", "workload.sampling.grammar={choice: [a, b]}"])
    again = loads(json.dumps(scenario.expanded()).encode())

    assert again.expanded() == scenario.expanded()
    assert again.sha256 == scenario.sha256


def test_the_digest_follows_meaning_not_spelling() -> None:
    reordered = "workload: {output_tokens: 8, prompt_tokens: 8, requests: 4}\nmodel: {preset: tiny-llama}\nname: sound"

    assert loads(reordered.encode()).sha256 == loads(SOUND.encode()).sha256
    assert loads(SOUND.encode(), overrides=["measure.seed=1"]).sha256 != loads(SOUND.encode()).sha256


def test_a_pipe_is_read_once_for_all_commands_of_a_process() -> None:
    reading, writing = os.pipe()
    os.write(writing, SOUND.encode())
    os.close(writing)
    with open(reading):
        assert [load(f"/dev/fd/{reading}").name for _ in range(2)] == ["sound", "sound"]

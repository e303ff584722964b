"""The result document: canonical, versioned, and written completely or not at all."""

from __future__ import annotations

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from schedbench.cli.result_tables import latency, summary
from schedbench.profiles.record.definitions import DEFINITIONS, Direction, ReportTable, definition, shown_in
from schedbench.profiles.record.result import IdlePart, Result, ResultError, canonical, digest, read
from tests.acceptance.runs import result_of

SAMPLE = Path(__file__).parent / "sample_result.json"


@pytest.fixture
def text() -> str:
    return SAMPLE.read_text()


@pytest.fixture
def result(text) -> Result:
    return Result.from_json(text)


def test_a_document_is_read_and_written_byte_for_byte(text, result):
    assert result.to_json() == text


def test_a_written_document_is_read_back(tmp_path, result):
    path = tmp_path / "result.json"
    result.write(path)
    assert read(path) == result
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_no_file(tmp_path, result):
    taken = tmp_path / "result.json"
    taken.mkdir()
    with pytest.raises(IsADirectoryError):
        result.write(taken)
    assert list(tmp_path.iterdir()) == [taken]


def test_a_document_is_frozen(result):
    with pytest.raises(ValidationError, match="frozen"):
        result.tool = None


def test_order_of_maps_does_not_matter(result):
    turned = result.model_copy(update={"metrics": dict(reversed(result.metrics.items()))})
    assert turned.to_json() == result.to_json()


def test_every_row_is_one_line(text):
    assert text.count("\n") < 60
    assert '\n {"blocking": true' in text


def test_missing_values_have_a_reason(text):
    document = json.loads(text)
    refused = {"value": None, "abstained": "p99 needs 100 samples, there are 64"}
    assert document["metrics"]["ttft_ms"]["p99"] == refused
    assert document["hazards"] == {"value": None, "abstained": "hazards were not watched"}
    assert "p50" not in document["metrics"]["retractions"]
    assert "token_ids" not in document["requests"][1]


def test_streams_of_a_kind(result):
    assert sorted(result.per_step["decode"].streams) == ["copy", "forward", "schedule"]
    assert result.per_step["mixed"].streams["schedule"]["h2d"].max == 12


def test_every_metric_of_the_sample_is_defined(result):
    for name, metric in result.metrics.items():
        assert (definition(name).unit, definition(name).direction) == (metric.unit, metric.direction)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "x.json: not JSON"),
        ("[1, 2]", "x.json: not a schedbench result"),
        ("{}", "x.json: not a schedbench result: no schema_version"),
        ('{"schema_version": "9.1"}', "schema_version '9.1' is not understood; this schedbench reads 1.0"),
        (
            '{"schema_version": "1.5", "conclusion": ""}',
            "x.json: the document of another command, not the result",
        ),
        ('{"schema_version": "1.0"}', r"x.json: tool: Field required \(and \d+ more\)"),
        ("[" * 100_000, "x.json: not JSON"),
    ],
)
def test_malformed_text_is_refused_with_a_reason(content, message):
    with pytest.raises(ResultError, match=message):
        Result.from_json(content, name="x.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("colour",), "red", "colour: Extra inputs are not permitted"),
        (("scenario", "expanded"), {}, "scenario.expanded: Dictionary should have at least 1 item"),
        (
            ("metrics", "ttft_ms", "unit"),
            "s",
            "ttft_ms: unit and direction are s, lower instead of ms, lower",
        ),
        (("metrics", "ttft_ms", "direction"), "higher", "ttft_ms: unit and direction are ms, higher instead"),
    ],
)
def test_what_no_run_writes_is_refused(text, path, value, message):
    document = json.loads(text)
    reduce(getitem, path[:-1], document)[path[-1]] = value
    with pytest.raises(ResultError, match=message):
        Result.from_json(canonical(document))


def test_a_missing_file_is_refused_with_its_name(tmp_path):
    with pytest.raises(ResultError, match=r"nowhere\.json: No such file"):
        read(tmp_path / "nowhere.json")
    with pytest.raises(ResultError, match="not a regular file"):
        read(tmp_path)


def test_digest_depends_on_ids_tokens_and_order():
    base = digest([("a", [1, 2]), ("b", [3])])
    assert base == digest([("a", (1, 2)), ("b", (3,))])
    others = [[("b", [3]), ("a", [1, 2])], [("a", [1, 2, 3]), ("b", [])], [("a", [1]), ("b", [2, 3])], []]
    assert len({base, *map(digest, others)}) == 5


def test_definitions_are_complete_sentences_with_units():
    for name, entry in DEFINITIONS.items():
        assert entry.name == name
        assert entry.unit and entry.formula and entry.source and entry.about.endswith(".")
        assert entry.direction in get_args(Direction) and {*entry.tables} <= {*get_args(ReportTable)}


@pytest.mark.parametrize(
    "name", ["forward_ms", "forward_ms.decode", "forward_ms.p50", "forward_ms.decode.p99"]
)
def test_kinds_and_percentiles_are_defined_with_their_metric(name):
    assert definition(name).name == "forward_ms"


@pytest.mark.parametrize(
    "name",
    [
        *("nonsense", "forward_ms.", "step_ms.decode", "forward_ms.p42", "forward_ms.decode.x"),
        *("bubble_pct.mbx", "bubble_pct.decode", "h2d_", "sync_pinned", "h2d_pinned.p99", "expect.nosuch"),
        *("decode.forward", "decode.forward.ttft_ms", "decode.slow.forward.h2d", "decode.h2d"),
        *("nosuch.forward.h2d", "retractions.p50"),
    ],
)
def test_an_unknown_metric_is_not_defined(name):
    with pytest.raises(KeyError):
        definition(name)


def test_every_metric_is_computed():
    """Of captures alone are times of ranges."""
    few = ("workload.requests=2", "workload.output_tokens={dist: uniform, min: 2, max: 6}")
    results = [result_of(name, *few) for name in ("mixed", "spec_v2", "hisparse", "pp2", "dp_idle", "disagg")]
    parts = [part for result in results for part in (result, *result.ranks)]
    computed = {definition(name).name for part in parts for name in part.metrics}
    counted = {"counts", "copies", "step kinds"}
    others = {name for name, entry in DEFINITIONS.items() if counted.issuperset(entry.tables)}
    assert DEFINITIONS.keys() - computed == others | IdlePart.model_fields.keys() | {"hidden", "range_ms"}


def test_every_metric_has_a_table_that_shows_it():
    in_documents_alone = {name for name, entry in DEFINITIONS.items() if not entry.tables}
    # Counters that few steps have, and budgets, which are asked of the counts.
    assert in_documents_alone == {"expect", "memset", "send"}
    metric = {"unit": "x", "values": [1.0], "n": 1, "max": 1.0}
    document = json.loads(SAMPLE.read_text()) | {"metrics": dict.fromkeys(DEFINITIONS, metric)}
    for table, shown in (("summary", summary(document)), ("latency", latency(document))):
        assert shown.row_count == sum(table in entry.tables for entry in DEFINITIONS.values()) > 0
    assert shown_in("latency", ["forward_ms.decode", "e2e_ms", "nonsense", "forward_ms"]) == [
        "e2e_ms",
        "forward_ms",
        "forward_ms.decode",
    ]

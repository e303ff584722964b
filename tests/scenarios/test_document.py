"""YAML to values: the scalars of YAML 1.2, the line of every key, and refused documents."""

from __future__ import annotations

import math

import pytest

from schedbench.scenarios.document import MAX_BYTES, read, scalar
from tests.scenarios.refusals import refused


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-3", -3),
        ("017", 17),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("2023-11-16", "2023-11-16"),
        ("true", True),
        ("off", "off"),
        ("no", "no"),
        ("~", None),
        ("", None),
        ("9" * 20, 10**20 - 1),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_infinity_and_nan_are_numbers() -> None:
    assert scalar("-.INF") == -math.inf
    assert scalar(".nan") != scalar(".nan")


def test_quoted_scalars_are_text() -> None:
    assert read(b"{a: '1', b: \"true\"}", "f").data == {"a": "1", "b": "true"}


def test_surrogate_pairs_of_json_are_characters() -> None:
    assert read(b'{"\\ud83d\\ude00": "\\ud83d\\ude00"}', "f").data == {"\U0001f600": "\U0001f600"}


def test_every_key_and_item_has_its_line() -> None:
    document = read(b"a:\n  b: 1\n  c:\n    - x\n    - y\n", "f")

    lines = {path: place.line for path, place in document.places.items()}
    assert lines == {(): 1, ("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", 0): 4, ("a", "c", 1): 5}


def test_a_duplicate_key_is_a_problem_and_the_first_value_stays() -> None:
    document = read(b"a: 1\nb: 2\na: 3\n", "f")

    assert document.data == {"a": 1, "b": 2}
    assert [str(problem) for problem in document.problems] == ["f:3: a: duplicate key, first given at line 1"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: &x 1\nb: *x\n", "f:2: b: anchors and aliases are not supported"),
        (b"a: !!python/name:os.system 1\n", "f:1: a: tags are not supported"),
        (b'a:\n  "\\ud800": 1\n', "f:2: a: expected text, got half of a surrogate pair"),
        (b'a: "\\ud800"\n', "f:1: a: expected text, got half of a surrogate pair"),
    ],
)
def test_tags_and_other_special_values_are_problems(content: bytes, problem: str) -> None:
    assert problem in map(str, read(content, "f").problems)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"a: 1\nb: [1, 2\n",
            "f:3: not YAML: while parsing a flow sequence expected ',' or ']', but got '<stream end>'",
        ),
        (b"a: b: c", "f:1: not YAML: mapping values are not allowed here"),
        (b"a: 1\n\xff", "f:2: expected UTF-8 text, got byte 0xff"),
        (b"a: 1\n---\nb: 2\n", "f:2: expected one document, got a second one"),
        (b"? [a]\n: 1", "f:1: expected a name as key, got a list, mapping or alias"),
        (b"[" * 60_000, "f:1: nested deeper than 16 levels"),
        (b"\x00", "f: not YAML: unacceptable character #x0000: special characters are not allowed"),
        (b'"\\U00110000"', "f: not YAML: chr() arg not in range(0x110000)"),
        (b"#" * (MAX_BYTES + 1), f"f: expected a file of at most {MAX_BYTES} bytes"),
    ],
)
def test_an_unreadable_document_is_refused_with_its_line_and_reason(content: bytes, message: str) -> None:
    assert refused(read, content, "f") == [message]

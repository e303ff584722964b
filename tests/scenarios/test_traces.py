"""Recorded traffic: the meaning of each format, the errors of malformed records, and real files."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from schedbench.scenarios.loader import load
from schedbench.scenarios.problems import ScenarioError
from schedbench.scenarios.records import MAX_ERRORS, MAX_RECORD, TraceError, TraceRecord
from schedbench.scenarios.traces import parse, read
from schedbench.scenarios.workload import Workload, build
from schedbench.scenarios.workload_schema import TraceFormat

MOONCAKE = (
    '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 2]}\n'
    '{"timestamp": 2000.5, "input_length": 512, "output_length": 1, "hash_ids": [3]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805901,374,44\n"
    "2023-11-16 18:15:47.6805900,10,0\n"
    "2023-11-16 18:16:46.6805900,396,109\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45.5,GPT-4,100,0,100,API log\n"
    '118,"GPT-4, new",1087,230,1317,API log\n'
)
SHAREGPT = json.dumps(
    [
        {
            "id": "a",
            "conversations": [{"from": "human", "value": "four" * 3}, {"from": "gpt", "value": "12345"}],
        },
        {"id": "b", "conversations": [{"from": "human", "value": "alone"}]},
        {"conversation": [{"role": "user", "content": "é" * 4}, {"role": "assistant", "content": "x"}]},
    ],
    indent=1,
)
JSONL = (
    '{"prompt_token_ids": [5, 6, 7], "output_length": 4, "timestamp": 20}\n'
    "\n"
    '{"input_length": 9, "output_length": 2, "timestamp": 10, "sampling": {"temperature": 0.5}}\n'
)
TEXTS: dict[TraceFormat, str] = {
    "mooncake": MOONCAKE,
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "sharegpt": SHAREGPT,
    "jsonl": JSONL,
}


def records(form: TraceFormat, text: str | bytes) -> list[TraceRecord]:
    content = text.encode() if isinstance(text, str) else text
    return parse(io.BytesIO(content), form, name="t").records


def lengths(form: TraceFormat) -> list[tuple[int, int]]:
    return [(record.prompt_tokens, record.output_tokens) for record in records(form, TEXTS[form])]


def test_mooncake_has_lengths_instants_and_blocks() -> None:
    assert lengths("mooncake") == [(700, 5), (600, 7), (512, 1)]
    assert [record.arrival for record in records("mooncake", MOONCAKE)] == [0, 1_500_000_000, 2_000_500_000]
    assert [record.hash_ids for record in records("mooncake", MOONCAKE)] == [(0, 1), (0, 2), (3,)]


def test_azure_dates_are_exact_and_empty_answers_left_out() -> None:
    first, second = records("azure", AZURE)

    assert lengths("azure") == [(374, 44), (396, 109)]
    assert first.arrival is not None
    assert second.arrival is not None
    assert second.arrival - first.arrival == 60 * 10**9 - 100
    assert first.line == 2
    assert second.line == 4


def test_azure_dates_may_have_a_zone() -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    [zoned] = records("azure", header + "2024-05-10 02:00:00.009930+02:00,1,1\n")
    [plain] = records("azure", header + "2024-05-10 00:00:00.009930,1,1\n")

    assert zoned.arrival == plain.arrival


def test_burstgpt_has_seconds_and_leaves_out_failed_requests() -> None:
    assert lengths("burstgpt") == [(472, 18), (1087, 230)]
    assert [record.arrival for record in records("burstgpt", BURSTGPT)] == [5 * 10**9, 118 * 10**9]


def test_sharegpt_counts_four_bytes_per_token_and_leaves_out_unanswered_texts() -> None:
    assert lengths("sharegpt") == [(3, 2), (2, 1)]
    assert [record.line for record in records("sharegpt", SHAREGPT)] == [2, 24]


def test_a_byte_order_mark_is_left_out_at_the_beginning_of_the_file_only() -> None:
    def tokens(padding: int) -> int:
        text = "x" * padding + "\ufeffx"
        turns = [{"value": text}, {"value": "y"}]
        [record] = records("sharegpt", "\ufeff" + json.dumps([{"conversations": turns}], ensure_ascii=False))
        return record.prompt_tokens

    # The file is read in pieces of 64 KiB: in one of these lengths, the character inside the text begins a piece.
    lengths = range((1 << 16) - 48, (1 << 16) + 4)
    assert [tokens(length) for length in lengths] == [-(-(length + 4) // 4) for length in lengths]


def test_jsonl_has_ids_or_lengths_and_its_own_sampling() -> None:
    ids, drawn = records("jsonl", JSONL)

    assert (ids.prompt_ids is not None and list(ids.prompt_ids), ids.output_tokens) == ([5, 6, 7], 4)
    assert (drawn.prompt_tokens, drawn.output_tokens, drawn.arrival) == (9, 2, 10_000_000)
    assert drawn.sampling is not None
    assert drawn.sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("form", "text", "message"),
    [
        ("mooncake", MOONCAKE + "{", "t:4: not JSON: Expecting property name enclosed in double quotes"),
        ("mooncake", "\n[1]", "t:2: expected a JSON object, got a list"),
        ("mooncake", "{}", "t:1: input_length: expected a whole number of tokens from 1 to 16777216, got nothing"),
        ("mooncake", '{"input_length": true}', "t:1: input_length: expected a whole number of tokens from 1 to "
         "16777216, got true"),
        ("mooncake", '{"input_length": 513, "hash_ids": [1]}', "t:1: hash_ids: expected 2 for a length of 513, got 1"),
        ("mooncake", '{"input_length": 1, "hash_ids": [-1]}', "t:1: hash_ids: expected a list of whole numbers from "
         "0 to 9223372036854775807, got a list"),
        ("mooncake", '{"input_length": 1, "hash_ids": [1], "timestamp": NaN}', "t:1: timestamp: expected a time, "
         "not negative, got nan"),
        ("mooncake", '{"input_length": 1, "hash_ids": [1], "timestamp": 1' + "0" * 400 + "}", "t:1: timestamp: "
         "expected a time, not negative, got 1" + "0" * 39 + "..."),
        ("azure", "a,b\n", "t:1: expected a header with TIMESTAMP, ContextTokens, GeneratedTokens; missing: "
         "TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("azure", AZURE + "yesterday,1,1\n", "t:5: TIMESTAMP: expected a date and time such as 2023-11-16 "
         "18:15:46.6805900, got 'yesterday'"),
        ("azure", AZURE + "2023-13-16 18:15:46,1,1\n", "t:5: TIMESTAMP: expected a date and time such as 2023-11-16 "
         "18:15:46.6805900, got '2023-13-16 18:15:46'"),
        ("azure", AZURE + "1,2\n", "t:5: expected 3 cells, got 2"),
        ("azure", AZURE + '"1,2,3\n', "t:5: not CSV: unexpected end of data"),
        ("burstgpt", BURSTGPT + "1,m,x,1,1,l\n", "t:5: Request tokens: expected a whole number of tokens from 0 to "
         "16777216, got 'x'"),
        ("sharegpt", "{}", "t:1: expected a JSON array, beginning with '['"),
        ("sharegpt", "", "t:1: expected a JSON array, beginning with '['"),
        ("sharegpt", "\n\n[3]", "t:3: expected an object"),
        ("sharegpt", "[\n{} {}]", "t:2: conversations: expected a list of turns, got nothing\n"
         "t:2: expected ',' or ']' after a conversation"),
        ("sharegpt", '[{"conversations": []}\n{}]', "t:2: expected ',' or ']' after a conversation"),
        ("sharegpt", '[{"conversations": []}', "t:1: expected ',' or ']' after a conversation"),
        ("sharegpt", '[{"conversations": []},\n{"a":\n', "t:3: not JSON: Expecting value"),
        ("sharegpt", b'\n[{"\xff": 1}]', "t:1: expected UTF-8 text"),
        ("sharegpt", b'[\n{"conversations": []}\xc3', "t:2: expected UTF-8 text"),
        ("sharegpt", '[{"conversations": [3]}]', "t:1: conversations: expected turns with a value or content of "
         "text"),
        ("jsonl", '{"prompt_token_ids": []}', "t:1: prompt_token_ids: expected 1 to 16777216 of them, got 0"),
        ("jsonl", '{"prompt_token_ids": [1.5]}', "t:1: prompt_token_ids: expected a list of whole numbers from 0 to "
         "2147483647, got a list"),
        ("jsonl", '{"input_length": 1, "output_length": 1, "sampling": {"temprature": 1}}', "t:1: "
         "sampling.temprature: extra inputs are not permitted, got 1"),
        ("jsonl", "[" * 100_000, "t:1: not JSON: maximum recursion depth exceeded while decoding a JSON array from a "
         "unicode string"),
        ("jsonl", b"{}\xff", "t:1: expected UTF-8 text, got byte 0xff"),
        ("jsonl", b" " * (MAX_RECORD + 1), "t:1: expected lines of at most 16777216 bytes"),
    ],
)  # fmt: skip
def test_a_malformed_record_is_refused_with_its_line_and_the_expected_form(
    form: TraceFormat, text: str | bytes, message: str
) -> None:
    with pytest.raises(TraceError) as refused:
        records(form, text)
    assert str(refused.value) == message


def test_all_malformed_records_are_reported_up_to_a_limit() -> None:
    sound, lines = JSONL.splitlines()[0], ["{}", "[1]", "{"]
    with pytest.raises(TraceError) as refused:
        records("jsonl", "\n".join([sound, *lines, sound]).encode() + b"\n\xff\n" + sound.encode())
    assert [text.split(": ")[0] for text in str(refused.value).splitlines()] == ["t:2", "t:3", "t:4", "t:6"]
    with pytest.raises(TraceError) as refused:
        records("azure", AZURE + "1,2\n" * (MAX_ERRORS + 3))
    *reported, rest = str(refused.value).splitlines()
    assert (len(reported), rest) == (MAX_ERRORS, "t: and 3 more malformed records")


@pytest.mark.parametrize(
    ("form", "left_out"), [("mooncake", 0), ("azure", 1), ("burstgpt", 1), ("sharegpt", 1), ("jsonl", 0)]
)
def test_records_without_prompt_or_output_are_counted(
    replayed: Callable[..., Workload], form: TraceFormat, left_out: int
) -> None:
    assert replayed(form, TEXTS[form]).achieved.left_out == left_out


@pytest.mark.parametrize("form", get_args(TraceFormat))
def test_reading_stops_at_the_limit(form: TraceFormat, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(TEXTS[form] + "this is no record of anything")

    assert [record.line for record in read(file, form, limit=1).records] == [
        records(form, TEXTS[form])[0].line
    ]


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="absent:1: cannot be read: No such file or directory"):
        read(tmp_path / "absent", "jsonl")


@given(st.lists(st.text(), max_size=3), st.integers(1, 9))
@example(["é", "€", "\U0001f600"], 1)
def test_an_array_does_not_depend_on_where_its_chunks_end(texts: list[str], size: int) -> None:
    class SlowFile(io.BytesIO):
        """A file that returns a few bytes at a time."""

        def read(self, _: int | None = -1, /) -> bytes:
            return super().read(size)

    turns = [{"from": "human", "value": text} for text in texts]
    whole = json.dumps([{"conversations": turns}, {"conversations": turns}], ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )
    assert parse(SlowFile(whole), "sharegpt", name="t").records == records("sharegpt", whole)


def test_records_after_a_long_conversation_are_read_in_linear_time() -> None:
    """Reading them takes as long as after a short conversation."""

    def seconds(characters: int) -> float:
        first = '{"conversations": [{"value": "%s"}]}' % ("x" * characters)
        text = "[" + ",".join([first, *['{"conversations": []}'] * 10_000]) + "]"
        begin = time.process_time()
        assert records("sharegpt", text) == []
        return time.process_time() - begin

    assert median(seconds(2**22) / seconds(1) for _ in range(3)) < 5


@pytest.fixture
def replayed(tmp_path: Path) -> Callable[..., Workload]:
    def replayed(form: TraceFormat, text: str, *overrides: str, vocab_size: int = 512) -> Workload:
        file = tmp_path / "trace"
        file.write_text(text)
        name = json.dumps(str(file))
        scenario = load("trace_mooncake", [f"workload.trace={name}", f"workload.format={form}", *overrides])
        return build(scenario, vocab_size=vocab_size, context_len=4096, seed=0)

    return replayed


def test_equal_hash_ids_are_equal_blocks(replayed: Callable[..., Workload]) -> None:
    first, second, third = (request.origin_input_ids for request in replayed("mooncake", MOONCAKE).upcoming())

    assert (len(first), len(second), len(third)) == (700, 600, 512)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:]
    assert third != first[:512]


@pytest.mark.parametrize(
    ("form", "overrides", "last"),
    [
        ("azure", (), 59_999_999_900),
        ("azure", ("workload.arrival={process: trace, speed: 10}",), 5_999_999_990),
        ("azure", ("workload.arrival=burst",), 0),
        ("sharegpt", (), 0),  # it has no instants
    ],
)
def test_a_trace_arrives_as_recorded_or_by_another_arrival_process(
    replayed: Callable[..., Workload], form: TraceFormat, overrides: tuple[str, ...], last: int
) -> None:
    found = replayed(form, TEXTS[form], *overrides).upcoming()
    assert [request.arrival for request in found] == [0, last]


def test_a_trace_out_of_order_is_sent_in_order(replayed: Callable[..., Workload]) -> None:
    first, second = replayed("jsonl", JSONL).upcoming()

    assert (first.id, first.arrival, len(first.origin_input_ids)) == ("r0", 0, 9)
    assert (second.id, second.arrival, list(second.origin_input_ids)) == ("r1", 10_000_000, [5, 6, 7])


def test_a_record_overrides_the_sampling_that_it_names(replayed: Callable[..., Workload]) -> None:
    overrides = ("workload.sampling={temperature: 0.1, top_k: 3}",)
    own, common = replayed("jsonl", JSONL, *overrides).upcoming()

    assert (own.sampling.temperature, own.sampling.top_k) == (0.5, 3)
    assert (common.sampling.temperature, common.sampling.top_k) == (0.1, 3)


def test_a_sampling_that_the_modes_refuse_is_refused_at_its_line(replayed: Callable[..., Workload]) -> None:
    line = '{"input_length": 4, "output_length": 2, "sampling": {"prompt_logprobs": true}}\n'
    with pytest.raises(TraceError, match="trace:4: sampling: embedding cannot be combined with prompt log"):
        replayed("jsonl", JSONL + line, "engine.embedding=true", "engine.mixed_chunk=false")
    line = line.replace('{"prompt_logprobs": true}', '{"grammar": {"regex": "(a"}}')
    with pytest.raises(TraceError, match=r"trace:4: sampling: regex '\(a': unclosed group"):
        replayed("jsonl", JSONL + line, "device.values=real")


@pytest.mark.parametrize(
    ("form", "text", "overrides", "message"),
    [
        (
            "sharegpt",
            SHAREGPT,
            ("workload.arrival.process=trace",),
            "--set: workload.arrival.process: the trace has no arrival instants",
        ),
        ("jsonl", JSONL, (), "trace:1: prompt_token_ids: expected ids below the model's 7, got 7"),
        ("sharegpt", "[]", (), "expected at least one request, got none"),
    ],
)
def test_a_trace_that_cannot_be_sent_is_refused(
    replayed: Callable[..., Workload], form: TraceFormat, text: str, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises((ScenarioError, TraceError), match=re.escape(message)):
        replayed(form, text, *overrides, vocab_size=7)


class Totals(NamedTuple):
    requests: int
    prompt_tokens: int
    longest: int


DATA = Path(__file__).parents[3] / "shared" / "data"
REAL: dict[str, tuple[TraceFormat, Totals]] = {
    "mooncake_conversation_head1500.jsonl": ("mooncake", Totals(1500, 20_981_721, 123_192)),
    "azure_llm_2023_conv_head5000.csv": ("azure", Totals(5000, 5_805_639, 7930)),
}
PRESENT = [DATA / name for name in REAL if (DATA / name).exists()]


@pytest.mark.parametrize("file", [None, *PRESENT], ids=lambda file: file.name if file else "small")
def test_recorded_files_have_their_known_totals(file: Path | None, tmp_path: Path) -> None:
    if file is None:
        file, form, known = tmp_path / "small", "mooncake", Totals(3, 1812, 700)
        file.write_text(MOONCAKE)
    else:
        form, known = REAL[file.name]
    scenario = load(
        "trace_mooncake", [f"workload.trace={file}", f"workload.format={form}", "workload.requests=null"]
    )
    workload = build(scenario, vocab_size=128256, context_len=131072, seed=0)
    lengths = [len(request.origin_input_ids) for request in workload.upcoming()]

    assert Totals(len(workload), sum(lengths), max(lengths)) == known
    assert workload.achieved.clipped == 0

"""ShareGPT's texts are counted by the tokenizer in the model's folder, and estimated without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from schedbench.profiles.platform.inputs import inputs
from schedbench.profiles.platform.resolve import Resolved
from schedbench.profiles.run.feed import measured_workload
from schedbench.scenarios import traces
from schedbench.scenarios.problems import ScenarioError
from tests.acceptance.runs import resolved, result_of, statuses

WORDS = ["how many words are in this \ud800 prompt", "eight of them I should think is right"]
ESTIMATED = (10, 10)  # 37 bytes each


@pytest.fixture
def asked(checkpoint: Path) -> tuple[str, ...]:
    """Returns the settings of a trace of one conversation for that model."""
    trace = checkpoint / "trace.json"
    trace.write_text(json.dumps([{"conversations": [{"value": text} for text in WORDS]}]))
    return f"model.path={checkpoint}", f"workload={{trace: {trace}, format: sharegpt, requests: 1}}"


def by_words(folder: Path) -> None:
    """Writes a tokenizer that truncates long texts and pads short ones, as a checkpoint's may, into the folder."""
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))


def lengths(question: Resolved) -> tuple[int, int]:
    achieved = measured_workload(question).achieved
    return int(achieved.prompt_tokens.achieved.mean), int(achieved.output_tokens.achieved.mean)


def test_texts_are_counted_by_the_tokenizer_of_the_model(checkpoint: Path, asked: tuple[str, ...]) -> None:
    assert lengths(resolved("mixed", *asked)) == ESTIMATED
    by_words(checkpoint)
    question = resolved("mixed", *asked)
    assert lengths(question) == (8, 8)
    assert f"{checkpoint}/tokenizer.json" in [part.file for part in inputs(question)]
    result = result_of("mixed", *asked)
    assert statuses(result) == {"finished"} and result.requests[0].prompt_tokens == 8


def test_a_tokenizer_is_used_for_texts_only(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("not read")
    question = resolved("mixed", f"model.path={checkpoint}", "workload.requests=2")
    assert not [part for part in inputs(question) if part.file.endswith("tokenizer.json")]


def test_an_unusable_tokenizer_is_an_error_of_the_model(
    checkpoint: Path, asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(ScenarioError, match=r"model\.path: tokenizer\.json is no tokenizer"):
        resolved("mixed", *asked)
    monkeypatch.setattr(traces, "find_spec", lambda _: None)
    with pytest.raises(ScenarioError, match=r"pip install 'schedbench\[tokenizer\]'"):
        resolved("mixed", *asked)

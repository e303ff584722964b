"""The number of tokens of a text: by the model's tokenizer, or an estimate by its bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .schema import Scenario

TOKENIZER: Final = "tokenizer.json"
_BYTES_PER_TOKEN: Final = 4

TokenCount = Callable[[str], int]


def estimated(text: str) -> int:
    return -(-len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN)


def tokenizer_file(scenario: Scenario) -> Path | None:
    """The tokenizer in the model's folder, if the scenario's trace holds text and the folder has one."""
    model = scenario.model.path
    if model is None or scenario.workload.format != "sharegpt":
        return None
    file = scenario.source.locate(("model", "path"), model) / TOKENIZER
    return file if file.is_file() else None


def token_count(file: Path | None) -> TokenCount:
    """Counts a text's tokens by the tokenizer in ``file``, without the special tokens of a chat; by ``estimated`` for
    None. Raises LookupError where the library is missing or does not read the file."""
    if file is None:
        return estimated
    if find_spec("tokenizers") is None:
        raise LookupError(f"{TOKENIZER} counts the tokens of texts: pip install 'schedbench[tokenizer]'")
    tokenizer = _loaded(file.resolve(), file.stat().st_mtime_ns)

    def count(text: str) -> int:
        plain = text.encode("utf-8", "replace").decode()  # the library refuses lone surrogates
        return len(tokenizer.encode(plain, add_special_tokens=False).ids)

    return count


@lru_cache(maxsize=4)
def _loaded(file: Path, changed: int) -> Any:  # noqa: ARG001
    try:
        tokenizer = import_module("tokenizers").Tokenizer.from_file(str(file))
    except Exception as error:  # the library's own errors have no other class in common
        raise LookupError(f"{TOKENIZER} is no tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

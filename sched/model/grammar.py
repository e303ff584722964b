"""Grammars that constrain tokens: a regular expression, or a choice of strings.

The engine has no text tokenizer, so grammars are defined on bytes. Token id i below 256 is byte i; if that id is an
end-of-sequence token, the byte has the first free id from 256 on. No other id is ever allowed, except an
end-of-sequence token where the grammar may end. The text is UTF-8 and matches the complete pattern, in the syntax of
Rust's regex crate without look-around: \\d, \\w and \\s are Unicode's classes, [0-9] is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from

Spec = tuple[Literal["regex", "choice"], tuple[str, ...]]

_BYTES = 256


class GrammarError(ValueError):
    """A pattern that cannot be compiled, or a token that the grammar does not allow."""


def vocab_mask_words(vocab_size: int) -> int:
    """int32 words that hold one bit per token id."""
    return -(-vocab_size // 32)


@dataclass(slots=True)
class GrammarState:
    matcher: LLMatcher
    eos_token_ids: tuple[int, ...]
    ended: bool = False

    def accept_token(self, token_id: int) -> None:
        """Advance by one token. Raises GrammarError, without a change of state, if the token is not allowed here."""
        if token_id in self.eos_token_ids and not self.ended:
            allowed = self.ended = self.matcher.is_accepting()
        else:
            allowed = not self.ended and self.matcher.try_consume_tokens([token_id]) == 1
        if not allowed:
            raise GrammarError(f"the grammar does not allow token {token_id} here")

    def fill_vocab_mask(self, mask_row: npt.NDArray[np.int32]) -> None:
        """Set the bits of the ids that are allowed next in one row of ceil(vocab / 32) words, and clear the others. At
        least one bit is set: that of end-of-sequence if no other token may follow. An accepted end-of-sequence does not
        change the mask."""
        self.matcher.unsafe_compute_mask_ptr(mask_row.ctypes.data, mask_row.nbytes)
        if self.matcher.is_error():
            raise GrammarError(_error_sentence(self.matcher.get_error()))

    def is_terminated(self) -> bool:
        """An end-of-sequence was accepted."""
        return self.ended

    def copy(self) -> GrammarState:
        return GrammarState(self.matcher.deep_copy(), self.eos_token_ids, self.ended)


class _ByteTokens:
    """The vocabulary in the form that the matcher's library requires."""

    bos_token_id = None

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.special_token_ids = list(eos_token_ids)
        spare = (i for i in range(_BYTES, vocab_size) if i not in eos_token_ids)
        self.tokens = [b""] * vocab_size
        for byte in range(_BYTES):
            self.tokens[next(spare) if byte in eos_token_ids else byte] = bytes([byte])

    def __call__(self, text: bytes) -> list[int]:
        return [self.tokens.index(bytes([byte])) for byte in text]


@dataclass
class GrammarCache:
    """Compiles each pattern once for a vocabulary of ``vocab_size`` ids. Whether the vocabulary has grammars is asked
    with the first pattern."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    compiled: dict[Spec, GrammarState] = field(default_factory=dict)

    @cached_property
    def _tokens(self) -> _ByteTokens:
        if not self.eos_token_ids:
            raise GrammarError("a grammar needs an end-of-sequence token")
        if self.vocab_size < _BYTES + len(self.eos_token_ids):
            raise GrammarError(f"a vocabulary of {self.vocab_size} ids cannot spell every byte")
        return _ByteTokens(self.vocab_size, self.eos_token_ids)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self._tokens), eos_token=list(self.eos_token_ids), slices=[])

    def start(self, spec: Spec) -> GrammarState:
        """A new state at the start of the grammar. Raises GrammarError for an invalid pattern."""
        if spec not in self.compiled:
            self.compiled[spec] = self.compile(spec)
        return self.compiled[spec].copy()

    def text(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of tokens; end-of-sequence has none."""
        return b"".join(self._tokens.tokens[token_id] for token_id in token_ids)

    def compile(self, spec: Spec) -> GrammarState:
        """As ``start``, compiled anew: it shares nothing with other states."""
        try:
            matcher = LLMatcher(self.tokenizer, _source(spec), log_level=0)
            state = GrammarState(matcher, self.eos_token_ids)
            state.fill_vocab_mask(np.empty(vocab_mask_words(self.vocab_size), np.int32))
        except ValueError as error:
            raise GrammarError(f"{_named(spec)}: {error}") from error
        return state


def _named(spec: Spec) -> str:
    kind, patterns = spec
    return f"{kind} {', '.join(map(repr, patterns))}"


def _source(spec: Spec) -> str:
    kind, patterns = spec
    if not patterns:
        raise ValueError("no pattern")
    if kind == "choice":
        return grammar_from("choice", json.dumps(patterns, ensure_ascii=False))
    return LLMatcher.grammar_from_regex("|".join(f"(?:{pattern})" for pattern in patterns))


def _error_sentence(message: str) -> str:
    """The error sentence of a message that also shows the pattern and the position of the error."""
    sentence = message.rpartition("error: ")[2].partition("\n")[0]
    return "no text matches" if sentence == "NoExtensionBias" else sentence

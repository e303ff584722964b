"""Grammars: the tokens that they allow, compared with Python's ``re`` and with an enumeration of all strings."""

from __future__ import annotations

import itertools
import random
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedbench.sched.kernels.sampling import sample
from schedbench.sched.model.grammar import GrammarCache, GrammarError, GrammarState, vocab_mask_words
from tests.sched.sampling.rows import draw_of

VOCAB, EOS = 300, (299, 256)


@pytest.fixture(scope="module")
def cache() -> GrammarCache:
    return GrammarCache(VOCAB, EOS)


def allowed(grammar: GrammarState, vocab_size: int = VOCAB) -> set[int]:
    row = np.full(vocab_mask_words(vocab_size), -1, np.int32)
    grammar.fill_vocab_mask(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def random_walk(
    grammar: GrammarState, rng: random.Random, *, ascii_only: bool = False, limit: int = 60
) -> list[int]:
    """Draws tokens until the end, or ``limit`` of them; ends as soon as allowed beyond a third of that."""
    tokens: list[int] = []
    while not grammar.is_terminated() and len(tokens) < limit:
        choices = sorted(i for i in allowed(grammar) if not ascii_only or i < 128 or i in EOS)
        ends = [i for i in choices if i in EOS]
        token = ends[0] if ends and len(tokens) > limit // 3 else rng.choice(choices)
        grammar.accept_token(token)
        tokens.append(token)
    return tokens


# Unicode's classes differ between versions of Unicode, so patterns with \d, \w or \s are compared in ASCII.
@pytest.mark.parametrize(
    ("pattern", "ascii_only"),
    [
        (r"[a-z]+@[a-z]{2,5}\.(com|org)", False),
        (r"(ab|a)(c|bcd)?", False),
        (r"-?\d+(\.\d{1,3})?", True),
        (r"\s*\w\W\S\D", True),
        (r"[^x]{3}", False),
        (r"(?:yes|no|é|日本)*", False),
        (r".{0,4}z?", False),
        (r"\{\"n\": [0-9]+\}", False),
        (r"", False),
    ],
)
def test_generated_text_matches(cache: GrammarCache, pattern: str, ascii_only: bool) -> None:
    rng, whole = random.Random(pattern), 0
    for _ in range(30):
        tokens = random_walk(cache.start(("regex", (pattern,))), rng, ascii_only=ascii_only)
        if tokens[-1] in EOS:
            whole += 1
            text = cache.text(tokens[:-1]).decode()
            assert re.fullmatch(pattern, text, re.ASCII if ascii_only else 0)
    assert whole >= 20


class Language(NamedTuple):
    """A pattern, and all its words over the letters abc."""

    pattern: str
    words: frozenset[str]

    def then(self, other: Language) -> Language:
        return Language(
            self.pattern + other.pattern, frozenset(a + b for a in self.words for b in other.words)
        )

    def or_else(self, other: Language) -> Language:
        return Language(f"({self.pattern}|{other.pattern})", self.words | other.words)

    def repeated(self, least: int, most: int) -> Language:
        words = {"".join(w) for n in range(least, most + 1) for w in itertools.product(self.words, repeat=n)}
        return Language(f"({self.pattern}){{{least},{most}}}", frozenset(words))


LANGUAGES = st.recursive(
    st.sampled_from(
        [
            Language(p, frozenset(w))
            for p, w in {"a": "a", "b": "b", "[bc]": "bc", "[^a]": "bc", ".": "abc"}.items()
        ]
    ),
    lambda inner: st.one_of(
        st.builds(Language.then, inner, inner),
        st.builds(Language.or_else, inner, inner),
        st.builds(Language.repeated, inner, st.just(0), st.integers(1, 2)),
        st.builds(Language.repeated, inner, st.just(1), st.integers(1, 2)),
    ),
    max_leaves=5,
).filter(lambda language: len(language.words) < 120)


@settings(max_examples=60)
@given(LANGUAGES)
def test_masks_are_exact(language: Language) -> None:
    """After every prefix of a word exactly the letters that lead to a word are allowed, and the end exactly where a
    word ends."""
    cache = GrammarCache(VOCAB, EOS)
    for prefix in {word[:n] for word in language.words for n in range(len(word) + 1)}:
        grammar = cache.start(("regex", (language.pattern,)))
        for letter in prefix:
            grammar.accept_token(ord(letter))
        ids = allowed(grammar)
        assert ids & set(EOS) == (set(EOS) if prefix in language.words else set())
        following = {w[len(prefix)] for w in language.words if w.startswith(prefix) and w != prefix}
        assert {chr(i) for i in ids & set(b"abc")} == following


@settings(max_examples=60)
@given(st.lists(st.text(max_size=4), min_size=1, max_size=4, unique=True), st.randoms())
def test_a_choice_generates_one_of_its_strings(choices: list[str], rng: random.Random) -> None:
    cache = GrammarCache(VOCAB, EOS)
    grammar = cache.start(("choice", tuple(choices)))
    spelled, options = b"", {choice.encode() for choice in choices}
    while not grammar.is_terminated():
        ids = allowed(grammar)
        following = {
            option[len(spelled)] for option in options if option.startswith(spelled) and option != spelled
        }
        assert ids - set(EOS) == following
        assert (ids & set(EOS) == set(EOS)) == (spelled in options)
        token = rng.choice(sorted(ids))
        grammar.accept_token(token)
        spelled += cache.text([token])
    assert spelled in options


def test_sampled_tokens_obey_the_grammar(cache: GrammarCache) -> None:
    pattern = r"(GET|POST) /[a-z]{1,8} HTTP/1\.[01]"
    for request in range(20):
        grammar, tokens = cache.start(("regex", (pattern,))), []
        while not grammar.is_terminated():
            mask = torch.zeros((1, vocab_mask_words(VOCAB)), dtype=torch.int32)
            grammar.fill_vocab_mask(mask[0].numpy())
            logits = torch.randn((1, VOCAB), generator=torch.Generator().manual_seed(len(tokens)))
            tokens.append(int(sample(*draw_of(logits, positions=torch.tensor([request]), vocab_mask=mask))))
            grammar.accept_token(tokens[-1])
        assert re.fullmatch(pattern, cache.text(tokens).decode())


def test_a_refused_token_changes_nothing(cache: GrammarCache) -> None:
    grammar = cache.start(("regex", ("ab",)))
    before = allowed(grammar)
    for token in (ord("b"), EOS[0], 280, VOCAB - 2):
        with pytest.raises(GrammarError, match=f"does not allow token {token}"):
            grammar.accept_token(token)
    assert allowed(grammar) == before == {ord("a")}


def test_only_an_end_of_sequence_terminates(cache: GrammarCache) -> None:
    grammar = cache.start(("choice", ("a",)))
    grammar.accept_token(ord("a"))
    assert allowed(grammar) == set(EOS) and not grammar.is_terminated()
    other = grammar.copy()
    grammar.accept_token(EOS[1])
    assert grammar.is_terminated() and grammar.copy().is_terminated() and allowed(grammar)
    assert not other.is_terminated()
    with pytest.raises(GrammarError):
        grammar.accept_token(EOS[0])


def test_a_byte_whose_id_is_an_end_of_sequence_gets_another_id() -> None:
    cache = GrammarCache(260, (2, 10, 257))
    assert allowed(cache.start(("regex", (r"[\x02\n]",))), 260) == {256, 258}
    assert cache.text([256, 258, 2, 65]) == b"\x02\nA"


def test_a_pattern_is_compiled_once_and_requests_do_not_share_state(cache: GrammarCache) -> None:
    spec = ("regex", ("ab+",))
    first, second = cache.start(spec), cache.start(spec)
    first.accept_token(ord("a"))
    assert allowed(first) == {ord("b")} and allowed(second) == {ord("a")}
    assert list(cache.compiled).count(spec) == 1


@pytest.mark.parametrize(
    ("kind", "patterns", "reason"),
    [
        ("regex", ("(a",), "unclosed group"),
        ("regex", ("[",), "unclosed character class"),
        ("regex", ("a[^\\x00-\\x{10FFFF}]",), "no text matches"),
        ("regex", (r"(a)\1",), "backreferences are not supported"),
        ("regex", ("a(?=b)",), "look-around"),
        ("regex", ("\ud800",), "surrogates not allowed"),
        ("choice", (), "no pattern"),
    ],
)
def test_invalid_patterns_are_refused_with_a_reason(
    cache: GrammarCache, kind: str, patterns: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason):
        cache.start((kind, patterns))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("vocab_size", "eos", "reason"), [(300, (), "end-of-sequence"), (256, (0,), "256 ids")]
)
def test_a_vocabulary_must_hold_every_byte_and_an_end(
    vocab_size: int, eos: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason):
        GrammarCache(vocab_size, eos).start(("regex", ("a",)))

"""SGLang's grammars by its llguidance backend, whose tokens are those of schedbench's grammars."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Executor, Future
from importlib import import_module
from typing import Any, TypeVar

from ....sched.model.config import ModelConfig
from ....sched.model.grammar import GrammarCache, Spec
from .edge import fitted

T = TypeVar("T")


class _AtOnce(Executor):
    """Runs what it is given before it returns, so that a request's first step does not depend on a thread."""

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future = Future[T]()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def install_grammars(scheduler: Any, model: ModelConfig) -> None:
    """Give the scheduler the backend that it makes where it has a tokenizer. Raises GrammarError for a model whose
    vocabulary has no grammars."""
    tokenizer = GrammarCache(model.vocab_size, tuple(model.eos_token_ids)).tokenizer
    llguidance: Any = import_module("sglang.srt.constrained.llguidance_backend")
    llguidance.from_tokenizer = lambda *_, **__: tokenizer
    backend = fitted(
        import_module("sglang.srt.constrained.base_grammar_backend").create_grammar_backend,
        server_args=scheduler.server_args,
        vocab_size=model.vocab_size,
        eos_token_ids=set(model.eos_token_ids),
    )
    backend.executor.shutdown()
    backend.executor = _AtOnce()
    getattr(scheduler, "grammar_manager", scheduler).grammar_backend = backend


def regular_expression(grammar: Spec | None) -> str | None:
    """The grammar as the regular expression that a request has."""
    if grammar is None:
        return None
    kind, patterns = grammar
    return "|".join(f"(?:{re.escape(pattern) if kind == 'choice' else pattern})" for pattern in patterns)

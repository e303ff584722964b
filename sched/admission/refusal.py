"""Refusal of requests that can never run, when they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..model.grammar import GrammarError

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..request import Request


def refusal(req: Request, config: EngineConfig, pool: int) -> str:
    """Why ``req`` does not fit into the context, or into a KV pool of ``pool`` tokens; empty where it does."""
    prompt, output = len(req.origin_input_ids), req.sampling.max_new_tokens
    drafts = 0 if config.speculative is None else config.speculative.overhang
    what = f"{prompt} prompt + {output} new tokens" + (f" + {drafts} for drafts" if drafts else "")
    if prompt == 0:
        return "empty prompt"
    if prompt + output + drafts > config.context_len:
        return f"{what} exceed the context length of {config.context_len}"
    if prompt + output + drafts + config.page_size >= pool:
        return f"{what} exceed the KV pool of {pool} tokens"
    outside = [token for token in req.sampling.stop_token_ids if not 0 <= token < config.vocab_size]
    if outside:
        return f"stop token {outside[0]} is not in the vocabulary of {config.vocab_size}"
    return ""


def start_grammar(req: Request, grammars: Any) -> str:
    """Compile the grammar of ``req``, if it has one. Returns why that failed; empty if it did not."""
    if req.sampling.grammar is None:
        return ""
    try:
        req.grammar = grammars.start(req.sampling.grammar)
    except GrammarError as error:
        return str(error)
    return ""

"""Prompts without decodes: a request's result is an embedding, the hidden state of its prompt's last token.

A forward hands nothing on to a later one, so nothing is stashed, published or merged. From #25945 on the prompts' ids
are staged on the host, and resolving a batch uploads them; before, it has nothing to do.
"""

from __future__ import annotations

from ..batch import FutureIndices, ScheduleBatch, StepResult
from ..request import Status
from .engine import Engine
from .launch import run_model
from .settle import announce_token

PLACEHOLDER = 0
"""An embedded request's one output token (upstream's), which counts the request as served."""


def launch_embedding(engine: Engine, batch: ScheduleBatch, *, overlapped: bool) -> StepResult:
    """Embed the prompts: on the forward stream without waiting for it, or on the current stream."""
    relay = engine.relay
    with relay.isolate_prompt(batch):
        output = run_model(engine, batch)
        # [b, hidden], or [b, 1] int64 with values none.
        embeddings = output.logits if output.fingerprint is None else output.fingerprint.unsqueeze(1)
        result = StepResult(None, FutureIndices(batch.req_pool_indices, None), embeddings=embeddings)
        if overlapped:
            with engine.observer.range("copy", batch.step, batch.batch_size):
                result.embeddings = embeddings.to("cpu", non_blocking=True)
                if engine.config.capabilities.events:
                    result.copy_done = engine.streams.module.Event()
                    result.copy_done.record()
        relay.keep_alive(batch, result)
    if overlapped:
        relay.reads_done(batch)
    return result


def settle_embedding(engine: Engine, batch: ScheduleBatch, result: StepResult) -> bool:
    """Give every request its embedding, waiting for it if necessary, and end the requests whose prompt is complete.
    Returns False: no request continues."""
    if result.copy_done is not None:
        result.copy_done.synchronize()
    assert result.embeddings is not None
    for req, embedding in zip(batch.reqs, result.embeddings.tolist(), strict=True):
        if req.status is not Status.RUNNING:
            continue
        if req.inflight_middle_chunks > 0:
            req.inflight_middle_chunks -= 1  # more chunks of the prompt follow: this embedding has no meaning
            continue
        req.embedding = tuple(embedding)
        req.output_ids.append(PLACEHOLDER)
        announce_token(engine, req)  # which ends it, since its max_new_tokens is 1
    return False

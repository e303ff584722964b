"""The scenario as SGLang's arguments: the server's, the model's configuration, and requests."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from ....scenarios.combinations import MODES, overlaps, staged
from ....scenarios.schema import EngineSection
from ....sched.config import EngineConfig, SpeculativeConfig
from ....sched.disagg.layout import Role
from ....sched.model.runner import captured_sizes
from ....sched.request import Request
from ...platform.resolve import Resolved
from ...vgpu.patching import attributes_set
from ..model import sampled_alike
from ..names import EngineError
from .edge import fitted
from .grammar import regular_expression
from .hisparse import arguments as hisparse_arguments

_SKIP: Final = "SGLANG_PP_SKIP_PURE_CHUNKED_OUTPUT_COMM"
_SMOOTH: Final = "SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR"
_FOREVER: Final = 1e9  # s
# Of modes' arguments, by their beginnings, those that decide what is scheduled.
_DECISIVE_BEGINNINGS: Final = (
    *("speculative", "disaggregation_mode", "pp_", "enable_dynamic"),
    *("enable_hisparse", "hisparse_config"),
)


def server_args(resolved: Resolved, config: EngineConfig, model: Path, role: Role | None) -> Any:
    """``role``: of a worker of a pair. Raises EngineError where this SGLang lacks or changes an argument that decides
    what is scheduled."""
    kind = import_module("sglang.srt.server_args").ServerArgs
    engine, rows = resolved.scenario.engine, config.max_running_requests
    own = MODES["own model runner"].on(resolved.scenario)
    decisive = _decisive(resolved, config)
    others = {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "device": "cuda",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.5,
        "random_seed": config.seed,
        "load_format": "dummy",
        "dtype": _dtype(resolved, own=own),
        "disable_cuda_graph": not own
        or not captured_sizes(config),  # the stub replays the decoder's own graphs
        "disable_piecewise_cuda_graph": True,
        "cuda_graph_max_bs": rows,
        "cuda_graph_max_bs_decode": rows,
        "cuda_graph_max_bs_prefill": rows,
        "disable_custom_all_reduce": True,
        "watchdog_timeout": _FOREVER,
        "log_level": "warning",
        "decode_log_interval": 10**9,
        "enable_metrics": False,
        "stream_interval": 1,
    }
    more = _speculation(config.speculative, model) | _worker(engine, role) | _stages(engine)
    more |= hisparse_arguments(engine, resolved.model)
    decisive |= {name: value for name, value in more.items() if name.startswith(_DECISIVE_BEGINNINGS)}
    wanted = decisive | others | more | (shared := _data_ranks(engine, config))
    known = inspect.signature(kind).parameters
    if "cuda_graph_max_bs_decode" in known:
        del wanted["cuda_graph_max_bs"]
    try:
        with _setters(kind) as setters:
            args = fitted(kind, **wanted)
    except (ValueError, NotImplementedError, AssertionError) as error:
        frame = [*traceback.walk_tb(error.__traceback__)][-1][0]  # of the function that has raised it
        raise EngineError(f"SGLang refuses the scenario: {error} ({frame.f_code.co_qualname})") from error
    for name in decisive.keys() - shared.keys():
        if (kept := getattr(args, name, None)) != wanted[name]:
            raise EngineError(
                f"SGLang takes {kept!r} for its argument {name}, which it sets itself ({setters.get(name)});"
                f" the scenario needs {wanted[name]!r}"
            )
    return args


def _decisive(resolved: Resolved, config: EngineConfig) -> dict[str, Any]:
    """By these a scenario decides what is scheduled: a run without them would be of another scenario."""
    return {
        "grammar_backend": "llguidance" if MODES["grammar"].on(resolved.scenario) else "none",
        "max_total_tokens": config.kv_tokens,
        "max_running_requests": config.max_running_requests,
        "chunked_prefill_size": -1 if config.chunked_prefill_size is None else config.chunked_prefill_size,
        "max_prefill_tokens": config.max_prefill_tokens,
        "enable_mixed_chunk": config.mixed_chunk,
        "schedule_policy": config.policy,
        "schedule_conservativeness": config.schedule_conservativeness,
        "context_length": config.context_len,
        "disable_radix_cache": not resolved.scenario.engine.radix_cache,
        "disable_overlap_schedule": staged(resolved.scenario) or not overlaps(resolved.scenario),
        "page_size": config.page_size,
    }


@contextmanager
def _setters(kind: Any) -> Iterator[dict[str, str]]:
    """The function of SGLang that has set each argument last."""
    found: dict[str, str] = {}
    original = kind.__setattr__

    def record(args: Any, name: str, value: Any) -> None:
        found[name] = sys._getframe(1).f_code.co_qualname
        original(args, name, value)

    with attributes_set([(kind, "__setattr__", record)]):
        yield found


def _dtype(resolved: Resolved, *, own: bool) -> str:
    """SGLang's own graphs have room for what stages send in its type. The stub's pools are never used."""
    return resolved.model.dtype_name if own and staged(resolved.scenario) else "bfloat16"


def _speculation(spec: SpeculativeConfig | None, model: Path) -> dict[str, Any]:
    if spec is None:
        return {}
    os.environ["SGLANG_ENABLE_SPEC_V2"] = str(spec.mode == "v2")
    return {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(model),
        "speculative_num_steps": spec.steps,
        "speculative_eagle_topk": spec.topk,
        "speculative_num_draft_tokens": spec.draft_tokens,
        "enable_beta_spec": spec.mode == "v2",
    }


def _stages(engine: EngineSection) -> dict[str, Any]:
    if engine.pipeline.stages == 1:
        return {}
    if engine.pipeline.skip_chunk_outputs:
        if not hasattr(import_module("sglang.srt.environ").envs, _SKIP):
            raise EngineError(
                f"this SGLang sends the outputs of every chunk: it has no {_SKIP} (event_loop_pp)"
            )
        os.environ[_SKIP] = "1"
    depth, chunks = engine.pipeline.async_depth, {}
    if engine.pipeline.dynamic_chunks:
        os.environ[_SMOOTH] = str(engine.pipeline.smooth_factor)
        chunks = {"enable_dynamic_chunking": True}
    return {"pp_size": engine.pipeline.stages} | ({"pp_async_batch_depth": depth} if depth else {}) | chunks


def _data_ranks(engine: EngineSection, config: EngineConfig) -> dict[str, Any]:
    """Of the sizes SGLang takes a share for each rank, and of the conservativeness 30 %: see ``require_shares``."""
    ranks, chunk = engine.data_parallel.ranks, config.chunked_prefill_size
    if ranks == 1:
        return {}
    return {
        "tp_size": ranks,
        "dp_size": ranks,
        "enable_dp_attention": True,
        "chunked_prefill_size": -1 if chunk is None else chunk * ranks,
        "schedule_conservativeness": config.schedule_conservativeness / 0.3,
    }


def _worker(engine: EngineSection, role: Role | None) -> dict[str, Any]:
    if role is None:
        return {}
    return {
        "disaggregation_mode": role,
        "disaggregation_transfer_backend": "nixl",  # a prefill worker refuses "fake": see ``fake_transfers``
        "disaggregation_decode_retraction_backup": "cpu_tensor",  # as in versions without a choice
        "disable_radix_cache": role == "decode" or not engine.radix_cache,
        "num_reserved_decode_tokens": engine.disaggregation.reserved_decode_tokens,
    }


def tokenized(request: Request, role: Role | None, host: str | None = None) -> Any:
    """SGLang's message of a request whose prompt is tokenized. ``role``: of the worker of a pair that gets it.
    ``host`` is that of its prefill worker, by default one that sends nothing."""
    messages = import_module("sglang.srt.managers.io_struct")
    hosts = import_module("sglang.srt.disaggregation.utils")
    kind = messages.TokenizedGenerateReqInput
    ids = request.origin_input_ids
    arrays = "array" in str(kind.__annotations__.get("input_ids", ""))
    return fitted(
        kind,
        rid=request.id,
        input_text="",
        input_ids=array("q", ids) if arrays else list(ids),
        mm_inputs=None,
        sampling_params=_sampling(request),
        return_logprob=request.sampling.logprobs or request.sampling.prompt_logprobs,
        logprob_start_len=0 if request.sampling.prompt_logprobs else -1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
        bootstrap_host=None if role is None else host or hosts.FAKE_BOOTSTRAP_HOST,
        bootstrap_room=request.index + 1,  # 0 is none
    )


def _sampling(request: Request) -> Any:
    kind = import_module("sglang.srt.sampling.sampling_params").SamplingParams
    given = request.sampling
    params = kind(
        max_new_tokens=given.max_new_tokens,
        **sampled_alike(given),
        top_k=given.top_k or -1,
        min_new_tokens=given.min_new_tokens,
        stop_token_ids=list(given.stop_token_ids) or None,
        regex=regular_expression(given.grammar),
    )
    if hasattr(params, "normalize"):
        tokenizer = object()  # which a minimum length needs, and stop strings alone would use
        params.normalize(tokenizer)
    return params


def aborted(request_id: str) -> Any:
    """SGLang's message of a client that has gone."""
    return fitted(import_module("sglang.srt.managers.io_struct").AbortReq, rid=request_id, abort_all=False)

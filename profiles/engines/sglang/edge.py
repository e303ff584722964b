"""What is changed around SGLang before it is imported: what asks for hardware that is not there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import MethodType
from typing import Any

import torch

from ....sched.pipeline import Stage
from ..model import another_group_of_one, process_group_of_one
from ..names import EngineError
from .kernels import JitModule, compiled_kernels


def prepared_modules() -> None:
    """Import the modules that ask for hardware, and answer for it."""
    for module in ("sglang.srt.utils.common", "sglang.srt.utils"):
        replace_attribute(module, "get_nvgpu_memory_capacity", lambda: torch.cuda.mem_get_info()[1] >> 20)
    for module in ("sglang.jit_kernel.utils", "sglang.kernels.jit.utils"):
        replace_attribute(module, "load_jit", JitModule)
    compiled_kernels()


def fitted(kind: Callable[..., Any], **given: Any) -> Any:
    """Call ``kind`` with those of the arguments that it has, and None for others that it cannot do without."""
    parameters = inspect.signature(kind).parameters
    taken = {name: value for name, value in given.items() if name in parameters}
    for name, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and name not in taken:
            taken[name] = None
    return kind(**taken)


def replace_attribute(module: str, name: str, value: Any) -> bool:
    """Set an attribute of a module that has it. Raises ImportError where the module is there and lacks something."""
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return False
    there = hasattr(found, name)
    if there:
        setattr(found, name, value)
    return there


def replace_transfer_classes(made: Callable[[Any, Any], Any]) -> None:
    """Let SGLang take, for whatever backend, the class that ``made`` returns for a kind and for SGLang's own class of
    that kind, whose transfers are never made."""
    backends = import_module("sglang.srt.disaggregation.utils")

    @cache
    def get_kv_class(_: Any, kind: Any) -> Any:
        known = backends.get_kv_class(backends.TransferBackend.FAKE, kind)
        if known is None:
            raise EngineError(
                f"this SGLang has no {kind.value} for transfers that are never made (get_kv_class)"
            )
        return made(kind, known)

    for module in ("prefill", "decode"):
        replace_attribute(f"sglang.srt.disaggregation.{module}", "get_kv_class", get_kv_class)


def fake_transfers() -> None:
    """Let SGLang take its own classes for transfers that are never made. Its requests with such transfers are warm-ups,
    which it keeps out of the prefix cache: here they are requests like others."""
    replace_transfer_classes(lambda _, known: known)
    replace_attribute("sglang.srt.managers.schedule_batch", "FAKE_BOOTSTRAP_HOST", None)


def groups_of_one(defaults: set[str], stage: Stage | None) -> Any:
    """Make every process group of SGLang a group of one rank, except that of a pipeline's stages. The names of what
    such groups do not have enter ``defaults`` as they are read."""
    state: Any = import_module("sglang.srt.distributed.parallel_state")
    one = LocalGroup(process_group_of_one(), defaults)
    for name, value in list(vars(state).items()):
        if name.startswith("_") and name[1:].isupper() and value is None:
            setattr(state, name, one)
    _attention_groups(one)
    if stage is not None:
        state._PP = _group_of_stages(stage, defaults)
    return one


def _group_of_stages(stage: Stage, defaults: set[str]) -> LocalGroup:
    """SGLang's group of a pipeline's stages, whose messages are SGLang's own."""
    state: Any = import_module("sglang.srt.distributed.parallel_state")
    group = LocalGroup(another_group_of_one(), defaults, rank=stage.index, size=stage.count)
    for name in ("send_object", "recv_object", "send_tensor_dict", "recv_tensor_dict"):
        setattr(group, name, MethodType(getattr(state.GroupCoordinator, name), group))
    # Requests have no images, and each stage has the seed already.
    replace_attribute("sglang.srt.managers.mm_utils", "_get_is_default_transport", lambda: True)
    replace_attribute("sglang.srt.managers.tp_worker", "broadcast_pyobj", lambda data, *_, **__: data)
    return group


def _attention_groups(one: LocalGroup) -> None:
    """The same for data-parallel attention, whose module keeps ranks and sizes of its own."""
    attention: Any = import_module("sglang.srt.layers.dp_attention")
    alone = {"GROUP": one, "RANK": 0, "SIZE": 1}
    for name, value in list(vars(attention).items()):
        ending = name.rpartition("_")[2]
        if value is None and name.startswith("_") and ending in alone:
            setattr(attention, name, alone[ending])
    if getattr(attention, "_ENABLE_DP_ATTENTION_FLAG", False) is None:
        attention._ENABLE_DP_ATTENTION_FLAG = False


class LocalGroup:
    """A process group in which nothing is sent: what is gathered or reduced in it is this rank's. What it has no answer
    for is None."""

    unique_name = "one"
    local_rank = first_rank = 0
    device = torch.device("cpu")
    device_module = torch.cuda

    def __init__(self, group: Any, defaults: set[str], *, rank: int = 0, size: int = 1) -> None:
        self._defaults = defaults
        self.cpu_group = self.device_group = group
        self.rank = self.rank_in_group = rank
        self.world_size, self.ranks, self.last_rank = size, tuple(range(size)), size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1

    def all_reduce(self, value: Any, *_: Any, **__: Any) -> Any:
        return value

    all_gather = broadcast_object = all_reduce

    def barrier(self, *_: Any, **__: Any) -> None:
        """One rank waits for no other."""

    def graph_capture(self, *args: Any, **kwargs: Any) -> Any:
        """SGLang's own context for captures on a stream."""
        coordinator = import_module("sglang.srt.distributed.parallel_state").GroupCoordinator
        return coordinator.graph_capture(self, *args, **kwargs)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        self._defaults.add(f"group.{name}")

"""``torch.autocast`` on the virtual GPU: CUDA's casts, each of which is an operator like others.

Torch's own kernels of autocast cast tensors of torch's own devices only. Here the same operators get kernels in Python
that cast the virtual GPU's tensors by the same rules. Which operators have which rule is read from a header that torch
installs for other devices. Operators that it lacks are not cast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, Final
from weakref import ref

import torch

from ..vgpu.device import device
from ..vgpu.executor import tensors_in
from ..vgpu.tensor import DeviceTensor

_HEADER: Final = "include/ATen/autocast_mode.h"
_KEY: Final = "AutocastPrivateUse1"
_KEYS: Final = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
_WITH_DTYPE: Final = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}

Operator = Callable[..., Any]


def rules() -> Iterator[tuple[str, str]]:
    """(name of an operator's overload, its rule). Raises RuntimeError where torch's header is not installed."""
    try:
        text = (Path(torch.__file__).parent / _HEADER).read_text(encoding="utf-8")
    except OSError as error:
        raise RuntimeError(f"torch.autocast needs torch's file {_HEADER}: {error.strerror}") from None
    for rule in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"):
        macro = re.search(rf"#define AT_FORALL_{rule}\(_\)(.*?)\n\n", text, re.DOTALL)
        assert macro is not None, f"torch's list of operators has another form: {rule}"
        for name, overload in re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", macro[1]):
            yield f"{name}.{overload}" if overload else name, rule
    for name in _WITH_DTYPE:
        yield name, "FP32_APPEND_DTYPE"
    yield "binary_cross_entropy", "BANNED"


# The casts of parameters by the parameter's id, which are kept until the outermost autocast ends.
_KEPT: Final[dict[int, tuple[ref[torch.Tensor], torch.Tensor]]] = {}


def _kernel(func: torch._ops.OpOverload, rule: str) -> Operator:
    """The operator with its arguments cast by the rule."""
    names = [argument.name for argument in func._schema.arguments]

    def cast(*args: Any, **named: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            if rule == "FP32_SET_OPT_DTYPE":
                return _set_dtype(func, names, args, named)
            if rule == "FP32_APPEND_DTYPE":
                return _append_dtype(func, args, named)
            if rule == "BANNED":
                raise RuntimeError(
                    f"{func.overloadpacket.__name__} is unsafe under autocast, since its gradient may not fit: "
                    "use binary_cross_entropy_with_logits"
                )
            dtype = torch.float32
            if rule != "FP32":
                dtype = _lower() if rule == "LOWER_PRECISION_FP" else _widest((*args, *named.values()))
            return func(*_cast(args, dtype), **{name: _cast(arg, dtype) for name, arg in named.items()})

    return cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(part, dtype) for part in value]
    if not _is_eligible(value) or value.dtype == dtype:
        return value
    lasts = value.requires_grad and value.is_leaf and not value._is_view()
    keeps = lasts and dtype == _lower() and value.dtype == torch.float32
    if not (keeps and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    known, made = _KEPT.get(id(value), (None, None))
    if known is None or known() is not value:
        made = value.to(dtype)
        _KEPT[id(value)] = ref(value), made
    return made


def _is_eligible(value: Any) -> bool:
    return type(value) is DeviceTensor and value.is_floating_point() and value.dtype != torch.float64


def _lower() -> torch.dtype:
    return torch.get_autocast_dtype(device().type)


def _widest(values: Sequence[Any]) -> torch.dtype:
    """float32 if any of the tensors has it, else the lower precision. Raises RuntimeError for a third type."""
    found = {tensor.dtype for tensor in tensors_in(values) if _is_eligible(tensor)}
    if torch.float32 in found:
        return torch.float32
    if found - {_lower()}:
        raise RuntimeError(f"autocast to {_lower()} does not expect arguments of {found - {_lower()}}")
    return _lower()


def _set_dtype(func: Operator, names: Sequence[str], args: Sequence[Any], named: dict[str, Any]) -> Any:
    """The result as float32 unless the call has a dtype."""
    given = {**dict(zip(names, args, strict=False)), **named}
    if _is_eligible(given["self"]) and given.get("dtype") is None:
        given["dtype"] = torch.float32
    return func(**given)


def _append_dtype(func: torch._ops.OpOverload, args: Sequence[Any], named: dict[str, Any]) -> Any:
    """The overload that has a dtype, with float32 for it."""
    other = getattr(func.overloadpacket, _WITH_DTYPE[f"norm.{func._overloadname}"])
    if func._overloadname == "Scalar" and len(args) == 1 and not named:
        args = (*args, 2)
    return other(*args, **named, dtype=torch.float32 if _is_eligible(args[0]) else args[0].dtype)


@cache
def registered() -> object:
    """Give the process the kernels, once."""
    library: Any = torch.library.Library("aten", "IMPL")
    for name, rule in rules():
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _kernel(func, rule), _KEY)
    others: Any = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    return library, others


def autocast_patches() -> Iterator[tuple[Any, str, Any]]:
    """Of ``torch.autocast``: the device ``cuda`` is the virtual GPU, and autocast is enabled for both names."""
    autocast: Any = torch.autocast
    make, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__
    clear: Any = torch.clear_autocast_cache

    @wraps(make)
    def init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        if device_type == "cuda":
            registered()
            device_type, dtype = device().type, dtype or torch.get_autocast_dtype("cuda")
        make(self, device_type, dtype, enabled, cache_enabled)

    def entered(self: Any) -> Any:
        self._outer_cuda = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        found = enter(self)
        if self.device == device().type:
            torch.set_autocast_enabled("cuda", self._enabled)
            torch.set_autocast_dtype("cuda", self.fast_dtype)
        return found

    def left(self: Any, *raised: Any) -> Any:
        enabled, dtype = self._outer_cuda
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)
        return leave(self, *raised)

    def cleared() -> None:  # called, too, when the outermost autocast ends
        _KEPT.clear()
        clear()

    yield autocast, "__init__", init
    yield autocast, "__enter__", entered
    yield autocast, "__exit__", left
    yield torch, "clear_autocast_cache", cleared

"""Values as JSON, read by a type that both ends declare.

Reading constructs objects of the declared types and of no other, and runs no code that a message names.
"""

from __future__ import annotations

import binascii
import json
import types
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Final, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import BaseModel, ValidationError

Reader = Callable[[Any], Any]
T = TypeVar("T")


class _Array(Generic[T]):
    """Stands for ``array``, which takes no parameters before Python 3.12."""


_NAMES: Final = {"torch": torch, "array": _Array}  # of types, where a module has them only for type checkers


class MalformedMessageError(ValueError):
    """Bytes that are no value of the declared type. The message says which part is not."""


def encode(value: object) -> bytes:
    """Raises TypeError for a value that no declared type can read."""
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def parse(content: bytes) -> Any:
    """The JSON of a value, for ``reader``. Raises MalformedMessageError."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise MalformedMessageError("not JSON") from None


@cache
def reader(hint: Any) -> Reader:
    """Returns a function that makes a value of the type ``hint`` from JSON, or raises MalformedMessageError.

    Where the type is Any, only None can be read.
    """
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in _SCALARS:
        return _SCALARS[origin]
    if origin in (Union, types.UnionType):
        return _one_of([reader(arg) for arg in args])
    if origin is Literal:
        return _checked(lambda plain: plain in args, f"one of {', '.join(map(repr, args))}")
    if origin is tuple and args[1:] != (...,):
        return _fixed([reader(arg) for arg in args])
    if origin in (tuple, list, Sequence):
        return _sequence(list if origin is list else tuple, reader(args[0]))
    if origin in (dict, Mapping, Counter):
        return _mapping(origin, reader(args[0]), reader(int if origin is Counter else args[1]))
    if issubclass(origin, Enum | BaseModel):
        return _converted(getattr(origin, "model_validate", origin), origin.__name__)
    return _record(origin)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind: Any = type(value)
    if (pack := _PACKERS.get(kind)) is not None:
        return pack(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if names := _fields(kind):
        return {kind.__name__: [_plain(getattr(value, name)) for name in names]}
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(entry)] for key, entry in value.items()]
    if isinstance(value, Sequence):
        return [_plain(entry) for entry in value]
    raise TypeError(f"a message cannot hold {kind.__name__}")


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    """The names of a NamedTuple's or a dataclass's fields, in the order of its constructor; none of another type."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return getattr(kind, "_fields", ())


def _record(kind: type) -> Reader:
    names = _fields(kind)
    assert names, f"{kind} cannot be read from a message"
    hints = get_type_hints(kind, localns=_NAMES)
    readers = [reader(hints[name]) for name in names]

    def read(plain: Any) -> Any:
        entries = plain.get(kind.__name__) if isinstance(plain, dict) and len(plain) == 1 else None
        if not isinstance(entries, list) or len(entries) != len(readers):
            raise _mismatch(kind.__name__, plain)
        return kind(*_each(f"{kind.__name__}.", names, readers, entries))

    return read


def _each(
    prefix: str, names: Sequence[str], readers: Sequence[Reader], entries: Sequence[Any]
) -> Iterator[Any]:
    for name, read, entry in zip(names, readers, entries, strict=True):
        try:
            yield read(entry)
        except MalformedMessageError as error:
            raise MalformedMessageError(f"{prefix}{name}: {error}") from None


def _fixed(readers: Sequence[Reader]) -> Reader:
    def read(plain: Any) -> tuple[Any, ...]:
        if not isinstance(plain, list) or len(plain) != len(readers):
            raise _mismatch(f"{len(readers)} entries", plain)
        return tuple(part(entry) for part, entry in zip(readers, plain, strict=True))

    return read


def _sequence(kind: Callable[[Iterator[Any]], Any], each: Reader) -> Reader:
    def read(plain: Any) -> Any:
        if not isinstance(plain, list):
            raise _mismatch("a list", plain)
        return kind(map(each, plain))

    return read


def _mapping(kind: Any, key: Reader, value: Reader) -> Reader:
    pairs = _sequence(dict, _fixed([key, value]))
    return pairs if kind is Mapping else lambda plain: kind(pairs(plain))


def _one_of(readers: Sequence[Reader]) -> Reader:
    def read(plain: Any) -> Any:
        problems = []
        for each in readers:
            try:
                return each(plain)
            except MalformedMessageError as error:
                problems.append(str(error))
        raise MalformedMessageError(", or ".join(problems))

    return read


def _checked(accepts: Callable[[Any], bool], expected: str) -> Reader:
    def read(plain: Any) -> Any:
        if not accepts(plain):
            raise _mismatch(expected, plain)
        return plain

    return read


def _converted(convert: Callable[[Any], Any], expected: str) -> Reader:
    def read(plain: Any) -> Any:
        try:
            return convert(plain)
        except (ValidationError, ValueError, TypeError, RuntimeError):
            raise _mismatch(expected, plain) from None

    return read


def _mismatch(expected: str, plain: Any) -> MalformedMessageError:
    got = next(iter(plain), "{}") if isinstance(plain, dict) and len(plain) == 1 else type(plain).__name__
    return MalformedMessageError(f"expected {expected}, got {got[:40]!a}")


def _unpacked_bytes(plain: Any) -> bytes:
    return binascii.a2b_base64(plain, strict_mode=True)


def _packed_tensor(tensor: torch.Tensor) -> Any:
    """Of the host's memory."""
    body = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return [_plain(tensor.dtype), [*tensor.shape], _packed_bytes(body)]


def _unpacked_tensor(plain: Any) -> torch.Tensor:
    name, sizes, packed = plain
    dtype, body = _dtype(name), bytearray(_unpacked_bytes(packed))
    flat = torch.frombuffer(body, dtype=dtype) if body else torch.empty(0, dtype=dtype)
    return flat.view(sizes)


def _dtype(plain: Any) -> torch.dtype:
    found = getattr(torch, plain, None)
    if not isinstance(found, torch.dtype):
        raise TypeError
    return found


def _packed_bytes(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode()


def _packed_array(value: array[int]) -> str:
    if value.typecode != "q":
        raise TypeError(f"a message cannot hold an array of {value.typecode}")
    return _packed_bytes(value.tobytes())


_PACKERS: Final[Mapping[type, Callable[[Any], Any]]] = {
    bytes: _packed_bytes,
    array: _packed_array,
    torch.Tensor: _packed_tensor,
    torch.dtype: lambda dtype: str(dtype).removeprefix("torch."),
}
_SCALARS: Final[Mapping[Any, Reader]] = {
    **dict.fromkeys((None, type(None), Any), _checked(lambda plain: plain is None, "nothing")),
    bool: _checked(lambda plain: type(plain) is bool, "true or false"),
    int: _checked(lambda plain: type(plain) is int, "a whole number"),
    float: _checked(lambda plain: type(plain) in (int, float), "a number"),
    str: _checked(lambda plain: type(plain) is str, "a text"),
    bytes: _converted(_unpacked_bytes, "bytes"),
    _Array: _converted(lambda plain: array("q", _unpacked_bytes(plain)), "whole numbers of 8 bytes"),
    torch.Tensor: _converted(_unpacked_tensor, "a tensor"),
    torch.dtype: _converted(_dtype, "a type of numbers"),
}

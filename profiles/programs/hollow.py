"""Hollow packages: what a program imports and never needs on a virtual GPU, where it is not installed.

What a hollow package gives can be called, used as a decorator, subclassed, named in an ``except`` clause or as a type,
and iterated as empty; it is never true. A function of it that is called with a tensor of the virtual GPU would launch a
kernel, whose effect is unknown: the call raises HollowKernelError.
"""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, Final, NoReturn

import torch

from ..vgpu.device import CURRENT
from ..vgpu.executor import tensors_in
from ..vgpu.patching import attributes_set
from ..vgpu.tensor import DeviceTensor
from .patches import patched_on_import

VERSION: Final = "9999.0.0"
_EXCEPTIONS: Final = ("Error", "Exception", "Warning")
# Without which transformers replaces classes that programs register their own with as they are imported.
_ASSUMED: Final = frozenset({"torchvision"})
_TRANSFORMERS: Final = "transformers.utils.import_utils"


class HollowKernelError(RuntimeError):
    """A kernel of a package that is not installed would be launched."""


class HollowPackages(MetaPathFinder, Loader):
    """Finds the modules and the versions of hollow packages. ``names`` are the packages, and ``imported`` the modules
    of theirs that were imported.

    Of their functions and ops, ``used`` has those that were called or described without doing anything, and ``refused``
    those whose calls would have launched kernels. ``used_in`` has those that were called without doing anything while a
    virtual GPU was open, by the step in which they were.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.imported: set[str] = set()
        self.used: set[str] = set()
        self.refused: set[str] = set()
        self.used_in: defaultdict[int, set[str]] = defaultdict(set)

    def __contains__(self, name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in self.names)

    def notes(self) -> list[str]:
        """The notes of a result about the hollow packages that the program imported."""
        said = {
            "is not installed and was hollow": self.names & self.imported,
            "was called without the virtual GPU's tensors and did nothing": self.used,
            "would have launched a kernel and was refused": self.refused,
        }
        return [f"{name} {what}" for what, names in said.items() for name in sorted(names)]

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of calling the hollow object of that name. Raises HollowKernelError."""
        if any(type(tensor) is DeviceTensor for tensor in tensors_in([args, kwargs])):
            self.refused.add(name)
            package = name.removeprefix("torch.ops.").partition(".")[0]
            raise HollowKernelError(
                f"{name} was called with a tensor of the virtual GPU, but {package} is not installed: "
                "what the call launches is unknown"
            )
        self.used.add(name)
        if (gpu := CURRENT.get(None)) is not None:
            _, step, _ = gpu.runtime.context
            self.used_in[step].add(name)
        if len(args) == 1 and isinstance(args[0], (types.FunctionType, type)):
            return args[0]  # as a decorator
        return HollowObject(self, f"{name}()")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        return ModuleSpec(name, self, is_package=True) if name in self else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return HollowModule(self, spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        self.imported.add(module.__name__)

    def find_distributions(
        self, context: metadata.DistributionFinder.Context
    ) -> Iterator[metadata.Distribution]:
        """The version of a hollow package that is queried by name; no list of what is installed has it."""
        name = (context.name or "").replace("-", "_")
        if name in self:
            yield _HollowDistribution(name)


class HollowObject:
    """A function, class or value of a hollow package."""

    def __init__(self, packages: HollowPackages, name: str) -> None:
        self._hollow_packages = packages
        self._hollow_name = name
        self.__name__ = self.__qualname__ = name.rpartition(".")[2]
        self.__module__ = name.rpartition(".")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._hollow_packages.call(self._hollow_name, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_hollow")):  # the latter on a copy that is not initialised yet
            raise AttributeError(f"a hollow object has no attribute {name}")
        made = HollowObject(self._hollow_packages, f"{self._hollow_name}.{name}")
        setattr(self, name, made)
        return made

    def __mro_entries__(self, bases: Sequence[Any]) -> tuple[type, ...]:
        """A base class of its own only where there is no other, whose methods it would hide."""
        hollow = [base for base in bases if isinstance(base, HollowObject)]
        return (HollowBase,) if len(hollow) == len(bases) and hollow[0] is self else ()

    def __get_pydantic_core_schema__(self, *_: Any) -> Any:
        return import_module("pydantic_core.core_schema").any_schema()

    __enter__ = __getitem__ = __deepcopy__ = lambda self, *_: self
    __bool__ = __instancecheck__ = __subclasscheck__ = lambda *_: False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, other: Any) -> Any:
        """In a type, ``hollow | other``."""
        return other

    __ror__ = __or__

    def __exit__(self, *raised: object) -> None:
        pass

    def __repr__(self) -> str:
        return f"<hollow {self._hollow_name}>"


class HollowBase:
    """The base of classes that a program derives from a class of a hollow package."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    __get_pydantic_core_schema__ = HollowObject.__get_pydantic_core_schema__


class HollowModule(types.ModuleType):
    """A module of a hollow package."""

    def __init__(self, packages: HollowPackages, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = VERSION
        self._hollow_packages = packages

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__} has no attribute {name}")
        full = f"{self.__name__}.{name}"
        made: Any = HollowObject(self._hollow_packages, full)
        if name.endswith(_EXCEPTIONS):  # an except clause takes nothing but a class of exceptions
            made = type(name, (Exception,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _HollowDistribution(metadata.Distribution):
    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        return f"Name: {self._name}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> NoReturn:
        raise FileNotFoundError(f"{self._name} is hollow and has no file {path}")


@contextmanager
def hollow_packages(names: Iterable[str]) -> Iterator[HollowPackages]:
    """Make those of the packages hollow that cannot be imported, until the block ends."""
    packages = HollowPackages([name for name in names if not _is_importable(name)])

    def optional(listed: Any) -> Iterator[tuple[Any, str, Any]]:
        known = listed._is_package_available

        @wraps(known)
        def is_really_available(name: str, *args: Any, **kwargs: Any) -> Any:
            absent = name in packages and name not in _ASSUMED
            return known("no such package" if absent else name, *args, **kwargs)

        yield listed, "_is_package_available", is_really_available

    sys.meta_path.insert(0, packages)
    try:
        with attributes_set(_torch_ops(packages)), patched_on_import(_TRANSFORMERS, optional):
            yield packages
    finally:
        sys.meta_path.remove(packages)
        for name in packages.imported:
            sys.modules.pop(name, None)


def _is_importable(name: str) -> bool:
    """A package may be installed and unable to be imported, because a library of CUDA is missing. A module with a
    dotted name is a compiled part of the program, which is assumed to need one: trying it would import the program."""
    if "." in name:
        return False
    try:
        import_module(name)
    except Exception:  # any error of the package's own
        for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            del sys.modules[module]
        return False
    return True


def _torch_ops(packages: HollowPackages) -> Iterator[tuple[Any, str, Any]]:
    """``torch.ops.package.op`` of hollow packages, and shapes that are registered for such ops."""
    namespace: Any = type(torch.ops.aten)
    known, register = namespace.__getattr__, torch.library.register_fake

    @wraps(known)
    def op(ops: Any, name: str) -> Any:
        try:
            return known(ops, name)
        except AttributeError:
            if ops.name not in packages or name.startswith("__"):
                raise
            return HollowObject(packages, f"torch.ops.{ops.name}.{name}")

    @wraps(register)
    def register_fake(op: Any, func: Any = None, /, **kwargs: Any) -> Any:
        name = op._hollow_name if isinstance(op, HollowObject) else op if isinstance(op, str) else ""
        if name.removeprefix("torch.ops.").replace("::", ".") not in packages:
            return register(op, func, **kwargs)
        packages.used.add(f"torch.library.register_fake({name})")
        return func if func is not None else lambda function: function

    yield namespace, "__getattr__", op
    yield torch.library, "register_fake", register_fake

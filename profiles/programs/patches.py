"""Patches of modules that the program may or may not import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from ..vgpu.patching import attributes_set

# The (owner, name, value) of each attribute to be set, given the module.
Patches = Callable[[Any], Iterable[tuple[Any, str, Any]]]


@contextmanager
def patched_on_import(name: str, patches: Patches) -> Iterator[None]:
    """Set attributes as soon as the module ``name`` is imported, until the block ends."""
    with ExitStack() as undo:
        if name in sys.modules:
            undo.enter_context(attributes_set(patches(sys.modules[name])))
        finder = ImportWatch(name, lambda module: undo.enter_context(attributes_set(patches(module))))
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
        yield


class ImportWatch(MetaPathFinder, Loader):
    """Calls ``imported`` with the module ``name`` after its import."""

    def __init__(self, name: str, imported: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._imported = imported

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        spec = PathFinder.find_spec(name, path) if name == self._name else None
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._imported(module)

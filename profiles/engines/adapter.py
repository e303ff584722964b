"""What an adapter defines, so that an engine's own scheduler can be run on the virtual GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol

from ...scenarios.combinations import MODES
from ...scenarios.schema import Scenario
from ..platform.user_files import imported
from ..run.system import System, SystemParts
from .names import EngineError, require_shipped


class EngineAdapter(Protocol):
    """Created in the engine's process before anything of the engine is imported. An adapter fits itself to the engine
    by inspection, and has no table of versions."""

    package: str  # what is imported
    python_path: str  # the folder of a checkout that holds the package
    environment: Mapping[str, str]  # variables that are set before anything is imported
    hollow: Sequence[str]  # packages that may be absent, and that no run depends on
    requires: Mapping[str, str]  # modules that cannot be absent, and what pip installs each by

    # These may be left out. ``needs``: what a scenario's modes that the engine cannot run would need, with the engine's
    # function in the way; asked before the import. ``stages``: ``open`` makes the scheduler of one stage of a
    # pipeline, too. ``transfers``: it makes one worker of a pair, and KV travels between them. ``own_runner``: the
    # engine's own model runner can prepare the forwards. ``stub_runner``: a stub does, unless the own one is asked for;
    # by mode, the text says which waits and references of the engine cannot be checked with the stub.

    def load(self) -> None:
        """Import all that a run needs of the engine."""

    def open(self, parts: SystemParts) -> System:
        """The engine's scheduler on the virtual GPU, which is open. Raises EngineError for what it cannot run."""


_DEFINED: Final = "ADAPTER"  # the name of an adapter in its module
_FACTS: Final = ("package", "python_path", "environment", "hollow", "requires", "load", "open")

# Modes that engines of a few thousand lines lack, and what each would need.
NOT_IN_SMALL_ENGINES: Final[Mapping[str, str]] = {
    "speculation": "speculative decoding, which it does not have",
    "pipeline": "pipeline stages, which it does not have",
    "hisparse": "sparse attention, which it does not have",
    "data-parallel ranks": "data-parallel attention, which it does not have",
    "disaggregation": "workers of their own for prompts, which it does not have",
    "replicas": "a router, which it does not have",
    "split prefill": "prompts in parts beside decodes, which it does not have",
    "controls": "messages to pause and to flush, which it does not have",
    "deferred": "a loop with deferred results, which it does not have",
    "embedding": "embeddings of prompts, which it does not have",
    "encoder-decoder": "encoders, which it does not have",
    "block diffusion": "block diffusion, which it does not have",
    "hidden states": "hidden states in results, which it does not have",
    "prompt logprobs": "log probabilities, which it does not have",
    "grammar": "grammars, which it does not have",
}


def find_adapter(name: str) -> EngineAdapter:
    """The shipped adapter of that name, or the one that a file of the user's defines. Imports nothing of the engine.
    Raises EngineError."""
    if not name.endswith(".py"):
        return adapter_named(name)
    file = Path(name).expanduser().resolve()
    try:
        module = imported(file, "an adapter")
    except ImportError as error:
        raise EngineError(str(error)) from error
    if not hasattr(module, _DEFINED):
        raise EngineError(f"{file}: defines no {_DEFINED}")
    adapter: EngineAdapter = getattr(module, _DEFINED)
    if missing := [fact for fact in _FACTS if not hasattr(adapter, fact)]:
        raise EngineError(f"{name}: {_DEFINED} has no {', no '.join(missing)}")
    return adapter


def adapter_named(name: str) -> EngineAdapter:
    """Raises EngineNameError."""
    require_shipped(name)
    module = import_module(f".{name.replace('-', '_')}", __package__)
    adapter: EngineAdapter = getattr(module, _DEFINED)
    return adapter


def needed(
    scenario: Scenario, refused: Mapping[str, str], *, mode: str = "{}", pages: tuple[int, str] | None = None
) -> list[str]:
    """What modes of the scenario need that an engine refuses; ``no`` before a mode's name is the mode where it is off.
    ``mode`` is the text for a mode's name. ``pages``: the tokens of which pages have to be a multiple, and the function
    that says so."""
    found = [f"{mode.format(name)} needs {what}" for name, what in refused.items() if _is_on(name, scenario)]
    if pages is not None and scenario.engine.page_size % pages[0]:
        size, function = pages
        found.append(f"pages need a multiple of {size} tokens ({function}): engine.page_size={size}")
    return found


def _is_on(name: str, scenario: Scenario) -> bool:
    mode = name.removeprefix("no ")
    return MODES[mode].on(scenario) == (mode == name)

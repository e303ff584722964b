"""What a scenario names outside itself: model, hardware, relays, grammar. All problems are reported at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from ...scenarios.loader import PartialScenarioError, load
from ...scenarios.problems import KeyPath, Problem, ScenarioError, touches, unknown
from ...scenarios.schema import AcceptanceSection, HiSparse, RelaySection, Scenario, Speculative
from ...scenarios.traces import token_count, tokenizer_file
from ...scenarios.workload import params
from ...sched.config import SimulatedAcceptance, SpeculativeConfig
from ...sched.data_parallel.mlp import most_ranks
from ...sched.hisparse.pools import LONGEST
from ...sched.model import checkpoint
from ...sched.model.config import PRESETS, ModelConfig
from ...sched.model.draft import read_draft_config
from ...sched.model.grammar import GrammarCache, GrammarError
from ...sched.relay.choice import RelayChoice, RelayError, choose, named, refusals
from ...sched.relay.states import State
from ..record.definitions import DEFINITIONS
from .engine_choice import EngineChoice
from .hardware import HardwareError, HardwareProfile
from .hardware import load as hardware_profile
from .names import word, wrong_settings
from .user_files import UserState, user_state

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Resolved:
    """``engine`` runs the scenario; None for our own scheduler, which ``relays`` are of."""

    scenario: Scenario
    model: ModelConfig
    draft: ModelConfig | None  # of a scenario that speculates
    hardware: HardwareProfile
    relays: tuple[RelayChoice, ...]
    engine: EngineChoice | None = None

    @property
    def checkpoint(self) -> Path | None:
        """The directory that the weights come from; None for a preset."""
        path = self.scenario.model.path
        return None if path is None else self.scenario.source.locate(("model", "path"), path)

    @property
    def draft_checkpoint(self) -> Path | None:
        """The directory that the draft's weights come from; None for one made of the target's first layer."""
        path = self.scenario.engine.speculative.draft
        key = ("engine", "speculative", "draft")
        return None if path is None else self.scenario.source.locate(key, path)


def ask(name: str, overrides: Sequence[str] = ()) -> Resolved:
    """The scenario of that name or file, resolved. Raises ScenarioError with everything that is wrong with it."""
    try:
        scenario = load(name, overrides)
    except PartialScenarioError as error:
        problems = list(error.problems)
        try:
            resolve(error.rest)  # what else is wrong, without the broken keys
        except ScenarioError as others:
            problems += [problem for problem in others.problems if not touches(problem, error.problems)]
        raise ScenarioError(problems) from None
    return resolve(scenario)


def resolve(scenario: Scenario) -> Resolved:
    """Find everything that the scenario names. Raises ScenarioError with every name that was not found."""
    problems: list[Problem] = []

    def attempt(path: KeyPath, find: Callable[[], T]) -> T | None:
        try:
            return find()
        except (HardwareError, GrammarError, checkpoint.CheckpointError, LookupError) as error:
            problems.append(scenario.source.problem(path, str(error.args[0])))
        return None

    # The key that names the model; the section when none does.
    named_by = [key for key in ("preset", "path") if getattr(scenario.model, key) is not None]
    model = attempt(("model", *named_by), lambda: _model(scenario))
    draft = attempt(("engine", "speculative", "draft"), lambda: model and _draft(scenario, model))
    problems += [scenario.source.problem(*found) for found in _rank_findings(scenario, model)]
    hardware = attempt(("device", "hardware"), lambda: hardware_profile(scenario.device.hardware))
    misnamed = (
        *_misnamed(scenario),
        *_hisparse_findings(scenario, model, hardware),
        *_other_findings(scenario, model, hardware),
    )
    problems += [scenario.source.problem(*found) for found in misnamed]
    attempt(("workload", "trace"), lambda: _trace(scenario))
    attempt(("model", "path"), lambda: token_count(tokenizer_file(scenario)))
    vocabulary = model or PRESETS["tiny-llama"]  # a broken pattern is broken in any vocabulary
    attempt(("workload", "sampling", "grammar"), lambda: _grammar(scenario, vocabulary))
    if problems:
        raise ScenarioError(problems)
    assert model is not None and hardware is not None
    relays = tuple(_relay(scenario, relay) for relay in scenario.relays)
    return Resolved(scenario, model, draft, hardware, relays)


def _model(scenario: Scenario) -> ModelConfig:
    wanted = scenario.model
    if wanted.preset is None:
        if wanted.path is None:
            raise LookupError("required, but not given")
        found = checkpoint.read_config(scenario.source.locate(("model", "path"), wanted.path))
    elif wanted.preset in PRESETS:
        found = PRESETS[wanted.preset]
    else:
        raise LookupError(unknown("preset", wanted.preset, sorted(PRESETS)))
    if wanted.deeper_scale is not None:
        found = replace(found, deeper_scale=wanted.deeper_scale)
    return found if wanted.dtype == "auto" else replace(found, dtype_name=wanted.dtype)


def _draft(scenario: Scenario, model: ModelConfig) -> ModelConfig | None:
    spec = scenario.engine.speculative
    if spec.algorithm == "none":
        return None
    if spec.draft is None:
        return replace(model, num_layers=1)
    return read_draft_config(scenario.source.locate(("engine", "speculative", "draft"), spec.draft), model)


def _rank_findings(scenario: Scenario, model: ModelConfig | None) -> Iterator[tuple[KeyPath, str]]:
    """More ranks than can share the model: the key to blame, and why."""
    if model is None:
        return
    stages, wanted, most = scenario.engine.pipeline.stages, scenario.engine.data_parallel, most_ranks(model)
    if stages > model.num_layers:
        key = ("engine", "pipeline", "stages")
        yield key, f"expected at most the model's {model.num_layers} layers, got {stages}"
    if wanted.mlp == "shared" and wanted.ranks > most:
        key = ("engine", "data_parallel", "ranks")
        yield key, f"expected at most {most}, which share the columns of {model.name}, got {wanted.ranks}"


def _misnamed(scenario: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Relay states, switches and settings that do not exist: the key to blame, and what is wrong."""
    at = ("engine", "relays" if scenario.engine.relays else "relay")
    for relay in scenario.relays:
        state = None
        try:
            state = _state(scenario, relay)
        except RelayError as error:
            yield at, str(error)
        wrong = wrong_settings(relay)
        for switch, value in relay.switches.items():
            shown = state if isinstance(state, UserState) else relay.state
            found = [wrong[switch]] if switch in wrong else refusals(shown, {switch: word(value)})
            yield from (((*at, switch), why) for why in found)


def _state(scenario: Scenario, relay: RelaySection) -> State | None:
    """The state of the ladder, or that of a file of the user's. Raises RelayError for such a file."""
    if relay.own is None:
        return named(relay.state)
    file, name = relay.own
    return user_state(scenario.source.locate(("engine", "relay"), file), name)


def _relay(scenario: Scenario, relay: RelaySection) -> RelayChoice:
    return choose(
        _state(scenario, relay) or relay.state, {name: word(value) for name, value in relay.switches.items()}
    )


def _trace(scenario: Scenario) -> None:
    trace = scenario.workload.trace
    if trace is not None:
        path = scenario.source.locate(("workload", "trace"), trace)
        try:
            path.stat()
        except (OSError, ValueError) as error:
            raise LookupError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _grammar(scenario: Scenario, model: ModelConfig) -> None:
    sampling = scenario.workload.sampling
    spec = params(sampling, max_new_tokens=1).grammar
    if spec is not None:
        GrammarCache(model.vocab_size, model.eos_token_ids).start(spec)


def _hisparse_findings(
    scenario: Scenario, model: ModelConfig | None, hardware: HardwareProfile | None
) -> Iterator[tuple[KeyPath, str]]:
    """Requirements of KV on the host on model, hardware and page size: the key to blame, and why. A model or hardware
    that was not found is not checked."""
    wanted = scenario.engine.hisparse
    if not wanted.enabled:
        return
    if hardware is not None:
        needed = ("pinned_memory", "side_streams", "events")
        missing = [name.replace("_", " ") for name in needed if not getattr(hardware.available, name)]
        if missing:
            yield ("engine", "hisparse", "enabled"), f"{hardware.name} has no {', no '.join(missing)}"
    if model is not None and model.indexer is None:
        yield (
            ("engine", "hisparse", "enabled"),
            f"{model.name} attends to all tokens: it chooses none to be fetched from the host",
        )
    elif model is not None and model.indexer is not None:
        yield from _buffer_sizes(wanted, model.indexer.top_k, scenario.engine.page_size)


def _other_findings(
    scenario: Scenario, model: ModelConfig | None, hardware: HardwareProfile | None
) -> Iterator[tuple[KeyPath, str]]:
    """A case's metric that does not exist. An encoder-decoder needs tokens of an encoder, and no other model has a use
    for them. Divisions of split prefill that the hardware cannot hold."""
    case, given = scenario.case, scenario.workload.encoder_tokens is not None
    if case is not None and case.metric not in DEFINITIONS:
        yield ("case", "metric"), unknown("metric", case.metric, list(DEFINITIONS))
    if model is not None and given != bool(model.cross_layers):
        has = f"{model.name} has no encoder" if given else f"required by {model.name}, which has an encoder"
        yield ("workload", "encoder_tokens"), has
    for place, division in enumerate(scenario.engine.split_prefill.divisions):
        if hardware is not None and division.prefill + division.decode > hardware.gpu.multiprocessors:
            key = ("engine", "split_prefill", "divisions", place)
            yield key, f"{hardware.name} has {hardware.gpu.multiprocessors} multiprocessors"


def _buffer_sizes(wanted: HiSparse, top_k: int, page_size: int) -> Iterator[tuple[KeyPath, str]]:
    if wanted.top_k not in ("auto", top_k):
        yield ("engine", "hisparse", "top_k"), f"expected {top_k}, the model's own, got {wanted.top_k}"
    size, key = wanted.buffer_size(top_k), ("engine", "hisparse", "device_buffer_size")
    if size < top_k:
        yield key, f"expected at least the {top_k} tokens that the model attends to, got {size}"
    if size >= LONGEST:
        yield key, f"expected less than {LONGEST}, got {size}"
    if size % page_size:
        yield key, f"expected whole pages of {page_size}, got {size}"


def speculation(scenario: Scenario) -> Literal["v1", "v2"] | None:
    """The speculative worker of a scenario; None without speculation."""
    spec = scenario.engine.speculative
    return None if spec.algorithm == "none" else spec.mode


def speculation_depth(scenario: Scenario) -> int:
    """Draft steps after each token; 0 without speculation."""
    return scenario.engine.speculative.steps if speculation(scenario) else 0


def speculative_config(spec: Speculative) -> SpeculativeConfig | None:
    if spec.algorithm == "none":
        return None
    simulated = None
    if isinstance(spec.acceptance, AcceptanceSection):
        simulated = SimulatedAcceptance(spec.acceptance.mean, spec.acceptance.method, spec.acceptance.per)
    return SpeculativeConfig(
        mode=spec.mode,
        steps=spec.steps,
        topk=spec.topk,
        draft_tokens=spec.draft_tokens or spec.steps + 1,
        acceptance=simulated,
    )

"""What a scenario names outside itself: model, hardware, relays, grammar. All problems are reported at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict, TypeVar

from ...scenarios.combinations import overlaps, staged
from ...scenarios.loader import examine, opened
from ...scenarios.problems import KeyPath, Problem, ScenarioError, touches, unknown
from ...scenarios.schema import AcceptanceSection, HiSparse, RelaySection, Scenario, Speculative
from ...scenarios.traces import token_count, tokenizer_file
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
from .names import misnamed, word
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
    def relay(self) -> RelayChoice:
        """The first one, which a run has: a question with several is asked in a run of each."""
        return self.relays[0]

    def with_relay(self, relay: RelayChoice) -> Resolved:
        """The question of a run with that relay."""
        return replace(self, relays=(relay,))

    @property
    def checkpoint(self) -> Path | None:
        """The directory that the weights come from; None for a preset."""
        return self.scenario.file("model", "path")

    @property
    def draft_checkpoint(self) -> Path | None:
        """The directory that the draft's weights come from; None for one made of the target's first layer."""
        return self.scenario.file("engine", "speculative", "draft")


def ask(name: str, overrides: Sequence[str] = ()) -> Resolved:
    """The scenario of that name or file, resolved. Raises ScenarioError with everything that is wrong with it."""
    return resolve(*examine(*opened(name), overrides))


def resolve(scenario: Scenario, known: Sequence[Problem] = ()) -> Resolved:
    """Find everything that the scenario names. Raises ScenarioError with the ``known`` problems and every name that was
    not found."""
    problems = [*misnamed(scenario)]

    def attempt(path: KeyPath, find: Callable[[], T]) -> T | None:
        try:
            return find()
        except HardwareError:
            return None  # whose name is among the problems
        except (GrammarError, checkpoint.CheckpointError, LookupError) as error:
            problems.append(scenario.source.problem(path, str(error.args[0])))
        return None

    # The key that names the model; the section when none does.
    named_by = [key for key in ("preset", "path") if getattr(scenario.model, key) is not None]
    model = attempt(("model", *named_by), lambda: _model(scenario))
    draft = attempt(("engine", "speculative", "draft"), lambda: model and _draft(scenario, model))
    hardware = attempt(("device", "hardware"), lambda: hardware_profile(scenario.device.hardware))
    findings = (
        *_refused_names(scenario),
        *(() if hardware is None else _hardware_findings(scenario, hardware)),
        *(() if model is None else _model_findings(scenario, model)),
    )
    problems += [scenario.source.problem(*found) for found in findings]
    attempt(("workload", "trace"), lambda: _trace(scenario))
    attempt(("model", "path"), lambda: token_count(tokenizer_file(scenario)))
    vocabulary = model or PRESETS["tiny-llama"]  # a broken pattern is broken in any vocabulary
    attempt(("workload", "sampling", "grammar"), lambda: _grammar(scenario, vocabulary))
    if problems or known:
        raise ScenarioError([*known, *(problem for problem in problems if not touches(problem, known))])
    assert model is not None and hardware is not None
    relays = tuple(_relay(scenario, at, relay) for at, relay in scenario.relays.items())
    return Resolved(scenario, model, draft, hardware, relays)


def _model(scenario: Scenario) -> ModelConfig | None:
    """None for a preset that does not exist, whose name is among the problems."""
    wanted, folder = scenario.model, scenario.file("model", "path")
    if wanted.preset is not None:
        found = PRESETS.get(wanted.preset)
    elif folder is not None:
        found = checkpoint.read_config(folder)
    else:
        raise LookupError("required, but not given")
    if found is not None and wanted.deeper_scale is not None:
        found = replace(found, deeper_scale=wanted.deeper_scale)
    return found if found is None or wanted.dtype == "auto" else replace(found, dtype_name=wanted.dtype)


def _draft(scenario: Scenario, model: ModelConfig) -> ModelConfig | None:
    if speculation(scenario) is None:
        return None
    folder = scenario.file("engine", "speculative", "draft")
    return replace(model, num_layers=1) if folder is None else read_draft_config(folder, model)


def _refused_names(scenario: Scenario) -> Iterator[tuple[KeyPath, str]]:
    """Relay states that do not exist, settings that a state refuses, and a case's metric that does not exist: the key
    to blame, and what is wrong."""
    for at, relay in scenario.relays.items():
        state = None
        try:
            state = _state(scenario, at, relay)
        except RelayError as error:
            yield at, str(error)
        shown = state if isinstance(state, UserState) else relay.state
        for switch, value in relay.switches.items():
            yield from (((*at, switch), why) for why in refusals(shown, {switch: word(value)}))
    if scenario.case is not None and scenario.case.metric not in DEFINITIONS:
        yield ("case", "metric"), unknown("metric", scenario.case.metric, list(DEFINITIONS))


def _state(scenario: Scenario, at: KeyPath, relay: RelaySection) -> State | None:
    """The state of the ladder, or that of a file of the user's. Raises RelayError for such a file."""
    if relay.own is None:
        return named(relay.state)
    file, name = relay.own
    return user_state(scenario.source.locate((*at, "state"), file), name)


def _relay(scenario: Scenario, at: KeyPath, relay: RelaySection) -> RelayChoice:
    switches = {name: word(value) for name, value in relay.switches.items()}
    return choose(_state(scenario, at, relay) or relay.state, switches)


def _trace(scenario: Scenario) -> None:
    path = scenario.file("workload", "trace")
    if path is not None:
        try:
            path.stat()
        except (OSError, ValueError) as error:
            raise LookupError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _grammar(scenario: Scenario, model: ModelConfig) -> None:
    grammar = scenario.workload.sampling.grammar
    if grammar is not None:
        GrammarCache(model.vocab_size, model.eos_token_ids).start(grammar.spec)


def _hardware_findings(scenario: Scenario, hardware: HardwareProfile) -> Iterator[tuple[KeyPath, str]]:
    """What the hardware lacks: the key to blame, and why."""
    needed = ("pinned_memory", "side_streams", "events") if scenario.engine.hisparse.enabled else ()
    missing = [name.replace("_", " ") for name in needed if not getattr(hardware.available, name)]
    if missing:
        yield ("engine", "hisparse", "enabled"), f"{hardware.name} has no {', no '.join(missing)}"
    for place, division in enumerate(scenario.engine.split_prefill.divisions):
        if division.prefill + division.decode > hardware.gpu.multiprocessors:
            key = ("engine", "split_prefill", "divisions", place)
            yield key, f"{hardware.name} has {hardware.gpu.multiprocessors} multiprocessors"


def _model_findings(scenario: Scenario, model: ModelConfig) -> Iterator[tuple[KeyPath, str]]:
    """What does not fit the model: the key to blame, and why. An encoder-decoder needs tokens of an encoder, and no
    other model has a use for them."""
    engine, given = scenario.engine, scenario.workload.encoder_tokens is not None
    stages, parallel, most = engine.pipeline.stages, engine.data_parallel, most_ranks(model)
    if stages > model.num_layers:
        key = ("engine", "pipeline", "stages")
        yield key, f"expected at most the model's {model.num_layers} layers, got {stages}"
    if parallel.mlp == "shared" and parallel.ranks > most:
        key = ("engine", "data_parallel", "ranks")
        yield key, f"expected at most {most}, which share the columns of {model.name}, got {parallel.ranks}"
    if engine.hisparse.enabled and model.indexer is None:
        key = ("engine", "hisparse", "enabled")
        yield key, f"{model.name} attends to all tokens: it chooses none to be fetched from the host"
    elif engine.hisparse.enabled and model.indexer is not None:
        yield from _buffer_sizes(engine.hisparse, model.indexer.top_k, engine.page_size)
    if given != bool(model.cross_layers):
        has = f"{model.name} has no encoder" if given else f"required by {model.name}, which has an encoder"
        yield ("workload", "encoder_tokens"), has


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


class RowMode(TypedDict):
    """What of a scenario decides which row of its relay a run has, as arguments of ``RelayChoice``'s methods."""

    overlap: bool
    speculation: Literal["v1", "v2"] | None
    staged: bool


def row_mode(scenario: Scenario) -> RowMode:
    return RowMode(overlap=overlaps(scenario), speculation=speculation(scenario), staged=staged(scenario))


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

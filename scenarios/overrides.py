"""``--set a.b=c``: one key of a scenario, from the command line. Also ``key=value`` with shortened keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ..sched.relay.names import SWITCH_VALUES
from .diagnosis import sections, walk
from .document import Document, Value, compose
from .problems import OPTION, KeyPath, Problem, ScenarioError, either, meant, nearest, unknown
from .schema import Scenario

# Sections that may be written as a bare name, and the key that the name is the value of.
BARE = {"relay": "state", "speculative": "algorithm"}
_TAGS = ("process", "dist")
_INSTEAD: dict[KeyPath, tuple[str, ...]] = {
    ("model", "preset"): ("path",),
    ("model", "path"): ("preset",),
    ("engine", "relay"): ("relays",),
    ("engine", "relays"): ("relay",),
    ("workload", "trace"): ("prompt_tokens", "output_tokens", "shared_prefix"),
}


def override(document: Document, text: str) -> KeyPath:
    """Put the value of ``text`` into the document, and remove the keys that it excludes. Returns its path. Raises
    ScenarioError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ScenarioError([Problem(OPTION, "", f"expected KEY=VALUE, got {text[:60]!a}")])
    key = expand(key.strip())
    path = split(key)
    try:
        given = compose(value, OPTION)
    except ScenarioError as error:
        raise ScenarioError(problem._replace(path=key) for problem in error.problems) from None
    section = _section(document, path)
    section[str(path[-1])] = given.data
    for other in _replaced(path, section):
        del section[other]
    for known in [known for known in document.places if known[: len(path)] == path]:
        del document.places[known]
    document.places.update({(*path, *rest): OPTION for rest in given.places})
    kept = (problem for problem in document.problems if not f"{problem.path}.".startswith(f"{key}."))
    document.problems = [*kept, *(problem._replace(path=key) for problem in given.problems)]
    return path


def split(key: str) -> KeyPath:
    """``expect.decode.steady.copy`` has the step kind ``decode.steady`` in it, mistyped or not; every other dot
    separates."""
    first, *parts = key.split(".")
    if first == "expect" and len(parts) > 1 and nearest(parts[1], ("steady",)):
        parts[:2] = [".".join(parts[:2])]
    return first, *parts


def as_numbers(values: Sequence[str]) -> list[float]:
    """The values as numbers; empty where one is none."""
    try:
        return [float(value) for value in values]
    except ValueError:
        return []


def expand(key: str) -> str:
    """The full key that a shortened one means: ``overlap`` is ``engine.overlap``. A switch of the relay may be named
    alone.

    The match nearest to the root wins; two at one depth are ambiguous. Raises ScenarioError.
    """
    head, _, rest = key.partition(".")
    if head in Scenario.model_fields:
        return key
    found = [path for path in keys() if path[-1] == head]
    highest = [path for path in found if len(path) == min(map(len, found))]
    if len(highest) == 1:
        return ".".join((*highest[0], rest) if rest else highest[0])
    if not found and key in SWITCH_VALUES:
        return f"engine.relay.{key}"
    if found:
        message = f"ambiguous key, expected {either(['.'.join(path) for path in highest])}"
    else:
        names = sorted({path[-1] for path in keys()})
        message = unknown("key", head, names if meant(head, names) else list(Scenario.model_fields))
    raise ScenarioError([Problem(OPTION, key, message)])


@cache
def keys() -> tuple[tuple[str, ...], ...]:
    """Every key of the schema, sections included, as a path; not those within mappings."""
    return tuple(dict.fromkeys(path for path, *_ in walk(Scenario) if "KIND" not in path))


def _section(document: Document, path: KeyPath) -> dict[str, Value]:
    """The mapping that holds ``path``'s last key, made on the way where it is missing."""
    if not isinstance(document.data, dict):
        document.data = {}
    node: dict[str, Value] = document.data
    for depth, part in enumerate(path[:-1], start=1):
        inner = _opened(node.get(str(part)), part)
        if inner is None:
            above = ".".join(map(str, path[:depth]))
            raise ScenarioError([Problem(OPTION, above, "holds a value, not a section: set it as a whole")])
        document.places.setdefault(path[:depth], OPTION)
        node[str(part)] = inner
        node = inner
    return node


def _opened(value: Value, name: str | int) -> dict[str, Value] | None:
    """``value`` as a section: a bare relay is its state, bare speculation its algorithm; None for any other value."""
    if value is None:
        return {}
    if name in BARE and isinstance(value, str):
        return {BARE[str(name)]: value}
    return value if isinstance(value, dict) else None


def _replaced(path: KeyPath, section: dict[str, Value]) -> list[str]:
    """The keys of the section that exclude the one just set: its alternatives, or keys of another kind."""
    if path[-1] in _TAGS:
        tag = section[str(path[-1])]
        kinds = sections((*path[:-1], tag), Scenario) if isinstance(tag, str) else []
        return [key for key in section if len(kinds) == 1 and key not in kinds[0].model_fields]
    return [key for key in _INSTEAD.get(path, ()) if key in section]

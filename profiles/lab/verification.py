"""Makes and compares three counts of one run: the virtual GPU's prediction, the process's own, and CUPTI's records.

Copies, their bytes and syncs are compared line by line; kernels and copies within the device per step of each kind.
A difference that no entry of ``EXPLANATIONS`` covers is a finding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...sched.observe import RANGES
from ..cuda import machine as cuda_machine
from ..measure.steps import STEADY
from ..platform.machine import MachineError
from ..platform.resolve import Resolved
from ..record.files import write_whole
from ..record.result import Result, read
from ..run.gpu_stages import GpuStage, in_process
from ..run.machines import device_kind
from .single_run import CountedLine, counted_lines, run_stage, set_options

Document = dict[str, Any]
SOURCES: Final = ("predicted", "announced", "recorded")
NOTHING: Final = {"count": 0, "bytes": 0}


@dataclass(frozen=True, slots=True)
class Explanation:
    """A known difference, with its bound: up to ``factor`` times the predicted count plus ``extra`` may be recorded.

    ``what`` is the direction or counter that it is about, which the process itself does not count; ``category`` is that
    of the range, and None is any.
    """

    name: str
    reason: str
    what: str
    category: str | None = None
    factor: float = 1.0
    extra: float = 0.0

    def covers(self, row: Document) -> bool:
        what, category = row["what"].partition(" ")[0], RANGES.get(row["range"], "")
        if what != self.what or self.category not in (None, category):
            return False
        predicted, recorded = row["predicted"]["count"], row["recorded"]["count"]
        return bool(predicted < recorded <= self.factor * predicted + self.extra)


EXPLANATIONS: Final[Sequence[Explanation]] = (
    Explanation(
        "kernels of one op",
        "the virtual GPU counts an op once; on CUDA sampling, split decodes, a draft's candidates and the indexer's "
        "choice are two or three kernels: up to three kernels per predicted one are explained",
        what="kernel",
        factor=3.0,
    ),
    Explanation(
        "copies inside a forward",
        "an op without a kernel of its own is computed by torch's ops, which copy within the device; a fused kernel "
        "makes no copies: up to eight copies per step are explained",
        what="d2d",
        category="forward",
        extra=8.0,
    ),
)


def row_of(
    line: CountedLine, predicted: Document, announced: Document | None, recorded: Document
) -> Document:
    """The counts of each of ``SOURCES``, with their bytes; ``announced`` is None for what the process does not count.
    ``why`` is the name of the first explanation that covers a difference; empty where none does."""
    agrees = predicted == recorded and announced in (None, predicted)
    counts = {"predicted": predicted, "announced": announced, "recorded": recorded}
    row = {**line._asdict(), **counts, "agrees": agrees}
    return {**row, "why": "" if agrees else next((one.name for one in EXPLANATIONS if one.covers(row)), "")}


def verify(predicted: Result, announced: Mapping[str, Any], recorded: Result) -> Document:
    """The document of the comparison: ``agrees`` where every difference is explained. ``steps`` are numbers of steps by
    kind, in the order of ``SOURCES``. ``trouble`` says why the comparison as a whole does not hold, whatever the rows
    are. ``announced`` is a document of ``single_run --counted``."""
    p, r = counted_lines(predicted), counted_lines(recorded)
    a = {
        CountedLine(*(row[name] for name in CountedLine._fields)): {name: row[name] for name in NOTHING}
        for row in announced["rows"]
    }
    rows = [
        row_of(
            line,
            p.get(line, NOTHING),
            # The process itself does not count what happens within the device.
            None if line.what.partition(" ")[0] in ("d2d", "memset") else a.get(line, NOTHING),
            r.get(line, NOTHING),
        )
        for line in sorted({*p, *a, *r})
    ]
    found = [*rows, *_per_step(predicted, recorded)]
    unexplained = [row for row in found if not row["agrees"] and not row["why"]]
    steps, trouble = _steps(predicted, announced, recorded), list(_trouble(predicted, recorded))
    content = {
        "agrees": not (unexplained or _unlike(steps) or trouble),
        "compared": len(found),
        "steps": steps,
        "trouble": trouble,
        "explained": [row for row in found if row["why"]],
        "unexplained": unexplained,
        "rows": found,
    }
    return content | {"conclusion": conclusion(content)}


def _unlike(steps: Mapping[str, Sequence[int]]) -> list[str]:
    """The kinds of which the runs had different numbers of steps."""
    return [kind for kind, counts in steps.items() if len(set(counts)) > 1]


def _per_step(predicted: Result, recorded: Result) -> Iterator[Document]:
    """Means per step of a kind of kernels, and of copies within the device on the forward stream."""
    p, r = _means(predicted), _means(recorded)
    for place in sorted({*p, *r}):
        kind, stream, counter = place
        range_ = "" if counter == "kernel" else "model"
        line = CountedLine(kind, stream, range_, "", "", "", f"{counter} per step")
        means = [{"count": side.get(place, 0.0), "bytes": 0} for side in (p, r)]
        yield row_of(line, means[0], None, means[1])


def _means(result: Result) -> dict[tuple[str, str, str], float]:
    return {
        (kind, stream, counter): round(tally.mean, 6)
        for kind, counts in result.per_step.items()
        if not kind.endswith(STEADY)
        for stream, counters in counts.streams.items()
        for counter, tally in counters.items()
        if counter == "kernel" or (counter == "d2d" and stream == "forward")
    }


def _steps(predicted: Result, announced: Mapping[str, Any], recorded: Result) -> dict[str, list[int]]:
    p, r = (
        {k: c.steps for k, c in one.per_step.items() if not k.endswith(STEADY)}
        for one in (predicted, recorded)
    )
    a = announced["steps"]
    return {kind: [side.get(kind, 0) for side in (p, a, r)] for kind in sorted({*p, *a, *r})}


def _trouble(predicted: Result, recorded: Result) -> Iterator[str]:
    """Why two runs cannot be compared."""
    for name, result in (("predicted", predicted), ("recorded", recorded)):
        if result.run.cancelled:
            yield f"the {name} run was interrupted"
        if not result.per_step:
            passes = result.environment.get("passes")
            why = passes.get("abstained") if isinstance(passes, dict) else None
            yield f"the {name} run counted nothing: {why or 'it had no steps'}"


def conclusion(document: Document) -> str:
    """Return the verdict with the numbers of counts that differ."""
    differ = len(document["unexplained"])
    known = len(document["explained"])
    unlike = ", ".join(_unlike(document["steps"]))
    parts = [
        f"{document['compared']} counts compared",
        f"{differ} differ without a known reason" if differ else "none differs without a known reason",
        f"{known} differ for a known reason",
        *([f"not the same steps: {unlike}"] if unlike else ()),
        *document["trouble"],
    ]
    return f"{'agree' if document['agrees'] else 'DISAGREE'}: {'; '.join(parts)}."


# All requests arrive at once and no token ends one, so that the schedule depends neither on the machine's speed nor on
# its rounding.
ONE_SCHEDULE: Final = ("workload.arrival={process: burst}", "workload.sampling.ignore_eos=true")


class VerificationError(RuntimeError):
    """One of the runs failed."""


def require_cuda(resolved: Resolved) -> None:
    """Raises MachineError if there is no CUDA device, or if the scenario needs more than one."""
    cuda_machine.require_cuda(
        "the prediction has nothing to be compared with; run and check predict without one"
    )
    if resolved.scenario.engine.ranks > 1:
        raise MachineError("the scenario has several ranks: one device is verified")
    device_kind("cuda", resolved.scenario)


def stages(
    scenario: str, overrides: Sequence[str], folder: Path, *, device: str = "cuda", deadline: float = 600.0
) -> list[GpuStage]:
    """The three runs, each in a process of its own: CUDA cannot pin memory beside the virtual GPU. The prediction is
    first: a scenario that fails there fails everywhere."""
    words = set_options(overrides)
    return [
        run_stage("predicted", folder, scenario, "vgpu", words, deadline),
        run_stage("announced", folder, scenario, device, [*words, "--counted"], deadline),
        run_stage("recorded", folder, scenario, device, words, deadline),
    ]


def conduct(plan: Sequence[GpuStage], folder: Path, notify: Callable[[str], object]) -> Document:
    """Run the stages, which write into ``folder``, and compare the counts. Raises VerificationError."""
    run = in_process(sys.executable, folder)
    for stage in plan:
        notify(f"{stage.name}: {' '.join(stage.arguments[1:])}")
        outcome = run(stage, stage.deadline)
        if outcome.status != "ok":
            raise VerificationError(f"the {stage.name} run failed: {outcome.error}")
    return _verified(folder)


def _verified(folder: Path) -> Document:
    predicted, announced, recorded = (folder / f"{source}.json" for source in SOURCES)
    counts = json.loads(announced.read_text(encoding="utf-8"))
    return verify(read(predicted), counts, read(recorded))


def main(arguments: Sequence[str]) -> int:
    """``FOLDER``, with what the stages wrote: writes verify.json. Returns 1 if the counts do not agree."""
    folder = Path(arguments[0])
    found = _verified(folder)
    write_whole(folder / "verify.json", json.dumps(found, indent=1) + "\n")
    kinds = f"kinds of steps with different numbers of steps: {len(_unlike(found['steps']))}"
    print("; ".join([f"unexplained differences: {len(found['unexplained'])}", kinds, *found["trouble"]]))
    return 0 if found["agrees"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

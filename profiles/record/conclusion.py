"""A run in one sentence, from its result document."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Final

from .definitions import IDLE_NAMES, IDLE_PARTS

Document = dict[str, Any]

_CAUSES: Final = ("exposed_host", "exposed_stall", "launch_latency", "dependency", "kernel_gap")
_COPIES: Final = {"h2d": "upload", "d2h": "download", "d2d": "device copy", "kernel": "kernel copy"}
_LEAST_PERCENT: Final = 0.1  # percent of throughput; less than that from one line is not named
_NUMBERS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def conclusion(result: Document) -> str:
    """Return undeclared hazards, throughput, the idle time of the GPU with its largest cause, and the line that
    costs most: what it is worth where counterfactual runs say so, else the line whose waits are most exposed. Of a
    watched program, its hazards and how long the host waited; where no request finished, why; where some failed, how
    many; what of the scenario's script did not happen; of a run that was interrupted, when; of one that broke off, the
    first reason."""
    run, label = result["run"], result["labels"]
    reason = (run.get("failure") or "").partition("; ")[0].partition("\n")[0]
    broken_off = [f"broke off: {reason}"] if reason else ["interrupted"] * run["cancelled"]
    if label["emulated"] and "capture" in label:
        return f"{'; '.join((*broken_off, *_hazards(result, 'hazard'), _waited(result)))}."  # a program declares none
    if broken_off:
        statuses = Counter(request["status"] for request in result["requests"])
        ended = statuses["finished"]
        wanted = result["scenario"]["expanded"].get("workload", {}).get("requests")
        of_all = f" of {wanted:,}" if wanted else ""
        timed = timed_passes(result)
        if timed and statuses.total() == wanted and not (reason or statuses["cancelled"]):
            return f"interrupted after pass {timed}."
        of_pass, before = (
            (f" of pass {timed + 1}", "; metrics are of the passes before it") if timed else ("", "")
        )
        when, had = ("; ", "") if reason else (" when ", "had ")
        return f"{broken_off[0]}{when}{ended:,}{of_all} requests{of_pass} {had}finished{before}."
    if unfinished := _none_finished(result):
        return f"{unfinished}."
    found = (*_hazards(result, "undeclared hazard"), *_failed(result))
    parts = [*_throughput(result), *_idle(result)]
    if parts:
        parts[0] += f" ({numbers(label, result['hardware']['name'])})"
    line = _costliest(result) if "worth" in result else _most_exposed(result)
    return f"{'; '.join((*found, *(parts or _without_times(result)), *line))}."


def numbers(label: Document, hardware: str = "") -> str:
    """The kind of a run's times: emulated, measured, or profiled, which is measured together with a tool that takes
    time itself. Of emulated times, that of the host follows where it is not modelled; then whether the acceptance of
    drafts was simulated."""
    kind = "profiled" if label.get("profiled") else "emulated" if label["emulated"] else "measured"
    said = [f"{kind} {hardware}".rstrip()]
    said += [f"host time {label['host']}"] if kind == "emulated" and label["host"] != "modelled" else []
    acceptance = label.get("acceptance") or ""
    return ", ".join(said + [f"acceptance of drafts {acceptance}"] * ("simulated" in acceptance))


def listed(names: Sequence[str], most: int, *, between: str = ", ") -> str:
    """The first ``most`` names, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


def number_of(count: int, one: str, more: str = "") -> str:
    """The count and its noun; ``more`` is another plural than that with an s."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def attributed(delta: float, lines: Sequence[Document]) -> str:
    """How much of a change of throughput by ``delta`` percent comes from the source line that accounts for most of it;
    empty where no line was asked, or the change is too small."""
    worth = {_place(line["site"]): line["worth_pct"] for line in lines if line["worth_pct"] is not None}
    if not worth or abs(delta) < _LEAST_PERCENT:
        return ""
    place = max(worth, key=lambda name: worth[name] * delta)
    if worth[place] * delta <= 0 or abs(worth[place]) < _LEAST_PERCENT:
        return f"no line alone accounts for {_LEAST_PERCENT:g} %"
    return f"{worth[place]:+.2f} come from {place}"


def engine_name(part: Document) -> str:
    """The name of another project's engine, and which version it was."""
    commit, ref = part["commit"] or "", part["ref"] or ""
    words = [part["name"], part["version"] or "", "" if commit.startswith(ref) else ref]
    words += [f"at {commit[:10]}"] if commit else []
    words += ["with changes"] if part["dirty"] else []
    return " ".join(word for word in words if word)


def timed_passes(result: Document) -> int:
    """The whole passes that times are of; 0 where one pass was wanted."""
    passes: Document = result["environment"].get("passes", {})
    return int(passes.get("timed", 0))


def metric_value(result: Document, metric: str) -> float | None:
    """The median of the timed passes; None where the metric abstains."""
    values = result["metrics"].get(metric, {}).get("values")
    return float(median(values)) if values else None


def _hazards(result: Document, name: str) -> Iterator[str]:
    if found := result["hazards"].get("findings"):
        first = f"{found[0]['resource']}: {found[0]['missing']}"
        yield f"{len(found)} {name}s, the first: {first}" if len(found) > 1 else f"1 {name}: {first}"


def _waited(result: Document) -> str:
    rows = [row for row in (*result["copies"], *result["syncs"]) if row["host_us"] > 0]
    if not rows:
        return "the host never waited for the device"
    total, worst = sum(row["host_us"] for row in rows), max(rows, key=lambda row: row["host_us"])
    calls = sum(row["count"] for row in rows)
    line = _place(worst["site"]) if worst["site"] else "an unknown line"
    said = numbers(result["labels"], result["hardware"]["name"])
    return (
        f"the host waited {_number(total)} µs for the device ({said}), in {number_of(calls, 'call')}; "
        f"{_share(worst['host_us'] / total)} at {line}"
    )


def _none_finished(result: Document) -> str:
    """Where every request was refused, how many were, and the reason of the first."""
    requests = result["requests"]
    ended = Counter(request["status"] for request in requests)
    if not requests or ended.keys() & {"finished", "aborted"}:
        return ""
    counts = ", ".join(f"{count:,} {status}" for status, count in sorted(ended.items()))
    return f"no request finished: {counts}; the first: {requests[0]['reason']}"


def _failed(result: Document) -> Iterator[str]:
    """The requests that failed, and what of the scenario's script did not happen."""
    reasons = [request["reason"] for request in result["requests"] if request["status"] == "failed"]
    if reasons:
        yield f"{len(reasons):,} of {len(result['requests']):,} requests failed, the first: {reasons[0]}"
    if missed := result["run"].get("missed"):
        yield f"did not happen: {listed(missed, 1)}"


def _without_times(result: Document) -> Iterator[str]:
    kinds = [kind for part in _parts(result) for kind in part.items()]
    steps = sum(counts["steps"] for kind, counts in kinds if "." not in kind)
    ranks = f" of {len(result['ranks'])} ranks" if result.get("ranks") else ""
    requests = Counter(request["status"] for request in result["requests"])
    ended = "".join(f"{number_of(count, 'request')} {status}, " for status, count in sorted(requests.items()))
    yield f"{ended}{number_of(steps, 'step')}{ranks}; no times: {result['idle'].get('abstained', 'nothing was timed')}"


def _throughput(result: Document) -> Iterator[str]:
    """Prompts that are embedded get no tokens: there is one placeholder for each."""
    engine = result["scenario"].get("expanded", {}).get("engine", {})
    name, unit = ("request", "embeddings") if engine.get("embedding") else ("output", "output tokens")
    value = metric_value(result, f"{name}_throughput")
    if value is not None:
        yield f"{_number(value)} {unit}/s"


def _idle(result: Document) -> Iterator[str]:
    """The idle time between forwards without the time in which there was no work."""
    idle, busy = (metric_value(result, name) for name in ("forward_idle_us_per_step", "forward_occupancy"))
    if idle is None or busy is None or "abstained" in result["idle"]:
        return
    parts = idle_parts(result)
    causes = {name: parts[name] for name in _CAUSES}
    late, step = sum(causes.values()), idle / (1 - busy) if busy < 1 else 0.0
    resting = max(idle - late, 0.0)
    if late <= 0 or step <= resting:
        yield "GPU never idle between forwards for want of work that was there"
        return
    cause = max(causes, key=lambda name: causes[name])
    share = f"{_share(causes[cause] / late)} {IDLE_NAMES[cause]}"
    yield f"GPU idle {100 * late / (step - resting):.2g} % of a step ({_number(late)} µs) between forwards, {share}"


def idle_parts(result: Document) -> dict[str, float]:
    """Us per step of forward idle and of each of its parts, by the names of ``IDLE_NAMES``."""
    total = metric_value(result, "forward_idle_us_per_step") or 0.0
    idle = result["idle"]
    whole = sum(idle[f"{name}_us"] for name in IDLE_PARTS)
    parts = {name.removesuffix("_us"): total * us / whole if whole else 0.0 for name, us in idle.items()}
    exposed = {name: metric_value(result, f"{name}_us_per_step") or 0.0 for name in _CAUSES[:2]}
    return parts | exposed | {"forward_idle": total}


def _share(ratio: float) -> str:
    if ratio >= 0.995:
        return "all of it"
    return "half of it" if 0.45 <= ratio <= 0.55 else f"{100 * ratio:.0f} % of it"


def _costliest(result: Document) -> Iterator[str]:
    rows = [row for row in result["worth"]["rows"] if row["site"] and not row["hidden"]]
    gains = [row for row in rows if (row["output_throughput_pct"] or 0.0) > 0 and not row.get("needed")]
    best = max(gains, key=lambda row: row["output_throughput_pct"], default=None)
    most = best["output_throughput_pct"] if best else 0.0
    interrupted = result["run"].get("further_cancelled")
    if interrupted:
        yield f"interrupted when {len(result['worth']['rows']):,} of the lines and phases had been asked"
    if best and most >= _LEAST_PERCENT:
        rows = _rows(result)[_place(best["site"])]
        done = _work(result, rows) if rows else best["what"]
        yield f"costliest line: {_place(best['site'])}, {done}, worth {most:.2g} % of throughput in this scenario"
    elif not interrupted:
        largest = f"; the largest gain is {most:.2g} %, of {_place(best['site'])}" if best else ""
        yield f"no line is worth {_LEAST_PERCENT:g} % of throughput in this scenario{largest}"


def _most_exposed(result: Document) -> Iterator[str]:
    lines = _rows(result)
    place = max(lines, key=lambda line: sum(row["exposed_us"] for row in lines[line]), default="")
    if any(row["exposed_us"] > 0 for row in lines[place]):
        waits = [row for row in lines[place] if row["host_us"] > 0 or row.get("blocking") or row.get("sync")]
        yield f"most exposed wait: {place}, {_work(result, waits)}"


def _rows(result: Document) -> defaultdict[str, list[Document]]:
    """The copies, syncs and waits of each source line."""
    found: defaultdict[str, list[Document]] = defaultdict(list)
    for row in (*result["copies"], *result["syncs"]):
        if row["site"] is not None:
            found[_place(row["site"])].append(row)
    return found


def _parts(result: Document) -> list[Document]:
    """The steps of each rank by their kind."""
    return [rank["per_step"] for rank in result.get("ranks", ())] or [result["per_step"]]


def _place(site: Document) -> str:
    return f"{site['file']}:{site['line']}"


def _work(result: Document, rows: Sequence[Document]) -> str:
    """What a line does how often in a step of the kind in which it does most: its copies, if there are any."""
    counts: defaultdict[tuple[str, str], int] = defaultdict(int)
    for row in [row for row in rows if "direction" in row] or rows:
        counts[row["kind"], _noun(row)] += row["count"]
    kind, noun = max(counts, key=lambda key: counts[key])
    steps = sum(part[kind]["steps"] for part in _parts(result) if kind in part)
    if not steps:
        return noun
    each = counts[kind, noun] / steps
    many = _NUMBERS[int(each)] if each == int(each) < len(_NUMBERS) else f"{each:.2g}"
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{many} {noun if many in ('one', '1') else plural} per {kind} step"


def _noun(row: Document) -> str:
    if "direction" not in row:
        return "wait" if row["sync"] or row["host_us"] else "stream wait"
    manner = "blocking " if row["blocking"] else "pageable " if row["host_memory"] == "pageable" else ""
    direction = str(row["direction"])
    return manner + _COPIES.get(direction, direction)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

"""The page of a comparison: the conclusion, metrics, copies and syncs, where the GPU waited. Also that of all cases."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

from rich.table import Table
from rich.text import Text

from ..profiles.record.conclusion import listed, number_of, numbers
from ..profiles.record.definitions import IDLE_NAMES
from .charts import Chart, Point
from .page import WIDE, Document, Page, framed, ordered_kinds, to_csv
from .result_page import host_time, scheduler
from .source_lines import source_line
from .text import MISSING, number, percent, signed

LINES = 24  # source lines in a table
FEW = 4  # in the first screenful
_COMPARED = ("engine.", "relay.", "labels.engine")
_OF_SIDES = ("labels.engine.commit", "labels.engine.ref")  # which the sides have beside their names
_MARKS = {"better": "green", "worse": "red", "failed": "red", "passed": "green"}
_OTHERS, _COUNTS = "other metrics", "counts per step: mean / worst step"
_BASES = {
    "seeds": "each run is exact; A and B are medians over workload seeds, Δ is the median of the changes seed by seed",
    "blocks": "measured in ABBA blocks, four for each workload seed; Δ is the median of the changes seed by seed",
    "stored": "measured, not in pairs: drift between the runs counts as effect",
}
_RULE = "better or worse: the whole range lies beyond {least:g} %"
_TESTED = {True: ", with p ≤ 5 % by Holm's method", False: ", with p ≤ 5 % of each metric alone"}
_CONTRARY = "of {} most changes go in another direction than from the median A to the median B"
_NO_DRAWS = "not asked: whether the verdict holds over the ranges of the hardware's constants, because "
_NO_ORDER = "not asked: whether data is read too early, which tokens need not show; schedbench check asks"
_SHOWED = "where the host's waiting showed"
_FIELDS = ("unit", "direction", "a", "b", "delta_pct", "ci_low", "ci_high", "verdict")  # of a metric in CSV
CASE_COLUMNS = ("case", "source", "A → B", "reported", "expected", "found", "A, B, Δ", "under draws")
# In the chart, beside the headline.
_EFFECTS = ("output_throughput", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
Figures = dict[str, Callable[[Document], str]]
_WORTH: Figures = {  # of B's throughput against A's, the part of the whole line
    "worth\n%": lambda line: signed(line["worth_pct"] and round(line["worth_pct"], 2))
}
_REST = (_OTHERS, _COUNTS, _SHOWED)


def page(document: Document, width: int = WIDE, *, few: bool = False) -> Page:  # noqa: ARG001
    """In Markdown it can be pasted into a pull request. ``few``: only some source lines are shown in a table."""
    found, most = document["comparison"], FEW if few else LINES
    waits_alone = all(line["a"] == line["b"] for line in found["lines"]) and any(
        line["exposed_a"] != line["exposed_b"] for line in found["lines"]
    )
    return Page(
        f"compare {document['scenario']['name'] or ''}".rstrip(),
        [
            Text(setting(document)),
            *map(Text, notes(document, most)),
            *every(found, most=most),
            *charts(found),
        ],
        document["conclusion"],
        footer=_provenance(document),
        rest=(_OTHERS, _COUNTS) if waits_alone else _REST,
    )


def as_csv(document: Document) -> str:
    """One row per metric, and per count of a kind and stream, whose ``a`` and ``b`` are means over steps."""
    found = document["comparison"]
    rows = [[name, *map(row.get, _FIELDS)] for name, row in found["metrics"].items()]
    for count in found["counts"]:
        means = [tally and tally["mean"] for tally in (count["a"], count["b"])]
        name = ".".join(count[part] for part in ("kind", "stream", "counter"))
        rows.append([name, "mean/step", "", *means, None, None, None, count["change"]])
    label = numbers(document["labels"])
    return to_csv(("metric", *_FIELDS, "label"), ([*row, label] for row in rows))


def setting(document: Document) -> str:
    """What kind of numbers these are, and the two sides."""
    label, found = document["labels"], document["comparison"]
    a, b = found["baseline"], found["candidate"]
    own = [_own_commit(a), _own_commit(b)]
    both = [f"both {own[0].strip()}"] if own[0] and own[0] == own[1] else []
    sides = [
        f"{name} {_program(side, '' if both else commit)}"
        for name, side, commit in zip("AB", (a, b), own, strict=True)
    ]
    partial = ["cancelled: partial"] if document["run"]["cancelled"] else []
    host = host_time(label, a["engine"], b["engine"])
    return " · ".join((numbers(label, document["hardware"]["name"]), *host, *sides, *both, *partial))


def _program(side: Document, commit: str) -> str:
    if side["capture"]:
        return f"{side['label']} ({len(side['runs'])} of {side['capture']['map']}, steps: {side['capture']['steps']})"
    world = f", {side['world']} world" if side["world"] else ""
    return f"{side['label']} ({scheduler(_unnamed(side), side['relay'])}{commit}{world})"


def _own_commit(side: Document) -> str:
    """The commit of a side that is our own scheduler, and the files that are changed in it."""
    sha, tool = side["tool"]["git_sha"], side["tool"]
    if not sha or side["engine"] or side["capture"]:
        return ""
    changes = f" with changes in {listed(tool.get('changed', ()), FEW) or 'some files'}"
    return f" at {sha[:10]}{changes * bool(tool['dirty'])}"


def _unnamed(side: Document) -> Document:
    """The side without the ref and the commit of its engine where its label has them."""
    engine = side["engine"]
    if not engine or not engine["ref"] or f"@{engine['ref']}" not in side["label"]:
        return side
    named = engine["commit"] and engine["commit"].startswith(engine["ref"])
    return side | {"engine": engine | {"ref": None} | ({"commit": None} if named else {})}


def notes(document: Document, most: int) -> list[str]:
    """Remarks that qualify the verdict."""
    found, cancelled = document["comparison"], document["run"]["cancelled"]
    differences = found["comparability"]["differences"]
    compared = [
        _difference(d)
        for d in differences
        if d["key"].startswith(_COMPARED) and not d["key"].endswith(_OF_SIDES)
    ]
    others = [_difference(d) for d in differences if not d["key"].startswith(_COMPARED)]
    remarks = [_case(found["case"], found["verdict"])] if found["case"] else []
    remarks += _of_captures(document) if found["baseline"]["capture"] else []
    remarks += [f"compared: {listed(compared, most, between='; ')}"] if compared else []
    remarks += [f"environments differ: {'; '.join(others)}"] if others else []
    if found["engagement"]["basis"] == "kinds":
        remarks.append("batches differ between A and B: steps are compared by kind, not one by one")
    sides = {"A": found["baseline"], "B": found["candidate"]}
    for name, side in sides.items():
        if side["unrecorded"]:
            remarks.append(
                f"{name} recorded no times and no source lines: {side['unrecorded']}; compared is what both have"
            )
    for name, side in (("A", "a"), ("B", "b")):
        if lacking := sorted({count["kind"] for count in found["counts"] if count[side] is None}):
            remarks.append(f"{name} has no {', '.join(lacking)} steps")
    for name, other in (("A", "B"), ("B", "A")):
        if calls := sorted(_without_effect(sides[name]) - _without_effect(sides[other])):
            remarks.append(f"only {name} makes calls that have no effect or cost here: {listed(calls, most)}")
    if found["one_run"]:
        remarks.append("the workload has no randomness: a second seed gave the same run, so one is compared")
    if cancelled or "NOT_ENGAGED" not in found["reasons"]:
        drawn = found["draws"]["abstained"] if found["design"] == "seeds" else None
        remarks += [f"{_NO_DRAWS}{drawn}"] if drawn else []
        remarks += [] if found.get("watched", True) or found["baseline"]["capture"] else [_NO_ORDER]
    if found["hint"]:
        remarks.append(found["hint"])
    return remarks


def _without_effect(side: Document) -> set[str]:
    edge = side["engine"]["edge"] if side["engine"] else {}
    return {*edge.get("answered_by_default", ()), *edge.get("without_effect", ())}


def _of_captures(document: Document) -> list[str]:
    """The limits of a comparison of captures, and the notes of each capture. Those of watched programs are emulated and
    repeat exactly."""
    found, remarks = document["comparison"], list[str]()
    if not document["labels"]["emulated"]:
        remarks.append("counts are exact for what was captured; times include the tool's own, on both sides")
        noise = "one capture each does not show the noise: for a verdict on times give folders of six or more"
        remarks += [noise] * (found["pairs"] == 1)
    gaps = {side: found[name]["capture"]["notes"] for side, name in (("A", "baseline"), ("B", "candidate"))}
    both = [note for note in gaps["A"] if note in gaps["B"]]
    remarks += [f"! {note}" for note in both]
    return remarks + [f"! {side}: {note}" for side in gaps for note in gaps[side] if note not in both]


def _case(case: Document, verdict: str) -> str:
    """The reported change beside the one that was found."""
    agreement = "as expected" if verdict == case["expect"] else f"expected {case['expect']}"
    return f"case of {case['source']}: {case['reported']}; {case['metric']} {verdict} here, {agreement}"


def _difference(difference: Document) -> str:
    digits = 10 if difference["key"].endswith("sha256") else None
    values = (difference[side] for side in "ab")
    a, b = ((str(one).lower() if isinstance(one, bool) else str(one))[:digits] for one in values)
    return f"{difference['key']} {a} (A), {b} (B)"


def every(found: Document, *, most: int) -> list[Table]:
    headline, others = metrics(found, headline=True), metrics(found, headline=False)
    tables = [headline, lines(found, most=most), gpu_waits(found), others, counts(found)]
    if any(found[side]["unrecorded"] for side in ("baseline", "candidate")):  # a note has the reason
        tables = [*(table for table in (headline, others) if table.row_count), counts(found)]
    exposed = [line for line in found["lines"] if line["exposed_a"] or line["exposed_b"]]
    tables += [stalls(exposed, most=most, worth=_worth_asked(found))] if exposed else []
    return [gates(found), *tables] if found["gates"] else tables


def metrics(found: Document, *, headline: bool) -> Table:
    """The metrics that the verdict is about, or all others."""
    drawn = headline and found["draws"]["count"] > 0
    interval = "of the median" if found["design"] == "seeds" else "95 % CI"
    headings = ["metric\nunit", ">A", ">B", f">Δ %, range\n{interval}"]
    headings += [">Δ %, range\nover draws", "verdict"] if drawn else ["verdict"]
    shown = {name: one for name, one in found["metrics"].items() if (name in found["headline"]) == headline}
    contrary = sorted(
        name for name, one in shown.items() if (one["b"] - one["a"]) * (one["delta_pct"] or 0) < 0
    )
    least = max((one["min_effect_pct"] for one in shown.values()), default=0)
    tested = any(one["p_value"] is not None for one in shown.values())
    parts = [_BASES[found["design"]], _RULE.format(least=least) + (_TESTED[headline] if tested else "")]
    basis = "; ".join(parts + [_CONTRARY.format(", ".join(contrary))] * bool(contrary))
    table = framed("headline" if headline else _OTHERS, *headings, caption=basis, no_wrap=True, tight=True)
    every_reason = [metric["reasons"] for metric in found["metrics"].values()]
    stated = [reason for reason in found["reasons"] if all(reason in reasons for reasons in every_reason)]
    for name, metric in sorted(shown.items()):
        over_draws = [_over_draws(metric["firmness"])] if drawn else []
        table.add_row(f"{name}\n{metric['unit']}", *_figures(metric), *over_draws, _verdict(metric, stated))
    return table


def _over_draws(firmness: Document | None) -> str:
    """The range of the effect under draws of the hardware's constants, and in how many of them the verdict holds."""
    if firmness is None:
        return MISSING
    if "abstained" in firmness:
        return str(firmness["abstained"])
    extent = f"{signed(firmness['low'])} … {signed(firmness['high'])}"
    return f"{extent}\n{firmness['holding']} of {firmness['draws']}"


def _figures(metric: Document) -> tuple[str, ...]:
    low, high = metric["ci_low"], metric["ci_high"]
    interval = MISSING if low is None or high is None else f"{signed(low)} … {signed(high)}"
    return number(metric["a"]), number(metric["b"]), f"{signed(metric['delta_pct'])}\n{interval}"


def _verdict(metric: Document, stated: Collection[str]) -> Text:
    """Without the reasons that all metrics have, which the conclusion states."""
    own = ", ".join(reason for reason in metric["reasons"] if reason not in stated)
    return Text(f"{metric['verdict']}\n{own}".rstrip(), style=_MARKS.get(metric["verdict"], ""))


def lines(found: Document, *, most: int) -> Table:
    """Source lines whose copies, syncs or waits of streams per step changed."""
    compared = _moves_joined(found["lines"])
    changed = [line for line in compared if line["a"] != line["b"] or "moved_from" in line]
    equal = len(compared) - len(changed)
    more = "more " * bool(changed)
    caption = f"{number_of(equal, f'{more}source line is', f'{more}source lines are')} the same on both sides; exact"
    figures: Figures = {"A": lambda line: number(line["a"]), "B": lambda line: number(line["b"]), "Δ": _delta}
    if _worth_asked(found):
        caption += "; worth: of B's throughput against A's, each line alone, in the first seed"
        figures |= _WORTH
    return _sites("copies, syncs & stream waits per step", caption, changed, figures, most=most)


def _moves_joined(found: list[Document]) -> list[Document]:
    """The lines, in the end those that have moved: A alone and B alone have the same statement, in other places."""
    gone: defaultdict[tuple[str, ...], list[Document]] = defaultdict(list)
    for line in found:
        if line["site"] and line["a"] and line["b"] == 0:
            gone[_statement(line)].append(line)
    moved, joined = [], []
    for line in found:
        if line["site"] and line["b"] and line["a"] == 0 and (before := gone[_statement(line)]):
            joined += [line, origin := before.pop(0)]
            worth = [one["worth_pct"] for one in (line, origin) if one["worth_pct"] is not None]
            of_a = {"a": origin["a"], "worth_pct": sum(worth) if worth else None}
            moved.append(line | of_a | {"moved_from": origin["site"]})
    return [*(line for line in found if line not in joined), *moved]


def _statement(line: Document) -> tuple[str, ...]:
    return line["kind"], line["stream"], line["what"], line["site"]["statement"]


def _delta(line: Document) -> str:
    return MISSING if None in (line["a"], line["b"]) else f"{line['b'] - line['a']:+.3g}"


def _worth_asked(found: Document) -> bool:
    return any(line["worth_pct"] is not None for line in found["lines"])


def counts(found: Document) -> Table:
    """Counters that changed: mean and worst step. Finer ones (h2d_pinned, ...) are in the document."""
    known = [count for count in found["counts"] if "_" not in count["counter"]]
    changed = [count for count in known if count["change"] != "equal"]
    equal = len(known) - len(changed)
    headings = ("step kind", "stream", "count", ">A", ">B", "")
    caption = f"{number_of(equal, 'more count is', 'more counts are')} equal; exact"
    table = framed(_COUNTS, *headings, caption=caption)
    for count in changed:
        tallies = (_tally(count["a"]), _tally(count["b"]))
        change = MISSING if count["change"] == "no steps" else count["change"]
        table.add_row(count["kind"], count["stream"], count["counter"], *tallies, change)
    return table


def _tally(tally: Document | None) -> str:
    return MISSING if tally is None else f"{number(tally['mean'])} / {number(tally['max'])}"


def gpu_waits(found: Document) -> Table:
    """Forward idle on both sides; shares are of A's."""
    reasons = [found[side]["idle_abstained"] for side in ("baseline", "candidate")]
    why = [f"{side}: {reason}" for side, reason in zip("AB", reasons, strict=True) if reason]
    several = ", the mean of all ranks" * any(found[side]["world"] for side in ("baseline", "candidate"))
    caption = "; ".join([f"µs per step that ran a forward, between the forwards{several}", *why])
    table = framed("where the GPU waited", "", ">A", ">B", ">Δ", ">share of A, %", caption=caption)
    idle = {part["part"]: (part["a"], part["b"]) for part in found["idle"]}
    total = idle["forward_idle"][0]
    for name in IDLE_NAMES:
        if name not in idle or (all(reasons) and name != "forward_idle"):
            continue
        a, b = idle[name]
        delta = signed(None if a is None or b is None else round(b - a, 6))
        share = percent(a / total) if a is not None and total else MISSING
        title = f"{'  ' * name.startswith('exposed')}{IDLE_NAMES[name]}"
        table.add_row(title, number(a), number(b), delta, share, end_section=name == "residue")
    return table


def stalls(exposed: list[Document], *, most: int, worth: bool) -> Table:
    """Source lines at which the host waited while the GPU had no forward to run. What a line is worth is not how long
    that was."""
    exposed.sort(key=lambda line: -max(line["exposed_a"] or 0, line["exposed_b"] or 0))
    figures: Figures = {
        "A": lambda line: number(line["exposed_a"]),
        "B": lambda line: number(line["exposed_b"]),
    }
    figures |= _WORTH if worth else {}
    return _sites(_SHOWED, "µs per step of the kind", exposed, figures, most=most)


def gates(found: Document) -> Table:
    table = framed("gates", "gate", ">seen", "")
    for gate in found["gates"]:
        unit = " %" if gate["gate"].endswith("%") else ""
        seen = MISSING if gate["seen"] is None else f"{number(gate['seen'])}{unit}"
        why = f" {gate['why']}" if gate["why"] else ""
        table.add_row(gate["gate"], seen, Text(gate["outcome"] + why, style=_MARKS.get(gate["outcome"], "")))
    return table


def _sites(title: str, caption: str, rows: list[Document], figures: Figures, *, most: int) -> Table:
    """At most so many rows, with the lines that differ in nothing but the kind of step as one, and with the phase where
    rows would otherwise look alike. ``figures``: the text of each column behind the source line, by its heading."""
    joined: defaultdict[tuple[str, ...], list[Document]] = defaultdict(list)
    for line in rows:
        joined[*_place(line), line["range"], *(figure(line) for figure in figures.values())].append(line)
    phases = Counter((*_place(line), line["kind"]) for line in rows)
    hidden = len(joined) - most
    caption = f"and {hidden} more; {caption}" if hidden > 0 else caption
    headings = ("~source line", "what", *(f">{heading}" for heading in figures))
    table = framed(title, *headings, caption=caption, no_wrap=True)
    for line, *others in [*joined.values()][:most]:
        first, *more = ordered_kinds([line["kind"], *(other["kind"] for other in others)])
        where = f"{line['stream']} · {first}" + (f",\n  {', '.join(more)}" if more else "")
        if any(phases[*_place(line), kind] > 1 for kind in (first, *more)):
            where += f"\nin {line['range']}"
        what = Text.assemble(line["what"], (f"\n{where}", "dim"))
        place = source_line(line)
        if origin := line.get("moved_from"):
            place.append(f"\nmoved from {origin['file']}:{origin['line']}", "dim")
        table.add_row(place, what, *(figure(line) for figure in figures.values()))
    return table


def _place(line: Document) -> tuple[str, ...]:
    return str(line["site"]), str(line.get("moved_from")), line["stream"], line["what"]


def _provenance(document: Document) -> list[str]:
    tool, environment = document["tool"], document["environment"]
    known = ", ".join(f"{name} {value}" for name, value in environment.items() if isinstance(value, str))
    return [f"`{document['run']['command']}`", f"{tool['name']} {tool['version']}; {known}"]


def charts(found: Document) -> Iterator[Chart]:
    """The effects with their intervals, and under draws; where the GPU waited on both sides."""
    yield from _effects({name: found["metrics"].get(name) for name in (*found["headline"], *_EFFECTS)})
    waits = [
        {"y": IDLE_NAMES[part["part"]], "x": part[side], "series": side.upper()}
        for part in found["idle"]
        for side in ("a", "b")
        if part["part"] not in ("forward_idle", "host_late") and (part["a"] or part["b"])
    ]
    if waits:
        yield Chart("where the GPU waited", "bar", "µs/step", "", waits)


def _effects(metrics: Mapping[str, Document | None]) -> Iterator[Chart]:
    """By the name of the metric or of its case."""
    points: list[Point] = []
    for name, metric in metrics.items():
        if metric is None or metric["delta_pct"] is None or metric["ci_low"] is None:
            continue
        effect = {"x": metric["delta_pct"], "series": metric["verdict"]}
        points.append({"y": name, **effect, "low": metric["ci_low"], "high": metric["ci_high"]})
        if (firmness := metric["firmness"]) and "abstained" not in firmness:
            ends = {end: firmness[end] for end in ("low", "high")}
            points.append({"y": f"{name}, over draws", **effect, **ends})
    if points:
        yield Chart("effects of B against A", "interval", "Δ %", "", points)


def cases_page(document: Document) -> Page:
    """Each reported change beside what was found here, and how firmly that stands."""
    table = framed("", *CASE_COLUMNS)
    cases = {name.rpartition("/")[2]: case["comparison"] for name, case in document["cases"].items()}
    for name, found in cases.items():
        table.add_row(*_case_row(name, found))
    effects = _effects({name: found["metrics"][found["case"]["metric"]] for name, found in cases.items()})
    return Page("the library of cases", [*[table] * bool(cases), *effects], document["conclusion"])


def _case_row(name: str, found: Document) -> tuple[str, ...]:
    """One case in Markdown; a verdict other than the expected one is bold."""
    case = found["case"]
    metric = found["metrics"][case["metric"]]
    values = f"{number(metric['a'])}, {number(metric['b'])} {metric['unit']}"
    verdict = ": ".join([found["verdict"], ", ".join(found["reasons"])]).removesuffix(": ")
    return (
        f"`{name}`",
        case["source"],
        f"`{case['a']}` → `{case['b']}`",
        case["reported"],
        f"{case['metric']} {case['expect']}",
        verdict if verdict == case["expect"] else f"**{verdict}**",
        f"{values}, {_plus(metric['delta_pct'])} % [{_plus(metric['ci_low'])}, {_plus(metric['ci_high'])}]",
        _under_draws(metric["firmness"], doubted="CONSTANTS" in found["reasons"]),
    )


def _under_draws(firmness: Document | None, *, doubted: bool) -> str:
    """In how many draws the sign holds, the range of the effect, and what decides a verdict that does not stand."""
    if firmness is None:
        return MISSING
    if "abstained" in firmness:
        return str(firmness["abstained"])
    extent = f"{_plus(firmness['low'])} … {_plus(firmness['high'])} %"
    follows = f"; follows `{firmness['constant']}`, {_plus(firmness['correlation'])}" if doubted else ""
    return f"{firmness['holding']} of {firmness['draws']}, {extent}{follows}"


def _plus(value: float | None) -> str:
    return MISSING if value is None else f"{value:+.2f}"

"""Charts of a page, and their specifications in Vega-Lite for HTML and SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any, Final, Literal, NamedTuple

from ..profiles.picture.model import KINDS, Lane, Scene
from .strip import LOOKS

Spec = dict[str, Any]
ChartKind = Literal["line", "step", "bar", "interval"]
Point = Mapping[str, str | float | None]

_LANE: Final = 22  # pixels
_SVG_WIDTH: Final = 1000  # pixels; a character of the title has up to 7
_STEPS: Final = "step"  # the lane of the steps' numbers
_CONFIG: Final[Spec] = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {"grid": False, "titleFontWeight": "normal", "labelLimit": 220, "labelSeparation": 8},
    "legend": {"orient": "top", "columns": 4, "title": None, "labelLimit": 260},
}


class Chart(NamedTuple):
    """``points`` have ``x`` and ``y``, and may have ``series``; of kind ``interval`` maybe ``low`` and ``high`` of x.
    The ``y`` of bars and intervals is a name. ``log``: the x axis is logarithmic."""

    title: str
    kind: ChartKind
    x: str
    y: str
    points: Sequence[Point]
    log: bool = False


def spec_of(drawn: Chart | Scene) -> Spec:
    """Complete but for its width."""
    body = _scene(drawn) if isinstance(drawn, Scene) else _chart(drawn)
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": drawn.title, "anchor": "start", "fontSize": 12},
        "config": _CONFIG,
        "autosize": {"type": "fit-x", "contains": "padding"},
        **body,
    }


def _chart(chart: Chart) -> Spec:
    named = chart.kind in ("bar", "interval")
    x: Spec = {"field": "x", "type": "quantitative", "title": chart.x}
    y: Spec = {"field": "y", "type": "quantitative", "title": chart.y}
    if chart.log:
        x["scale"] = {"type": "log"}
    if named:
        y = {"field": "y", "type": "nominal", "title": None, "sort": None}
    series = any("series" in point for point in chart.points)
    colour: Spec = {"color": {"field": "series", "type": "nominal", "sort": None}} if series else {}
    names = ["y", "series", "x"] if series else ["y", "x"]
    encoding = {"x": x, "y": y, **colour, "tooltip": [{"field": name} for name in names]}
    interpolate = {"interpolate": "step-after"} if chart.kind == "step" else {"point": len(chart.points) < 60}
    layers: list[Spec] = [{"mark": {"type": "line", "clip": True, **interpolate}, "encoding": encoding}]
    if chart.kind == "bar":
        beside = {"yOffset": {"field": "series", "sort": None}} if series else {}
        layers = [{"mark": "bar", "encoding": {**encoding, **beside}}]
    if chart.kind == "interval":
        extent = {**encoding, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
        rule = {"mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.5}, "encoding": extent}
        layers = [{"mark": {"type": "point", "filled": True, "size": 60}, "encoding": encoding}]
        if any("low" in point for point in chart.points):
            layers.insert(0, rule)
        else:
            x["scale"] = {"zero": False}
    if not named:
        layers[0]["params"] = [_zoom()]
    height = _LANE * len({point["y"] for point in chart.points}) if named else 180
    return {"data": {"values": [*chart.points]}, "height": height, "layer": layers}


def _zoom() -> Spec:
    """Dragging pans; the wheel zooms with Ctrl, so that it still scrolls the page without it."""
    return {
        "name": "zoom",
        "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.ctrlKey || event.metaKey]"},
        "bind": "scales",
    }


def _scene(scene: Scene) -> Spec:
    """Bars by lane, lines at the steps, and arrows from what ended to what waited for it."""
    x: Spec = {"field": "start", "type": "quantitative", "title": "µs"}
    x["scale"] = {"domain": [0, scene.end / 1e3], "nice": False}
    groups = dict.fromkeys(lane.group for lane in scene.lanes)
    labels = [
        label
        for group in groups
        for label in (
            f"{group} {_STEPS}".strip(),
            *(lane.label for lane in scene.lanes if lane.group == group),
        )
    ]
    y: Spec = {"field": "lane", "type": "nominal", "title": None, "sort": labels, "scale": {"domain": labels}}
    at = {"field": "at", "type": "quantitative"}
    steps = [
        {"lane": f"{boundary.group} {_STEPS}".strip(), "at": boundary.at / 1e3, "says": f"{boundary.step}"}
        for boundary in scene.boundaries
    ]
    step = {"x": at, "tooltip": {"field": "says"}}
    named = {"x": at, "y": y, "text": {"field": "says"}}
    return {
        "height": _LANE * len(labels),
        "layer": [
            _bar_layer(x, y, scene),
            _layer(steps, step, type="rule", strokeDash=[3, 3]),
            _layer(steps, named, type="text", align="left", dx=3),
            *_arrow_layers(scene, x, y, labels),
        ],
    }


def _bars(lanes: Sequence[Lane]) -> Iterator[Spec]:
    for lane in lanes:
        for piece in lane.slices:
            yield {
                "lane": lane.label,
                "kind": KINDS[piece.kind],
                "name": piece.name,
                "step": piece.step,
                "start": piece.start / 1e3,
                "end": piece.end / 1e3,
                "took": (piece.end - piece.start) / 1e3,
                "line": piece.line,
                "statement": piece.statement,
            }


def _bar_layer(x: Spec, y: Spec, scene: Scene) -> Spec:
    """Bars have an outline of their own colour, so that short ones do not vanish."""
    present = {piece.kind for lane in scene.lanes for piece in lane.slices}
    kinds = [kind for kind in KINDS if kind in present]
    colour = {"domain": [KINDS[kind] for kind in kinds], "range": [LOOKS[kind].colour for kind in kinds]}
    shown = {"field": "kind", "type": "nominal", "scale": colour}
    titles = {"name": "", "kind": "what", "took": "µs", "start": "from, µs", "step": "step", "line": "line"}
    tips = [{"field": field, "title": title or "name"} for field, title in titles.items()]
    encoding = {
        "x": x,
        "x2": {"field": "end"},
        "y": y,
        "color": shown,
        "tooltip": [*tips, {"field": "statement"}],
    }
    stroke = {"expr": "scale('color', datum.kind)"}
    bars = _layer([*_bars(scene.lanes)], encoding, type="bar", strokeWidth=0.5, stroke=stroke)
    return bars | {"params": [_zoom()]}


def _arrow_layers(scene: Scene, x: Spec, y: Spec, labels: Sequence[str]) -> Iterator[Spec]:
    arrows = [
        {
            "start": arrow.start / 1e3,
            "end": arrow.end / 1e3,
            "lane": arrow.source,
            "target": arrow.target,
            "waited": arrow.waited / 1e3,
            "for": f"{arrow.name} on {arrow.source}",
            "angle": 0 if labels.index(arrow.target) < labels.index(arrow.source) else 180,
            "line": arrow.line,
            "statement": arrow.statement,
        }
        for arrow in scene.arrows
        if arrow.source
    ]
    if not arrows:
        return
    tips = [
        {"field": "target", "title": "waiting"},
        *({"field": name} for name in ("for", "line", "statement")),
    ]
    tips.append({"field": "waited", "title": "waited, µs"})
    line = {"x": x, "x2": {"field": "end"}, "y": y, "y2": {"field": "target"}, "tooltip": tips}
    yield _layer(arrows, line, type="rule", strokeWidth=1.5) | {"name": "arrow"}
    angle = {"field": "angle", "type": "quantitative", "scale": None}
    head = {"x": {**x, "field": "end"}, "y": {**y, "field": "target"}, "angle": angle, "tooltip": tips}
    looks: Spec = {"shape": "triangle-up", "filled": True, "size": 50, "opacity": 1, "color": "black"}
    yield _layer(arrows, head, type="point", **looks) | {"name": "arrowhead"}


def _layer(values: Sequence[Spec], encoding: Spec, **mark: Any) -> Spec:
    """Marks for these values, which end at the border of the chart."""
    return {"data": {"values": values}, "mark": {"clip": True, **mark}, "encoding": encoding}


def svg(drawn: Sequence[Chart | Scene], title: str) -> str:
    """All of them below each other in one SVG, under the title."""
    import vl_convert

    specs = [{**spec_of(one), "width": _SVG_WIDTH} for one in drawn]
    for spec in specs:
        del spec["config"], spec["$schema"], spec["autosize"]
        for layer in spec["layer"]:
            layer.pop("name", None)  # one name in two pictures would be one of their marks
    lines = wrap(title, _SVG_WIDTH // 7)
    whole = {
        "title": {"text": lines, "anchor": "start", "fontWeight": "normal", "offset": 10},
        "vconcat": specs,
        "config": {**_CONFIG, "background": "white"},
        "resolve": {"scale": {"color": "independent"}},
    }
    return f"{vl_convert.vegalite_to_svg(whole)}\n"

"""Small charts as inline SVG: lines, bars, and rows of dots.

Drawn here and not by matplotlib because colours follow the page's light or dark theme through its style sheet (the
page allows no inline styles), text stays text, and every point carries its number and where that comes from.

A chart is as wide as its place on the page while its text keeps its size: across, everything stands at a percentage of
the plot, down at a pixel. The numbers of the vertical axis stand in the margin that the style sheet leaves.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from mxd.report.markers import VARIANTS, marker
from mxd.report.parts import NOTHING, Key, Panel
from mxd.report.source import Node

HEIGHT = 260.0
MARGIN, TOP, BOTTOM = 44.0, 10.0, 40.0
"""Left of the plot (the same in ``style.css``), above and below it, in pixels."""
NARROW = 250.0
"""Pixels of a plot on a narrow screen: numbers of the horizontal axis that would run into each other there are left
out."""
CAPTION = 16.0
"""Room above the vertical axis for its name."""
DIGIT = 7.0
"""Width of a digit of the ticks' numbers, with some space."""
ROW = 18.0
"""Height of a row's name above its dots."""
NAME = 46
"""Characters of a row's name that fit."""
HOVER = 40
"""Points of a line without markers that say their values when pointed at."""
SPOT = Markup('<circle class="spot" r="7"/>')
"""What is pointed at: more than a small marker."""
BARS = 0.8
"""Share of a place on the horizontal axis that its bars take."""
SPARSE_MARKS = 3
"""Markers on a line whose points have none, for those who cannot tell its colour."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, less their whole parts, are spread evenly: where markers of neighbouring lines stand."""
Scale = Literal["linear", "log"]


@dataclass(frozen=True)
class Point:
    """A point, its range of uncertainty, and where its value comes from."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    key: Key
    points: Sequence[Point]
    marks: bool = True
    """Mark every point, not only a few."""
    interval: bool = False
    """Show the ranges as a shaded interval, not as bars."""
    joined: bool = True
    """Connect the points."""


@dataclass(frozen=True)
class Axis:
    """An axis: what it shows, how, and from where to where."""

    label: str
    scale: Scale = "linear"
    ticks: Sequence[float] | None = None
    low: float | None = None
    high: float | None = None
    percent: bool = False

    def said(self, value: float) -> str:
        """Return a value as text."""
        if math.isnan(value):
            return NOTHING
        if self.percent:
            return f"{value:.0%}"
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:,.0f}" if abs(value) < 1e4 else _thousands(value)


class _Span:
    """An axis mapped to percentages (across) or pixels (down)."""

    def __init__(self, axis: Axis, values: Iterable[float], start: float, end: float) -> None:
        from matplotlib.ticker import LogLocator, MaxNLocator

        self.axis, self.start, self.end = axis, start, end
        known = sorted(v for v in values if math.isfinite(v) and (axis.scale == "linear" or v > 0)) or [0.0, 1.0]
        low = known[0] if axis.low is None else axis.low
        high = known[-1] if axis.high is None else axis.high
        if low == high:
            low, high = (low * 0.8, high * 1.25) if axis.scale == "log" else (low - 0.5, high + 0.5)
        # Given ticks widen the range to hold them; linear axes end at ticks; logarithmic ones leave a margin.
        if axis.ticks is not None:
            ticks = list(axis.ticks)
            low, high = min(low, *ticks), max(high, *ticks)
        elif axis.scale == "linear":
            ticks = list(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high))
            low, high = (low if axis.low is not None else ticks[0]), (high if axis.high is not None else ticks[-1])
        else:
            ticks = list(LogLocator(subs=log_ticks(high / low)).tick_values(low, high))
            low, high = low / 1.1, high * 1.1
        self.low, self.high = low, high
        self.decimals = max((len(f"{t:.3g}".partition(".")[2]) for t in ticks if 1e-3 <= abs(t) < 1e3), default=0)
        self.ticks = [t for t in ticks if low - 1e-9 * abs(low) <= t <= high + 1e-9 * abs(high)]

    def said(self, tick: float) -> str:
        """Return a tick as text, with as many decimals as its neighbours."""
        plain = self.axis.scale == "linear" and not self.axis.percent and max(map(abs, self.ticks)) < 1e3
        return f"{tick:.{self.decimals}f}" if plain and "e" not in f"{tick:.3g}" else self.axis.said(tick)

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.axis.scale == "log":
            low, high, at = math.log(low), math.log(high), math.log(max(value, self.low))
        share = (min(max(at, low), high) - low) / (high - low)
        return round(self.start + share * (self.end - self.start), 2)


def log_ticks(ratio: float) -> tuple[float, ...]:
    """Return the ticks within a decade of an axis from ``low`` to ``ratio * low``."""
    if ratio < 2:
        return (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    return (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0) if ratio < 8 else (1.0, 2.0, 5.0) if ratio < 300 else (1.0,)


def lines(title: str, x: Axis, y: Axis, drawn: Sequence[Line]) -> Panel:
    """Draw lines.

    Args:
        title: of the panel; where the vertical axis has the same name, it is not repeated.
        x: the horizontal axis.
        y: the vertical axis.
        drawn: the lines; points that are not finite, or not positive on a logarithmic axis, are left out.
    """
    across = _Span(x, (p.x for line in drawn for p in line.points), 0.0, 100.0)
    ends = [v for line in drawn for p in line.points for v in (p.y, p.low, p.high) if v is not None]
    top = TOP if y.label == title else TOP + CAPTION
    height = HEIGHT + top - TOP
    up = _Span(y, ends, height - BOTTOM, top)
    parts = [_frame(x, "" if y.label == title else y.label, across, up)]
    for number, line in enumerate(drawn):
        shown = [p for p in line.points if _shown(x, p.x) and _shown(y, p.y)]
        parts.append(_line(line, shown, across, up, number * GOLDEN % 1, height))
    return Panel(title, _svg(parts, height, _alt(title, x, y, drawn)), _alt(title, x, y, drawn))


def bars(title: str, x: Axis, y: Axis, drawn: Sequence[Line]) -> Panel:
    """Draw bars from zero, those of one place side by side; places are whole numbers, one apart.

    Args:
        title: of the panel.
        x: the horizontal axis.
        y: the vertical axis.
        drawn: the bars of each key, as lines' points; those that are not finite are left out.
    """
    places = sorted({p.x for line in drawn for p in line.points})
    ends = [v for line in drawn for p in line.points for v in (p.y, p.low, p.high) if v is not None]
    ticks = places[:: math.ceil(len(places) / 8)]
    across = _Span(Axis(x.label, ticks=ticks, low=places[0] - 0.5, high=places[-1] + 0.5), places, 0.0, 100.0)
    up = _Span(y, [0.0, *ends], HEIGHT + CAPTION - BOTTOM, TOP + CAPTION)
    width = BARS / len(drawn)
    parts = [_frame(x, y.label, across, up)]
    for number, line in enumerate(drawn):
        shapes = [
            _bar(
                line.key, p, across(p.x - BARS / 2 + number * width), across(p.x - BARS / 2 + (number + 1) * width), up
            )
            for p in line.points
            if math.isfinite(p.y)
        ]
        parts.append(_series(line.key, shapes))
    alt = _alt(title, x, y, drawn)
    return Panel(title, _svg(parts, HEIGHT + CAPTION, alt), alt)


def dots(title: str, x: Axis, rows: Sequence[tuple[str, Sequence[tuple[Key, Point]]]]) -> Panel:
    """Draw one row for each name, with a dot for each value on a common axis, and a bar for its uncertainty.

    Args:
        title: of the panel.
        x: the common axis.
        rows: name and dots (``dot``) of each row.
    """
    pitch = ROW + max(20.0, 6.0 * max((len(row) for _, row in rows), default=0) + 10)
    height = pitch * len(rows) + TOP + BOTTOM
    ends = [v for _, row in rows for _, p in row for v in (p.x, p.low, p.high) if v is not None]
    across = _Span(x, ends, 0.0, 100.0)
    parts = [_grid_x(x, across, TOP, height - BOTTOM)]
    for number, (name, row) in enumerate(rows):
        top = TOP + pitch * number
        at = top + (ROW + pitch) / 2
        short = name if len(name) <= NAME else name[: NAME - 1] + "…"
        parts.append(Markup('<line class="grid" x1="0" x2="100%" y1="{0}" y2="{0}"/>').format(at))
        parts.append(Markup('<text class="t" y="{}">{}</text>').format(top + ROW - 6, short))
        for i, (key, p) in enumerate(row):
            if not math.isfinite(p.x):
                continue
            y, shapes = at + 6 * (i - (len(row) - 1) / 2), []
            if p.low is not None and p.high is not None:
                bar = Markup('<line class="bar" x1="{0}%" x2="{1}%" y1="{2}" y2="{2}"/>')
                shapes.append(bar.format(across(p.low), across(p.high), y))
            shapes.append(_mark(key, across(p.x), y, f"{name}, {key.label}: {x.said(p.x)}", p.source))
            parts.append(_series(key, shapes))
    values = "; ".join(f"{name}: " + ", ".join(f"{key.label} {x.said(p.x)}" for key, p in row) for name, row in rows)
    alt = f"{title}. {x.label}. {values}."
    return Panel(title, _svg(parts, height, alt, " bare"), alt)


def dot(value: Node, error: Node | None = None) -> Point:
    """Return a number as a dot of ``dots``.

    Args:
        value: the number.
        error: its standard error; a bar shows it to both sides where it is finite.
    """
    x, half = value.number(), math.nan if error is None else error.number()
    low, high = (x - half, x + half) if math.isfinite(half) else (None, None)
    return Point(x, 0.0, low, high, value.source)


def swatch(key: Key) -> Markup:
    """Draw a legend's sample of a line."""
    return Markup(
        '<svg class="swatch s{}" viewBox="0 0 28 14" aria-hidden="true"><path class="line d{}" d="M1 7H27"/>{}</svg>'
    ).format(key.colour, key.variant % VARIANTS, marker(key, 14.0, 7.0))


def _svg(parts: Sequence[Markup], height: float, alt: str, kind: str = "") -> Markup:
    return Markup('<svg class="chart{}" height="{:g}" role="img" aria-label="{}">{}</svg>').format(
        kind, height, alt, Markup("").join(parts)
    )


def _series(key: Key, shapes: Sequence[Markup]) -> Markup:
    """Return what belongs to a line of the legend, which shows and hides it by its name."""
    return Markup('<g class="s{}" data-series="{}">{}</g>').format(key.colour, key.label, Markup("").join(shapes))


def _frame(x: Axis, caption: str, across: _Span, up: _Span) -> Markup:
    parts = [_grid_x(x, across, up.end, up.start)]
    for tick in up.ticks:
        at = up(tick)
        parts.append(Markup('<line class="grid" x1="0" x2="100%" y1="{0}" y2="{0}"/>').format(at))
        parts.append(Markup('<text class="t yl" x="-6" y="{}">{}</text>').format(at + 4, up.said(tick)))
    parts.append(Markup('<text class="t" x="{:g}" y="11">{}</text>').format(-MARGIN, caption))
    return Markup("").join(parts)


def _grid_x(x: Axis, across: _Span, top: float, floor: float) -> Markup:
    parts = [Markup('<line class="axis" x1="0" x2="100%" y1="{0}" y2="{0}"/>').format(floor)]
    free = -math.inf  # where the last number ends; one that would run into it is left out
    for tick in across.ticks:
        at, said = across(tick), across.said(tick)
        parts.append(Markup('<line class="grid" x1="{0}%" x2="{0}%" y1="{1}" y2="{2}"/>').format(at, top, floor))
        pixel, half = at / 100 * NARROW, len(said) * DIGIT / 2
        if pixel - half > free:
            parts.append(Markup('<text class="t xl" x="{}%" y="{}">{}</text>').format(at, floor + 15, said))
            free = pixel + half
    parts.append(Markup('<text class="t al" x="50%" y="{}">{}</text>').format(floor + 33, x.label))
    return Markup("").join(parts)


def _shown(axis: Axis, value: float) -> bool:
    return math.isfinite(value) and (axis.scale == "linear" or value > 0)


def _line(line: Line, points: Sequence[Point], across: _Span, up: _Span, phase: float, height: float) -> Markup:
    """Draw a line; ``phase`` (0 ... 1) is where its first marker stands if only a few points have one."""
    places = [(across(p.x), up(p.y)) for p in points]
    ranged = [(across(p.x), up(p.low), up(p.high)) for p in points if p.low is not None and p.high is not None]
    paths = []
    if line.interval and ranged:
        edge = [f"{a} {low}" for a, low, _ in ranged] + [f"{a} {high}" for a, _, high in reversed(ranged)]
        paths.append(Markup('<path class="interval" d="M{}Z"/>').format("L".join(edge)))
    elif ranged:
        bars = "".join(f"M{a} {low}V{high}" for a, low, high in ranged)
        paths.append(Markup('<path class="bar" d="{}"/>').format(bars))
    if line.joined and len(places) > 1:
        track = "L".join(f"{a} {b}" for a, b in places)
        paths.append(Markup('<path class="line d{}" d="M{}"/>').format(line.key.variant % VARIANTS, track))
    parts = [_stretched(paths, height)] if paths else []
    told = [f"{line.key.label}, {across.axis.said(p.x)}: {up.axis.said(p.y)}" for p in points]
    if line.marks or len(places) == 1:
        marked = zip(places, told, points, strict=True)
        parts += [_mark(line.key, a, b, said, p.source) for (a, b), said, p in marked]
    elif places:
        at = {int((n + phase) / SPARSE_MARKS * len(places)) for n in range(SPARSE_MARKS)}
        parts += [_place(*places[n], marker(line.key, 0.0, 0.0)) for n in sorted(at)]
        step = math.ceil(len(places) / HOVER)
        parts += [_told(_place(*places[n], SPOT), told[n], points[n].source) for n in range(0, len(places), step)]
    return _series(line.key, parts)


def _stretched(paths: Sequence[Markup], height: float) -> Markup:
    """Return paths drawn in percentages across: they grow with the chart, the width of their strokes does not."""
    return Markup('<svg viewBox="0 0 100 {0:g}" height="{0:g}" preserveAspectRatio="none">{1}</svg>').format(
        height, Markup("").join(paths)
    )


def _place(x: float, y: float, shape: Markup) -> Markup:
    """Return a shape around 0 at a percentage across and a pixel down."""
    return Markup('<svg x="{}%" y="{}">{}</svg>').format(x, y, shape)


def _bar(key: Key, point: Point, left: float, right: float, up: _Span) -> Markup:
    """Draw a bar from zero to a point, and its range of uncertainty."""
    top, floor = sorted((up(point.y), up(0.0)))
    shape = Markup('<rect class="column{}" x="{}%" y="{}" width="{:.2f}%" height="{:.1f}"/>').format(
        " hollow" if key.variant % 2 else "", left, top, right - left, max(floor - top, 0.5)
    )
    if point.low is not None and point.high is not None:
        middle = round((left + right) / 2, 2)
        shape += Markup('<line class="bar" x1="{0}%" x2="{0}%" y1="{1}" y2="{2}"/>').format(
            middle, up(point.low), up(point.high)
        )
    return _told(shape, f"{key.label}, {point.x:g}: {up.axis.said(point.y)}", point.source)


def _mark(key: Key, x: float, y: float, label: str, source: str) -> Markup:
    return _told(_place(x, y, SPOT + marker(key, 0.0, 0.0)), label, source)


def _told(shape: Markup, label: str, source: str) -> Markup:
    """Return a shape that says what it shows, and where that comes from."""
    tooltip = Markup("<title>{}</title>").format(f"{label} ({source})" if source else label)
    return Markup('<g data-source="{}">{}{}</g>').format(source, shape, tooltip)


def _alt(title: str, x: Axis, y: Axis, drawn: Sequence[Line]) -> str:
    """Describe a chart in words: where each line begins and ends."""
    ranges = []
    for line in drawn:
        points = [p for p in line.points if math.isfinite(p.y)]
        if points:
            ends = dict.fromkeys((points[0], points[-1]))
            ranges.append(f"{line.key.label}: " + ", ".join(f"{y.said(p.y)} at {x.said(p.x)}" for p in ends))
    about = f"{y.label} against {x.label}"
    return ". ".join([*([] if title == y.label else [title]), about, "; ".join(ranges)]) + "."


def _thousands(value: float) -> str:
    return f"{value / 1e6:g}M" if abs(value) >= 1e6 else f"{value / 1e3:g}k"

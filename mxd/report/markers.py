"""Markers of charts as inline SVG: a shape for each method, its filling for each variant."""

import math
from itertools import chain

from markupsafe import Markup

from mxd.report.parts import Key

RADIUS = 3.8
"""Of a circle, in the chart's units; the other shapes look as large."""
VARIANTS = 4
"""Fillings, and patterns of dashes; further variants have a ring around the marker."""


def _turned(corners: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return [((x - y) / math.sqrt(2), (x + y) / math.sqrt(2)) for x, y in corners]


def _steps(corners: list[tuple[float, float]]) -> str:
    """Return a polygon as moves from corner to corner, the first from the middle."""
    before = [(0.0, 0.0), *corners]
    return "l".join(f"{x - a:.2f} {y - b:.2f}" for (a, b), (x, y) in zip(before, corners, strict=False)) + "Z"


_STAR = [
    (r * math.sin(n * math.pi / 5), -r * math.cos(n * math.pi / 5)) for n, r in enumerate(chain(*[(5.4, 2.3)] * 5))
]
_QUARTER = [(1.5, -4.4), (1.5, -1.5), (4.4, -1.5)]
_PLUS = [(x * a - y * b, x * b + y * a) for a, b in ((1, 0), (0, 1), (-1, 0), (0, -1)) for x, y in _QUARTER]
OUTLINES = {
    "s": _steps([(-3.4, -3.4), (3.4, -3.4), (3.4, 3.4), (-3.4, 3.4)]),
    "^": _steps([(0.0, -4.4), (4.4, 3.2), (-4.4, 3.2)]),
    "v": _steps([(0.0, 4.4), (4.4, -3.2), (-4.4, -3.2)]),
    "<": _steps([(-4.4, 0.0), (3.2, -4.4), (3.2, 4.4)]),
    ">": _steps([(4.4, 0.0), (-3.2, -4.4), (-3.2, 4.4)]),
    "D": _steps([(0.0, -4.8), (4.8, 0.0), (0.0, 4.8), (-4.8, 0.0)]),
    "d": _steps([(0.0, -5.4), (2.9, 0.0), (0.0, 5.4), (-2.9, 0.0)]),
    "P": _steps(_PLUS),
    "X": _steps(_turned(_PLUS)),
    "*": _steps(_STAR),
    "_": _steps([(-4.8, -1.5), (4.8, -1.5), (4.8, 1.5), (-4.8, 1.5)]),
}
"""Polygons by matplotlib's letter, as paths from their middle; a circle is what has none."""


def marker(key: Key, x: float, y: float) -> Markup:
    """Return a line's marker at a place; its group or an element around it has the line's class.

    Args:
        key: the line.
        x: across.
        y: down.
    """
    filling, ringed = key.variant % VARIANTS, key.variant >= VARIANTS
    parts = [_outline(key.marker, x, y, " hollow" if filling in (1, 2) else "")]
    if filling >= 2:
        parts.append(_circle("dot" if filling == 2 else "hole", x, y, 1.4))
    if ringed:
        parts.append(_circle("ring", x, y, 6.6))
    return Markup("").join(parts)


def _outline(letter: str, x: float, y: float, filling: str) -> Markup:
    if letter not in OUTLINES:
        return _circle(f"mark{filling}", x, y, RADIUS)
    return Markup('<path class="mark{}" d="M{} {}m{}"/>').format(filling, round(x, 1), round(y, 1), OUTLINES[letter])


def _circle(name: str, x: float, y: float, radius: float) -> Markup:
    return Markup('<circle class="{}" cx="{}" cy="{}" r="{}"/>').format(name, round(x, 1), round(y, 1), radius)

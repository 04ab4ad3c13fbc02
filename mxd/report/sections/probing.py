"""Do single units tell known classes apart? The best held-out F1 of each class, and the unit that got it."""

import math
from collections.abc import Sequence
from itertools import pairwise

from mxd.metrics.units import F1, F1_ALWAYS, MEAN_F1, MEAN_F1_TRAIN
from mxd.report.parts import (
    NOTHING,
    Cell,
    Column,
    Figure,
    Key,
    Panel,
    Part,
    Section,
    Table,
    column,
    measured,
    number,
    slots,
)
from mxd.report.replacements import Results, usual
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, dot, dots, lines

DENSITIES = 3
"""Classes of a set whose densities are drawn."""


def section(run: Run) -> Section | None:
    """Return the probing results, a set at a time; ``None`` where nothing was probed."""
    results = run.results("probing")
    if not results:
        return None
    parts: list[Part] = []
    for name in dict.fromkeys(name for _, result in results for name, _ in result.items()):
        here = [(r, result[name]) for r, result in results if result.get(name)]
        parts += [_figure(name, usual(here)), _table(name, here), *_densities(name, usual(here))]
    lead = (
        "A logistic regression on one unit's pre-activation at a time, one class against the rest, held-out F1 of the "
        "best of the 100 units whose means differ most. Baselines: the same probe on other units."
    )
    return Section("probing", "Sparse probing", lead, parts)


Best = dict[int, list[tuple[str, float]]]
"""Unit -> the classes for which it is the best unit: name and F1."""


def best_probes(run: Run) -> dict[str, Best]:
    """Return which units of each replacement are best at telling a class."""
    best: dict[str, Best] = {}
    for replacement, result in run.results("probing"):
        for name, probed in result.items():
            for label, probe in probed["classes"].items():
                unit, f1 = probe.get("unit"), probe["f1"].number()
                if unit is not None and unit.value is not None and math.isfinite(f1):
                    units = best.setdefault(replacement.name, {})
                    units.setdefault(int(unit.number()), []).append((f"{name}: {label}", f1))
    return best


def _labels(results: Results) -> list[str]:
    return list(dict.fromkeys(label for _, probed in results for label, _ in probed["classes"].items()))


def _figure(name: str, results: Results) -> Figure:
    keys = slots([replacement.line for replacement, _ in results])
    rows = []
    for label in _labels(results):
        known = [(keys[r.line], probed["classes"].get(label)) for r, probed in results]
        points = [(key, dot(probe["f1"])) for key, probe in known if probe]
        rows.append((label, points))
    level = results[0][1]["level"].text()
    caption = (
        f"{name}, {level} level: best held-out F1 of a single unit for each class; further right is better. After "
        "figures 4, 13 and 16 of the MxD paper."
    )
    return Figure(caption, [dots(name, Axis(F1.label, low=0.0, high=1.0), rows)], list(keys.values()))


def _table(name: str, results: Results) -> Table:
    labels = _labels(results)
    first = results[0][1]["classes"].value
    rows = []
    for replacement, probed in results:
        cells = [measured(probed, MEAN_F1), measured(probed, MEAN_F1_TRAIN)]
        for label in labels:
            probe = probed["classes"].get(label)
            cells.append(_score(probe) if probe else Cell(NOTHING))
        rows.append([Cell(replacement.label), *cells])
    always = [results[0][1]["classes"][label].get("f1_always") if label in first else None for label in labels]
    answers = [number(probe, F1_ALWAYS.form) for probe in always]
    rows.append([Cell(F1_ALWAYS.title), Cell(NOTHING), Cell(NOTHING), *answers])
    caption = (
        f"{name}: F1, and the unit that got it. The unit is chosen by the same held-out texts, as in the paper, which "
        f"flatters; “{MEAN_F1_TRAIN.title}” is the {MEAN_F1_TRAIN.note}."
    )
    columns = [Column("probe on"), column(MEAN_F1), column(MEAN_F1_TRAIN), *map(Column, labels)]
    return Table(caption, columns, rows)


def _score(probe: Node) -> Cell:
    cell, unit = number(probe["f1"], F1.form), probe.get("unit")
    known = unit is not None and unit.value is not None
    return Cell(f"{cell.text} #{unit.number():.0f}", cell.source) if unit is not None and known else cell


def _densities(name: str, results: Results) -> list[Part]:
    """Draw the densities of the first of this run's own replacements that has some."""
    for replacement, probed in results:
        shown = [(label, probe) for label, probe in probed["classes"].items() if probe.get("density")]
        if replacement.path is not None and shown:
            shown.sort(key=lambda pair: -pair[1]["f1"].number())
            caption = (
                f"{name}, {replacement.label}: densities of the best unit's pre-activation in texts of the class and "
                "in all others. The further apart, the better the unit tells the class. After figures 14, 15 and 17."
            )
            keys = slots(["the class", "all others"])
            panels = [_density(label, probe, list(keys.values())) for label, probe in shown[:DENSITIES]]
            return [Figure(caption, panels, list(keys.values()))]
    return []


def _density(label: str, probe: Node, keys: Sequence[Key]) -> Panel:
    edges = probe["density"]["edges"].numbers()
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    drawn = []
    for key, side in zip(keys, ("positive", "negative"), strict=True):
        heights = probe["density"][side]
        points = [Point(x, h.number(), 0.0, h.number(), h.source) for x, h in zip(middles, heights, strict=False)]
        drawn.append(Line(key, points, marks=False, interval=True))
    title = f"{label}: unit {probe['unit'].number():.0f}, {F1.title} {probe['f1'].number():.2f}"
    return lines(title, Axis("pre-activation"), Axis("density", low=0.0), drawn)

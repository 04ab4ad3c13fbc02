"""What is lost without a unit: how many classes of text each matters for, beside random coefficients."""

import math
from collections.abc import Sequence
from itertools import pairwise

from mxd.common.numbers import plural
from mxd.metrics.dropped import ABLATION, POLYSEMANTICITY, POLYSEMANTICITY_RANDOM
from mxd.metrics.metric import Metric
from mxd.metrics.units import RATE
from mxd.report.parts import (
    NOTHING,
    Cell,
    Column,
    Figure,
    Key,
    Part,
    Section,
    Table,
    column,
    measured_with_error,
    number,
    slots,
)
from mxd.report.replacements import Replacement, Results, usual
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, lines
from mxd.report.tables import most_affected, most_lost

UNITS = 10
"""Units of a replacement that are listed."""
RANDOM = "random coefficients"


def section(run: Run) -> Section | None:
    """Return what dropping single units did; ``None`` where none were."""
    results = run.results("ablation")
    if not results:
        return None
    what = {
        "probe": "a probe of the spliced model's final hidden states tells the class of a text",
        "token": "the most probable next token is right, class by class",
    }
    asked = " or ".join(what.get(target, target) for target in dict.fromkeys(n["target"].text() for _, n in results))
    lead = (
        "Had a unit not contributed, on which classes of text would accuracy have fallen? Units are dropped one by "
        f"one; accuracy is how often {asked}. d is the share of a class's accuracy that is lost. A unit that serves "
        "one class alone takes all of its accuracy with it and nothing else (p = 0). Dropping as many random "
        "coefficients is the control: what it does as well says nothing about units."
    )
    parts: list[Part] = [_table(results), _by_units(results), _histograms(results)]
    parts += [_leading(replacement, result) for replacement, result in usual(results)]
    return Section("ablation", "Dropping units", lead, parts)


def _table(results: Results) -> Table:
    rows = [[Cell(r.label), _units(n), *(measured_with_error(n, metric) for metric in ABLATION)] for r, n in results]
    caption = "Polysemanticity of units, ± standard error over units. After section 4.1.2 of the muMoE paper."
    return Table(caption, [Column("replacement"), Column("units"), *map(column, ABLATION)], rows, legend=True)


def _units(result: Node) -> Cell:
    return number(result["num_units"], "{:,.0f}")


def _named(replacement: Replacement, result: Node) -> str:
    return f"{replacement.label}, {plural(result['num_units'].number(), 'unit')}"


def _by_units(results: Results) -> Figure:
    """After figure 3 of the muMoE paper; replacements that choose nothing, such as neurons, stand in every panel."""
    keys = slots([name for r, _ in results for name in (r.line, _random(r.line))])
    facets = dict.fromkeys((r.layer, r.budget, r.where) for r, _ in results if not r.floor)
    facets = facets or dict.fromkeys((r.layer, r.budget, r.where) for r, _ in results)
    panels = []
    for layer, budget, where in facets:
        here = [(r, n) for r, n in results if r.layer == layer and (r.floor or (r.budget, r.where) == (budget, where))]
        drawn = []
        for line in dict.fromkeys(r.line for r, _ in here):
            of_line = [n for r, n in here if r.line == line]
            for key, metric in ((keys[line], POLYSEMANTICITY), (keys[_random(line)], POLYSEMANTICITY_RANDOM)):
                points = sorted((_point(n, metric) for n in of_line), key=lambda point: point.x)
                drawn.append(Line(key, points))
        title = ", ".join(filter(None, (budget, where))) or "units"
        panels.append(lines(title, Axis("number of units", "log"), Axis(POLYSEMANTICITY.label), drawn))
    caption = (
        f"{POLYSEMANTICITY.label.capitalize()} against the number of units; dashed: {RANDOM}. Bars are standard "
        "errors. Lower is better where units are below their control; near 1 is also what units have that change "
        "little. After figure 3 of the muMoE paper."
    )
    return Figure(caption, panels, list(keys.values()))


def _random(line: str) -> str:
    return f"{line} ({RANDOM})"


def _point(result: Node, metric: Metric) -> Point:
    value, error = result.follow(metric.key), result.follow(metric.error)
    height = math.nan if value is None else value.number()
    half = math.nan if error is None else error.number()
    units = result["num_units"].number()
    if value is None or not math.isfinite(half):
        return Point(units, height, source="" if value is None else value.source)
    return Point(units, height, height - half, height + half, value.source)


def _histograms(results: Results) -> Figure:
    panels = []
    keys = [Key("units", 0, "o"), Key("beyond chance", 1, "s"), Key(RANDOM, 4, "^", 1)]
    for replacement, result in usual(results):
        found = result["histogram"]
        middles = [(low + high) / 2 for low, high in pairwise(found["edges"].numbers())]
        drawn = []
        for key, kind in zip(keys, ("units", "beyond_chance", "control"), strict=True):
            counts = zip(middles, found[kind], strict=False)
            drawn.append(Line(key, [Point(x, n.number(), source=n.source) for x, n in counts], marks=False))
        panels.append(lines(_named(replacement, result), Axis("p"), Axis("units that change anything", low=0.0), drawn))
    return Figure("How polysemantic single units are, and as many random coefficients.", panels, keys)


def _leading(replacement: Replacement, result: Node) -> Table:
    classes = result["classes"].texts()
    drops = {unit: node["d"].numbers() for unit, node in result["units"].items()}
    rows: list[Sequence[Cell]] = []
    for unit in most_lost(drops)[:UNITS]:
        node = result["units"][unit]
        name = f"#{unit}" if node["beyond_chance"].value else f"(#{unit})"
        affected = Cell(most_affected(classes, drops[unit]), node["d"].source)
        p = node.get("p")
        said = number(p, POLYSEMANTICITY.form) if p is not None else Cell(NOTHING)
        rows.append([Cell(name, node.source), number(node["rate"], RATE.form), said, affected])
    caption = (
        f"{_named(replacement, result)}: those that a class needs most; in brackets where that is not beyond chance."
    )
    columns = [Column("unit"), column(RATE), Column("p"), Column("classes", "share of the accuracy that is lost")]
    return Table(caption, columns, rows)

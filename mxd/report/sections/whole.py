"""Is it still the model with all blocks replaced? The loss by number of blocks and by block, and what it writes."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mxd.metrics.faithful import CE_INCREASE, NMSE
from mxd.metrics.metric import Metric
from mxd.metrics.whole import ALONE, ALONE_SUM, BY_BLOCK, GARBAGE, ON_SPLICED, WHOLE, WHOLE_ORDERS, WON_BACK
from mxd.report.figures import PALETTE, STYLES
from mxd.report.parts import (
    NOTHING,
    Cell,
    Column,
    Figure,
    Key,
    Part,
    Piece,
    Section,
    Table,
    column,
    measured_with_error,
    number,
    slots,
)
from mxd.report.replacements import Replacement, Results
from mxd.report.run import Run
from mxd.report.sections.generation import continuations
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, bars, lines

PROMPTS = 10
"""Prompts whose continuations are shown."""


def section(run: Run) -> Section | None:
    """Return what sets of layers do to the whole model; ``None`` where it was not measured."""
    results = sorted(run.results("whole"), key=_order)
    if not results:
        return None
    first = results[0][1]
    lead = (
        "All layers of a set are spliced in at once, at every position, and measured on "
        f"{first['tokens'].number():,.0f} held-out tokens. The base model's cross-entropy is "
        f"{first['ce_base'].number():.4f} ± {first['ce_base_se'].number():.4f} nats per token. Where the "
        f"{CE_INCREASE.title} is larger than “{ALONE_SUM.title}”, what the blocks add one by one, errors compound."
    )
    told = [(replacement, result["generation"]["examples"]) for replacement, result in results]
    caption = "On top what the base model writes; then, for each set, as far as it is the same, and what follows."
    parts: list[Part] = [
        _table("All blocks replaced.", results, WHOLE),
        _by_number(results),
        _numbers(results),
        _by_block(results),
        *(_blocks(replacement.label, result) for replacement, result in results),
        _table(
            "What it writes. A model that has lost its way repeats itself, or writes what the base model finds "
            "improbable; text in a loop is probable, so look at both.",
            results,
            GARBAGE,
        ),
        *continuations(told, PROMPTS, agreed_first, caption),
    ]
    return Section("whole", "The whole model", lead, parts)


def _order(pair: tuple[Replacement, Node]) -> tuple[Any, ...]:
    """Return the sort key of sets: by the first layer's method and K."""
    replacement, result = pair
    first = result["replacements"][0]
    method, k, known = first["method"].text(), first["k"].number(), list(STYLES)
    place = known.index(method) if method in known else len(known)
    return place, method, k if math.isfinite(k) else math.inf, replacement.name


def _table(caption: str, results: Results, metrics: Sequence[Metric]) -> Table:
    rows = [[Cell(r.label), *(measured_with_error(result, metric) for metric in metrics)] for r, result in results]
    return Table(caption, [Column("set"), *map(column, metrics)], rows, legend=True)


def _by_number(results: Results) -> Figure:
    """Draw the CE increase against the number of blocks replaced, a panel for each set."""
    keys = slots(list(WHOLE_ORDERS.values()))
    panels = []
    for replacement, result in results:
        numbers = result["by_number"]["numbers"].numbers()
        drawn = [
            Line(keys[said], _points(numbers, result["by_number"][order]["points"]), interval=order == "random")
            for order, said in WHOLE_ORDERS.items()
        ]
        axes = Axis("blocks replaced", ticks=numbers), Axis(CE_INCREASE.label)
        panels.append(lines(replacement.label, *axes, drawn))
    caption = (
        "The loss against the number of blocks replaced, from the first block up, from the last one down, and in "
        "random orders: their mean, shaded from the lowest to the highest. Bars are standard errors. Lower is better; "
        "a line that bends upwards says that errors compound."
    )
    return Figure(caption, panels, list(keys.values()))


def _points(numbers: Sequence[float], points: Node) -> list[Point]:
    found = []
    for x, point in zip(numbers, points, strict=False):
        value, error = point[CE_INCREASE.key], point.get(CE_INCREASE.error)
        low, high = (point.get(end) for end in ("low", "high"))
        if low is not None and high is not None:
            found.append(Point(x, value.number(), low.number(), high.number(), value.source))
        else:
            found.append(_point(x, value, error))
    return found


def _point(x: float, value: Node | None, error: Node | None) -> Point:
    """Return a point with its standard error, where that is known."""
    if value is None:
        return Point(x, math.nan)
    height = value.number()
    if error is None or not isinstance(error.value, float):
        return Point(x, height, source=value.source)
    return Point(x, height, height - error.value, height + error.value, value.source)


def _numbers(results: Results) -> Table:
    """Return the numbers of the figure above."""
    counts = sorted({n for _, result in results for n in result["by_number"]["numbers"].numbers()})
    rows = []
    for replacement, result in results:
        numbers = result["by_number"]["numbers"].numbers()
        for order, said in WHOLE_ORDERS.items():
            points = dict(zip(numbers, result["by_number"][order]["points"], strict=False))
            cells = [_increase(points[n]) if n in points else Cell(NOTHING) for n in counts]
            rows.append([Cell(f"{replacement.label}, {said}"), *cells])
    caption = f"{CE_INCREASE.title} by the number of blocks replaced, in nats; of random orders the mean and the range."
    return Table(caption, [Column("set"), *(Column(f"{n:g}", better=CE_INCREASE.better) for n in counts)], rows)


def _increase(point: Node) -> Cell:
    low, high = (point.get(end) for end in ("low", "high"))
    if low is None or high is None or low.number() == high.number():
        return measured_with_error(point, CE_INCREASE)
    cell = number(point[CE_INCREASE.key], CE_INCREASE.form)
    ends = (CE_INCREASE.form.format(end.number()) for end in (low, high))
    return Cell(f"{cell.text} ({' to '.join(ends)})", cell.source)


def _by_block(results: Results) -> Figure:
    """Draw what each block adds and its error, two panels for each set."""
    pairs = ((ALONE, WON_BACK), (NMSE, ON_SPLICED[0]))
    labels = (("replaced alone", "all replaced but this one: won back"), ("base inputs", "spliced inputs"))
    colours = (("blue", "amber"), ("teal", "violet"))
    keys = [[_key(*each) for each in zip(*pair, range(2), strict=True)] for pair in zip(labels, colours, strict=True)]
    panels = []
    for replacement, result in results:
        blocks = [(float(name), block) for name, block in result["blocks"].items()]
        for metrics, both, y in zip(pairs, keys, (CE_INCREASE.label, NMSE.label), strict=True):
            drawn = []
            for metric, key in zip(metrics, both, strict=True):
                errors = (block.follow(metric.error) if metric.error else None for _, block in blocks)
                points = [_point(x, block.follow(metric.key), e) for (x, block), e in zip(blocks, errors, strict=True)]
                drawn.append(Line(key, points))
            panels.append(bars(replacement.label, Axis("block"), Axis(y), drawn))
    caption = (
        "Where the error comes from: what each block adds alone, and what the model with all blocks replaced wins back "
        "when this one is not; and the layer's reconstruction on the base model's inputs and on those it gets there, "
        "against the base MLP on the same inputs. Bars are standard errors."
    )
    return Figure(caption, panels, [key for both in keys for key in both])


def _key(label: str, colour: str, variant: int) -> Key:
    return Key(label, list(PALETTE).index(colour), "s", variant)


def _blocks(label: str, result: Node) -> Table:
    rows = [
        [Cell(name), *(measured_with_error(block, metric) for metric in BY_BLOCK)]
        for name, block in result["blocks"].items()
    ]
    caption = f"{label}, block by block: the layer's account on the base model's inputs, and on the spliced model's."
    return Table(caption, [Column("block"), *map(column, BY_BLOCK)], rows)


def agreed_first(base: Sequence[str], spliced: Sequence[str]) -> Iterator[Piece]:
    """Yield the beginning of a continuation as far as the base model's is the same, then the rest, to be read whole."""
    agreed = next((n for n, (a, b) in enumerate(zip(base, spliced, strict=False)) if a != b), len(spliced))
    yield Piece("same", "".join(spliced[:agreed]))
    yield Piece("added", "".join(spliced[agreed:]))

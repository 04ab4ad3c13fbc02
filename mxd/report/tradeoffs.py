"""Figures of how faithful replacements are against what that is bought with: units, decomposition, rank, cost.

All numbers are the results'; a figure, or a panel of it, is drawn where there are some for it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mxd.metrics.faithful import ACTIVE_PARAMS, CE_INCREASE, FIXED, FLOPS, INTERACTION, KL, L0, NMSE, ROUTED
from mxd.metrics.metric import Metric
from mxd.metrics.units import NORMALIZED_RANK
from mxd.report.parts import Figure, Key, Panel, slots
from mxd.report.replacements import Replacement, Results
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, dot, dots, lines

DRAWN = (NMSE, CE_INCREASE, KL)
"""How faithful: a panel for each."""
DECADE = 10.0
"""Numbers are shown on a logarithmic axis where the largest is more than so many times the smallest."""
CLOSE = 0.02
"""L0 within this share of K is K."""
Keys = Mapping[str, Key]


@dataclass(frozen=True)
class Quantity:
    """What stands along a horizontal axis."""

    label: str
    of: Callable[[Replacement, Node], float]
    ticks: Sequence[float] | None = None
    log: bool = False
    """Whether the axis is always logarithmic."""

    @classmethod
    def metric(cls, metric: Metric, label: str = "") -> "Quantity":
        """Return a metric of a splice or of its layer."""
        return cls(label or metric.label, lambda _, result: _number(value(result, metric.key)))


def mixture(result: Node) -> float:
    """Return how many times the error grows when every unit adds its mean direction: 1 for a transcoder."""
    fixed, error = value(result, FIXED.key), value(result, NMSE.key)
    return _number(fixed) / _number(error) if fixed is not None and _number(error) > 0 else math.nan


MIXTURE = Quantity("NMSE with fixed directions / NMSE", lambda _, result: mixture(result), log=True)


def figures(results: Results, structure: Results) -> list[Figure]:
    """Return the figures of some splices.

    Args:
        results: of ``faithfulness.json``.
        structure: of ``structure.json``, for the ranks of experts.
    """
    single = [(r, n) for r, n in results if r.layer is not None]
    keys = slots([replacement.line for replacement, _ in single])  # the same in all figures
    drawn: list[Figure | None] = []
    blocks = sorted({r.layer or 0 for r, _ in single})
    for make in (_frontier, _by_activity, _by_decomposition, _by_cost):
        for block in blocks:
            where = f" of block {block}" if len(blocks) > 1 else ""
            drawn.append(make([(r, n) for r, n in single if r.layer == block], keys, where))
    drawn += [_by_rank(single, structure, keys), _variants(single)]
    return [figure for figure in drawn if figure is not None]


def value(result: Node, key: str) -> Node | None:
    """Return a metric of a splice, or of its layer where it has only one."""
    layers = [node for _, node in result["blocks"].items()]
    nodes = [result, *layers] if len(layers) == 1 else [result]
    return next((found for node in nodes if (found := node.follow(key)) is not None), None)


def _point(result: Node, x: float, metric: Metric) -> Point:
    node = value(result, metric.key)
    if node is None:
        return Point(x, math.nan)
    height = node.number()
    error = value(result, metric.error) if metric.error else None
    half = error.number() if error is not None else math.nan
    if not math.isfinite(half):
        return Point(x, height, source=node.source)
    return Point(x, height, height - half, height + half, node.source)


def _panel(results: Results, x: Quantity, y: Metric, keys: Keys, joined: bool, floors: Results = ()) -> Panel | None:
    """Draw a metric against a quantity, one line for each method and variant; ``None`` where nothing is known.

    Args:
        results: what is drawn.
        x: the quantity.
        y: the metric.
        keys: of all lines of the figures.
        joined: whether the points of a line are connected.
        floors: drawn as level lines, from one end of the axis' ticks to the other.
    """
    ends = sorted({x.ticks[0], x.ticks[-1]}) if x.ticks else []
    drawn = []
    for name, key in keys.items():
        points = [_point(n, x.of(r, n), y) for r, n in results if r.line == name]
        points += [_point(n, end, y) for r, n in floors if r.line == name for end in ends]
        known = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
        drawn.append(Line(key, sorted(known, key=lambda p: p.x), joined=joined or bool(floors)))
    points = [p for line in drawn for p in line.points]
    if not points:
        return None
    across = _axis(x.label, (p.x for p in points), x.log, x.ticks)
    bars = [p.low for p in points if p.low is not None]
    return lines(y.label, across, _axis(y.label, (p.y for p in points), bars=bars), drawn)


def _axis(
    label: str,
    values: Iterable[float],
    log: bool = False,
    ticks: Sequence[float] | None = None,
    bars: Sequence[float] = (),
) -> Axis:
    """Return a logarithmic axis where that is asked for or values span more than a decade, else one from zero.

    Where values, or the lower ends of their bars, are negative, it begins below them.
    """
    known = list(values)
    if min(known) > 0 and (log or max(known) / min(known) > DECADE):
        return Axis(label, "log", ticks)
    return Axis(label, "linear", ticks, low=0.0 if min([*known, *bars]) >= 0 else None)


def _figure(
    title: str,
    results: Results,
    xs: Sequence[Quantity],
    ys: Sequence[Metric],
    keys: Keys,
    joined: bool = True,
    floors: Results = (),
) -> Figure | None:
    """Draw every metric against every quantity.

    Args:
        title: the caption.
        results: what is drawn.
        xs: the quantities.
        ys: the metrics.
        keys: of all lines of the figures.
        joined: whether the points of a line are connected.
        floors: drawn as level lines.
    """
    panels = [_panel(results, x, y, keys, joined, floors) for y in ys for x in xs]
    shown = {r.line for r, _ in [*results, *floors]}
    known = [panel for panel in panels if panel is not None]
    return Figure(title, known, [key for line, key in keys.items() if line in shown]) if known else None


def _frontier(results: Results, keys: Keys, where: str) -> Figure | None:
    sparse, floors = ([(r, n) for r, n in results if of_kind(r)] for of_kind in (lambda r: r.k, lambda r: r.floor))
    ks = sorted({float(r.k) for r, _ in sparse if r.k})
    if not ks:
        return None
    title = (
        f"The frontier{where}: error against K, the units active for a token. Lower is more faithful, further left "
        "is sparser. Bars are standard errors. After figures 10 and 3 of the MxD paper; KL beside them."
        + (" Level lines: maps that choose nothing, whatever K." if floors else "")
    )
    k = Quantity("K", lambda r, _: float(r.k or 0), ks, log=True)
    return _figure(title, sparse, [k], DRAWN, keys, floors=floors)


def _by_activity(results: Results, keys: Keys, where: str) -> Figure | None:
    """After figure 18 of the paper: all kinds of sparsity, by the units they use."""
    sparse = [(r, n) for r, n in results if not r.floor]
    x = Quantity.metric(L0, f"{L0.title}, {L0.note}")
    if all(r.k and abs(x.of(r, n) / r.k - 1) < CLOSE for r, n in sparse):
        return None
    title = (
        f"All kinds of sparsity{where}: error against the number of units active for a token, as measured. Lower and "
        "further left is better. After figure 18 of the MxD paper, whose penalty weighs all activations alike."
    )
    return _figure(title, sparse, [x], DRAWN, keys)


def _by_decomposition(results: Results, keys: Keys, where: str) -> Figure | None:
    title = (
        f"Faithfulness against decomposition{where}: each point is a replacement. Bottom right is better: lower is "
        f"more faithful, further right more of a mixture. “{FIXED.title}” over {NMSE.title} is 1 for a transcoder, "
        "whose units have one direction each, and for whatever explains little; "
        f"“{ROUTED.title}” is 0 for a dense MLP, which chooses nothing; “{INTERACTION.title}” is 0 for both. So what "
        "is right in the first column alone may be a dense MLP in disguise, and in the second alone a transcoder."
    )
    known = [(r, n) for r, n in results if math.isfinite(mixture(n))]
    xs = [MIXTURE, Quantity.metric(ROUTED, "routed share"), Quantity.metric(INTERACTION, "interaction share")]
    return _figure(title, known, xs, (NMSE, CE_INCREASE), keys, joined=False)


def _by_cost(results: Results, keys: Keys, where: str) -> Figure | None:
    title = (
        f"What faithfulness costs{where}: each point is a replacement. Lower is more faithful, further left "
        f"is cheaper. {FLOPS.title}: {FLOPS.note}; {ACTIVE_PARAMS.title}: {ACTIVE_PARAMS.note}."
    )
    xs = [Quantity.metric(FLOPS, "FLOPs a token"), Quantity.metric(ACTIVE_PARAMS, "active parameters a token")]
    return _figure(title, results, xs, (CE_INCREASE,), keys, joined=False)


def _by_rank(results: Results, structure: Results, keys: Keys) -> Figure | None:
    """After figure 12 of the paper: what the experts' rank costs, at one K."""
    ranks = {r.name: _number(node.get(NORMALIZED_RANK.key)) for r, node in structure}
    known = [(r, n) for r, n in results if math.isfinite(ranks.get(r.name, math.nan))]
    seen: dict[tuple[str, int | None, int | None], set[float]] = {}
    for r, _ in known:
        seen.setdefault((r.method, r.layer, r.k), set()).add(ranks[r.name])
    varied = {(layer, k) for (_, layer, k), values in seen.items() if len(values) > 1}
    known = [(r, n) for r, n in known if (r.layer, r.k) in varied]
    title = (
        "What rank costs: error against the experts' mean normalized rank (structure.json). Lower is more faithful. "
        "After figure 12 of the MxD paper."
    )
    return _figure(title, known, [Quantity(NORMALIZED_RANK.label, lambda r, _: ranks[r.name])], DRAWN, keys)


def _variants(results: Results) -> Figure | None:
    """After figure 19 of the paper, for whatever of one method was varied: encoders, ranks, random K."""
    settings = {(r.layer, r.method, r.k) for r, _ in results if r.variant}
    panels = []
    for layer, method, k in sorted(settings, key=str):
        here = [(r, n) for r, n in results if (r.layer, r.method, r.k) == (layer, method, k)]
        if len(here) < 2:
            continue
        key = slots([method])[method]
        several = k is None and len({r.budget for r, _ in here}) == len(here)
        rows = []
        for replacement, result in here:
            node = result["blocks"][str(layer)][NMSE.key]
            name = replacement.budget if several else replacement.variant
            rows.append((name, [(key, dot(node))]))
        setting = f"K = {k}" if k else "no K"
        panels.append(dots(f"{method}, block {layer}, {setting}", Axis(NMSE.label, low=0.0), rows))
    title = "Variants of one method side by side; further left is more faithful. After figure 19 of the MxD paper."
    return Figure(title, panels) if panels else None


def _number(node: Node | None) -> float:
    return math.nan if node is None else node.number()

"""Is it faithful, and does it decompose? The frontier figures, and every number of them in two tables."""

import math
from collections.abc import Callable, Sequence

from mxd.metrics import (
    CE_INCREASE,
    COST,
    DECOMPOSITION,
    FAITHFULNESS,
    FIXED,
    KL,
    L0,
    NMSE,
    NORMALIZED_RANK,
    ROUTED,
    SHARED,
    Metric,
)
from mxd.report.parts import Cell, Column, Figure, Part, Section, Table, column, number, slots, with_error
from mxd.report.replacements import Replacement, Results
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, dots, lines

TABLES = (
    ("Is it faithful? Every splice.", FAITHFULNESS),
    (
        f"Does it decompose? A low error with “{ROUTED.title}” near 0, or “{SHARED.title}” near 1, is a dense MLP in "
        f"disguise; one with “{FIXED.title}” near {NMSE.title} is a transcoder, or one in disguise.",
        DECOMPOSITION,
    ),
    ("What does it cost?", COST),
)

DRAWN = (NMSE, CE_INCREASE, KL)
"""What the figures show, one panel for each."""


def section(run: Run) -> Section | None:
    """Return the faithfulness of every splice; ``None`` where nothing was evaluated."""
    results = run.results("faithfulness")
    if not results:
        return None
    parts: list[Part] = [
        *_frontier(results),
        *_by_activity(results),
        *_by_rank(results, run.results("structure")),
        *_variants(results),
        *(_table(results, caption, metrics) for caption, metrics in TABLES),
        *_tasks(run),
    ]
    first, document = results[0][1], run.documents["faithfulness"][0]
    data = document["data"]
    text = f"{data['source'].text()}, {data['split'].text()}"
    lead = (
        f"Each replacement is spliced into {document['model'].text()}, at every position, and measured on "
        f"{first['tokens'].number():,.0f} held-out tokens ({text}). The base model's cross-entropy is "
        f"{first['ce_base'].number():.4f} ± {first['ce_base_se'].number():.4f} nats per token{_ablated(results)}."
    )
    return Section("faithfulness", "Faithfulness", lead, parts)


def _ablated(results: Results) -> str:
    by_block = {}
    for replacement, result in results:
        if replacement.layer is not None and result.get("ce_zero") is not None:
            zero, mean = result["ce_zero"].number(), result["ce_mean"].number()
            by_block[replacement.layer] = f"block {replacement.layer}: zero-ablated {zero:.4f}, mean-ablated {mean:.4f}"
    return "; " + "; ".join(by_block.values()) if by_block else ""


def _value(result: Node, key: str) -> Node | None:
    """Return a metric of a splice, or of its layer where it has only one."""
    layers = [node for _, node in result["blocks"].items()]
    nodes = [result, *layers] if len(layers) == 1 else [result]
    return next((value for node in nodes if (value := node.follow(key)) is not None), None)


def _single(results: Results) -> Results:
    return [(r, node) for r, node in results if r.layer is not None]


def _point(result: Node, x: float, metric: Metric) -> Point:
    node = _value(result, metric.key)
    if node is None:
        return Point(x, math.nan)
    value = node.number()
    error = _value(result, metric.error) if metric.error else None
    half = error.number() if error is not None else math.nan
    if not math.isfinite(half):
        return Point(x, value, source=node.source)
    return Point(x, value, value - half, value + half, node.source)


def _panels(
    results: Results, x_of: Callable[[Replacement, Node], float], x: Axis, title: str, floors: Results = ()
) -> Figure | None:
    """Draw the metrics of ``DRAWN`` against ``x_of``, one line for each method and variant.

    Args:
        results: what is drawn.
        x_of: where along the axis.
        x: the axis.
        title: the figure's.
        floors: drawn as level lines, from one end of the axis' ticks to the other.
    """
    keys = slots([replacement.line for replacement, _ in [*results, *floors]])
    ends = sorted({x.ticks[0], x.ticks[-1]}) if x.ticks else []
    panels = []
    for metric in DRAWN:
        drawn = []
        for line, key in keys.items():
            points = [_point(n, x_of(r, n), metric) for r, n in results if r.line == line]
            points += [_point(n, end, metric) for r, n in floors if r.line == line for end in ends]
            drawn.append(Line(key, sorted((p for p in points if math.isfinite(p.y)), key=lambda p: p.x)))
        if any(line.points for line in drawn):
            panels.append(lines(metric.label, x, _axis(metric.label, drawn), drawn))
    return Figure(title, panels, list(keys.values())) if panels else None


def _axis(label: str, drawn: Sequence[Line]) -> Axis:
    """Return a logarithmic axis where values span more than a decade, else one from zero."""
    values = [p.y for line in drawn for p in line.points]
    if min(values) > 0 and max(values) / min(values) > 10:
        return Axis(label, "log")
    return Axis(label, low=min(0.0, *values))


def _frontier(results: Results) -> list[Part]:
    figures = []
    blocks = {r.layer for r, _ in _single(results)}
    for layer in sorted(blocks, key=lambda block: block or 0):
        here, floors = (
            [(r, n) for r, n in _single(results) if r.layer == layer and of_kind(r)]
            for of_kind in (lambda r: r.k, lambda r: r.floor)
        )
        ks = sorted({float(r.k) for r, _ in here if r.k})
        if not ks:
            continue
        where = f" of block {layer}" if len(blocks) > 1 else ""
        title = (
            f"The frontier{where}: error against K, the units active for a token. Lower is more faithful, further left "
            "is sparser. Bars are standard errors. After figures 10 and 3 of the MxD paper; KL beside them."
            + (" Level lines: maps that choose nothing, whatever K." if floors else "")
        )
        figure = _panels(here, lambda r, _: float(r.k or 0), Axis("K", "log", ks), title, floors)
        figures += [figure] if figure else []
    return list(figures)


def _by_activity(results: Results) -> list[Part]:
    """After figure 18 of the paper: top-k and sparsities without a K, by the units they use."""
    single = [(r, n) for r, n in _single(results) if not r.floor]
    if all(r.k for r, _ in single):
        return []
    title = (
        "Sparsity by a penalty and by top-k: error against the number of units active for a token, as measured. Lower "
        "and further left is better. After figure 18 of the MxD paper, whose penalty weighs all activations alike."
    )
    figure = _panels(single, lambda _, n: _number(_value(n, L0.key)), Axis(f"{L0.title}, {L0.note}"), title)
    return [figure] if figure else []


def _by_rank(results: Results, structure: Results) -> list[Part]:
    """After figure 12 of the paper: what the experts' rank costs, at one K."""
    ranks = {r.name: _number(node.get(NORMALIZED_RANK.key)) for r, node in structure}
    known = [(r, n) for r, n in _single(results) if math.isfinite(ranks.get(r.name, math.nan))]
    seen: dict[tuple[str, int | None, int | None], set[float]] = {}
    for r, _ in known:
        seen.setdefault((r.method, r.layer, r.k), set()).add(ranks[r.name])
    varied = {(layer, k) for (_, layer, k), values in seen.items() if len(values) > 1}
    if not varied:
        return []
    known = [(r, n) for r, n in known if (r.layer, r.k) in varied]
    title = (
        "What rank costs: error against the experts' mean normalized rank (structure.json). Lower is more faithful. "
        "After figure 12 of the MxD paper."
    )
    figure = _panels(known, lambda r, _: ranks[r.name], Axis(NORMALIZED_RANK.label), title)
    return [figure] if figure else []


def _variants(results: Results) -> list[Part]:
    """After figure 19 of the paper, for whatever of one method was varied: encoders, ranks, random K."""
    settings = {(r.layer, r.method, r.k) for r, _ in _single(results) if r.variant}
    panels = []
    for layer, method, k in sorted(settings, key=str):
        here = [(r, n) for r, n in _single(results) if (r.layer, r.method, r.k) == (layer, method, k)]
        if len(here) < 2:
            continue
        key = slots([method])[method]
        rows = []
        for replacement, result in here:
            node = result["blocks"][str(layer)][NMSE.key]
            rows.append((replacement.variant, [(key, Point(node.number(), 0.0, source=node.source))]))
        panels.append(dots(f"{method}, block {layer}, {here[0][0].budget}", Axis(NMSE.label, low=0.0), rows))
    title = "Variants of one method side by side; further left is more faithful. After figure 19 of the MxD paper."
    return [Figure(title, panels)] if panels else []


def _table(results: Results, caption: str, metrics: Sequence[Metric]) -> Table:
    rows = []
    for replacement, result in results:
        head = replacement.label if replacement.layer is not None else _together(replacement, result)
        rows.append([Cell(head), *(number(_value(result, metric.key), metric.form) for metric in metrics)])
    return Table(caption, [Column("splice"), *map(column, metrics)], rows, legend=True)


def _together(replacement: Replacement, result: Node) -> str:
    """Return the name of a splice of several layers, or of a layer from elsewhere."""
    members = list(result["replacements"])
    several = f"{len(members)} layers at once" if len(members) > 1 else ""
    return f"{replacement.name}: {several}" if several else replacement.name


def _tasks(run: Run) -> list[Part]:
    """Scores of lm-eval for the base model and each splice."""
    parts: list[Part] = []
    for document in run.documents["faithfulness"]:
        scores = document.get("lm_eval")
        if scores is None:
            continue
        columns = {"base model": scores["base"]}
        columns |= {run.replacement(name).label: node for name, node in scores["spliced"].items()}
        rows = []
        for task, metrics in scores["base"].items():
            for metric in (name for name, _ in metrics.items() if "," in name and "_stderr," not in name):
                cells = [_score(column[task], metric) for column in columns.values()]
                rows.append([Cell(f"{task}: {metric.removesuffix(',none')}"), *cells])
        caption = f"Tasks of lm-eval {scores['version'].text()}, with standard errors."
        parts.append(Table(caption, [Column("task"), *map(Column, columns)], rows))
    return parts


def _score(metrics: Node, metric: str) -> Cell:
    return with_error(number(metrics[metric], "{:.4f}"), metrics.get(metric.replace(",", "_stderr,")))


def _number(node: Node | None) -> float:
    return math.nan if node is None else node.number()

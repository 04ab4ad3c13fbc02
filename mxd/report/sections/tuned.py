"""Do tuned layers still describe their MLPs? Every block before and after."""

from mxd.metrics.faithful import CE_INCREASE, KL, TOP1
from mxd.metrics.metric import Metric
from mxd.metrics.whole import BEFORE_AND_AFTER
from mxd.report.parts import Cell, Column, Section, Table, column, measured
from mxd.report.run import Run
from mxd.report.source import Node


def section(run: Run) -> Section | None:
    """Return sets of layers before and after their tuning; ``None`` where that was not measured."""
    results = run.results("tuned")
    if not results:
        return None
    tokens = results[0][1]["after"]["tokens"].number()
    lead = (
        f"Layers that are tuned together may compensate for one another. On {tokens:,.0f} held-out tokens, all layers "
        "of a set spliced in at once; then each layer on the base model's inputs, where it is to describe its MLP."
    )
    whole = (CE_INCREASE, KL, TOP1)
    rows = [[Cell(replacement.label), *(_pair(result, metric) for metric in whole)] for replacement, result in results]
    tables = [Table("All blocks replaced, before → after.", [Column("set"), *map(column, whole)], rows, legend=True)]
    for replacement, result in results:
        blocks = list(zip(result["before"]["blocks"].items(), result["after"]["blocks"].items(), strict=True))
        rows = [
            [Cell(number), *(_arrow(before, after, metric) for metric in BEFORE_AND_AFTER)]
            for (number, before), (_, after) in blocks
        ]
        caption = f"{replacement.label}, block by block, on the base model's inputs, before → after."
        tables.append(Table(caption, [Column("block"), *map(column, BEFORE_AND_AFTER)], rows, legend=True))
    return Section("tuned", "Before and after tuning", lead, [*tables])


def _pair(result: Node, metric: Metric) -> Cell:
    return _arrow(result["before"], result["after"], metric)


def _arrow(before: Node, after: Node, metric: Metric) -> Cell:
    """Return two values of a metric as a cell."""
    first, second = measured(before, metric), measured(after, metric)
    return Cell(f"{first.text} → {second.text}", second.source)

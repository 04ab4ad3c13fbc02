"""What else masks change: held-out text, accuracies of tasks by domain, continuations with and without a mask."""

from mxd.metrics.masks import BY_MASK, KEPT, KEPT_OWN, TASKS, TASKS_OWN, THRESHOLD
from mxd.metrics.metric import Metric
from mxd.report.parts import NOTHING, Cell, Column, Part, Section, Table, column, measured, number, with_error
from mxd.report.replacements import Replacement, Results, usual
from mxd.report.run import Run
from mxd.report.sections.generation import continuations, pieces
from mxd.report.sections.masking import matrix, own_and_others
from mxd.report.source import Node

PROMPTS = 3
"""Prompts of a mask whose continuations are shown."""


def section(run: Run) -> Section | None:
    """Return what else was measured under each mask; ``None`` where nothing was."""
    masked, purged = (
        [(r, n) for r, n in run.results(kind) if any(n.get(part) for part in ("faithfulness", "tasks", "generation"))]
        for kind in ("masking", "purging")
    )
    if not masked and not purged:
        return None
    parts: list[Part] = []
    for results in filter(None, (masked, purged)):
        parts += [_left(results)]
    for replacement, result in usual(masked):
        parts += [*_accuracies(replacement, result), *_kept(replacement, result)]
    for metrics, part in ((TASKS, "tasks"), (KEPT, "generation")):
        if there := [(r, n) for r, n in masked if n.get(part)]:
            parts.append(_means(there, metrics))
    parts += [part for r, result in (*usual(masked), *usual(purged)) for part in _diffs(r, result)]
    lead = (
        "What else changes while units are switched off, compared with the same splice with none switched off. A mask "
        "that takes away only what it names leaves held-out text and the other domains as they are, and takes more "
        "than as many random units do."
    )
    return Section("under_mask", "Under a mask", lead, parts)


def masks_of(result: Node) -> list[str]:
    """Return what the masks of a result are called: domains, or the thresholds of a correlation."""
    domains = result.get("domains")
    if domains is not None:
        return domains.texts()
    return [f"correlation {THRESHOLD.form.format(value)}" for value in result["thresholds"].numbers()]


def by_mask(result: Node, metric: Metric, mask: int) -> Cell:
    """Return a number that each mask has, with its standard error; a dash where it was not measured.

    Args:
        result: of masking or purging.
        metric: the number; ``*`` in its key stands for the mask's.
        mask: the mask's number.
    """
    path = metric.key.replace("*", str(mask))
    error = metric.error.replace("*", str(mask))
    return with_error(number(result.follow(path), metric.form), result.follow(error) if error else None, metric.form)


def _left(results: Results) -> Table:
    rows = []
    for replacement, result in results:
        for i, mask in enumerate(masks_of(result)):
            rows.append([Cell(replacement.label), Cell(mask), *(by_mask(result, metric, i) for metric in BY_MASK)])
    there = [n for n in range(2, len(BY_MASK) + 2) if any(row[n].text != NOTHING for row in rows)]
    columns = [Column("splice"), Column("mask"), *map(column, BY_MASK)]
    kept = [0, 1, *there]
    caption = "What is left under each mask."
    return Table(caption, [columns[n] for n in kept], [[row[n] for n in kept] for row in rows], legend=True)


def _accuracies(replacement: Replacement, result: Node) -> list[Part]:
    """Return Monet's matrix: what masking a domain (rows) does to the accuracy on each (columns)."""
    tasks = result.get("tasks")
    if tasks is None:
        return []
    masks, columns = masks_of(result), tasks["columns"].texts()
    documents = tasks["documents"].numbers()
    caption = (
        f"{replacement.label}: change of the accuracy ({tasks['metric'].text()}) on each domain (columns, "
        f"{min(documents):,.0f} to {max(documents):,.0f} documents) when the units of one (rows) are off. Standard "
        "errors, of differences document by document: matrix_se in the file. After Monet, figure 3."
    )
    shown: list[Part] = [matrix(caption, masks, columns, tasks["matrix"], TASKS_OWN.form)]
    if set(masks) & set(columns):
        shown.append(own_and_others(replacement.label, masks, columns, tasks, "change of the accuracy"))
    return shown


def _kept(replacement: Replacement, result: Node) -> list[Part]:
    generation = result.get("generation")
    if generation is None:
        return []
    masks, columns = masks_of(result), generation["columns"].texts()
    caption = (
        f"{replacement.label}: of {generation['new_tokens'].number():.0f} tokens that continue a text of a domain "
        "(columns), how many are written as without the mask of one (rows), before the first difference."
    )
    return [matrix(caption, masks, columns, generation["matrix"], KEPT_OWN.form)]


def _means(results: Results, metrics: tuple[Metric, ...]) -> Table:
    rows = [[Cell(r.label), *(measured(result, metric) for metric in metrics)] for r, result in results]
    return Table("Means over domains.", [Column("splice"), *map(column, metrics)], rows, legend=True)


def _diffs(replacement: Replacement, result: Node) -> list[Part]:
    """Show continuations with and without each mask."""
    generation = result.get("generation")
    if generation is None:
        return []
    parts: list[Part] = []
    for mask, examples in zip(masks_of(result), generation["examples"], strict=False):
        caption = (
            f"{replacement.label}, masked: {mask}. On top what is written with no unit masked; then what the mask "
        )
        caption += "leaves out and what is written instead."
        parts += continuations([(replacement, examples)], PROMPTS, pieces, caption)
    return parts

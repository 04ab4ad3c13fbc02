"""What masking a domain's units costs there and elsewhere, and what masking units that follow a score does."""

import math
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from mxd.metrics.masks import BY_CHANCE, HIGH, MASKING, OWN, PURGED, PURGED_SHARE, PURGING, THRESHOLD
from mxd.report.parts import (
    NOTHING,
    Cell,
    Column,
    Figure,
    Panel,
    Part,
    Section,
    Table,
    column,
    measured,
    number,
    slots,
    with_error,
)
from mxd.report.replacements import Replacement, Results, usual
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, dot, dots, lines

SCATTERED = 3
"""Units of a splice whose activations are drawn against the score."""


def section(run: Run) -> Section | None:
    """Return what masking by domain and by score did; ``None`` where nothing was masked."""
    masked, purged = run.results("masking"), run.results("purging")
    if not masked and not purged:
        return None
    parts: list[Part] = [part for replacement, result in usual(masked) for part in _matrix(replacement, result)]
    parts += [_means(masked)] if masked else []
    parts += [_purged(purged), _followers(usual(purged))] if purged else []
    parts += scatters(usual(purged))
    lead = (
        "Units are switched off, and the change of the loss is measured (nats per token; after Monet, sections 5.1 and "
        "5.3). Specialised units cost much on their own domain and little elsewhere."
    )
    return Section("masking", "Masking", lead, parts)


def _matrix(replacement: Replacement, result: Node) -> list[Part]:
    domains = result["domains"].texts()
    caption = f"{replacement.label}: change of the loss on each domain (columns) when the units of one (rows) are off. "
    caption += "Standard errors: matrix_se in the file."
    units = [number(result["units"].get(domain), "{:,.0f}") for domain in domains]
    shown = matrix(caption, domains, domains, result["matrix"], OWN.form, units)
    return [shown, own_and_others(replacement.label, domains, domains, result, "change of the loss, nats")]


def matrix(
    caption: str, masks: Sequence[str], columns: Sequence[str], values: Node, form: str, units: Sequence[Cell] = ()
) -> Table:
    """Return what each mask does to each domain as a table with shaded cells; a mask's own domain is marked.

    Args:
        caption: of the table.
        masks: what the rows are called.
        columns: the domains.
        values: the numbers, row by row.
        form: how they are printed.
        units: how many units each mask switches off, where that is to be shown.
    """
    numbers = [row.numbers() for row in values]
    largest = max((abs(v) for row in numbers for v in row if math.isfinite(v)), default=0.0) or 1.0
    rows = []
    for i, (mask, row) in enumerate(zip(masks, values, strict=False)):
        cells = [_change(cell, largest, mask == column, form) for cell, column in zip(row, columns, strict=False)]
        rows.append([Cell(mask), *units[i : i + 1], *cells])
    return Table(caption, [Column("masked"), *([Column("units")] if units else []), *map(Column, columns)], rows)


def own_and_others(title: str, masks: Sequence[str], columns: Sequence[str], found: Node, axis: str) -> Figure:
    """Draw what each mask does to its own domain, to the others, and what as many random units do.

    Args:
        title: of the panel.
        masks: what the rows are called.
        columns: the domains.
        found: holds the ``matrix`` and its ``control``.
        axis: what is drawn.
    """
    keys = slots(["own domain", "mean of the others", "own domain, random units"])
    rows = []
    for i, mask in enumerate(masks):
        row = found["matrix"][i]
        own = [j for j, column in enumerate(columns) if column == mask]
        others = [value for column, value in zip(columns, row.numbers(), strict=False) if column != mask]
        dots_of = [
            [dot(row[j], found.follow(f"matrix_se.{i}.{j}")) for j in own],
            [Point(float(np.mean(others)), 0.0, source=row.source)] if others else [],
            [dot(found["control"][i][j], found.follow(f"control_se.{i}.{j}")) for j in own],
        ]
        rows.append((mask, [(key, each) for key, at in zip(keys.values(), dots_of, strict=True) for each in at]))
    caption = (
        "One row for each mask. Specialised units: the own domain far from zero, the others near it, and the same "
        "number of random units near it, too. Bars are standard errors."
    )
    return Figure(caption, [dots(title, Axis(axis), rows)], list(keys.values()))


def _change(cell: Node, largest: float, own: bool, form: str) -> Cell:
    value = cell.number()
    if not math.isfinite(value):
        return Cell(NOTHING, cell.source, marked=own)
    return Cell(form.format(value), cell.source, round(9 * value / largest), own)


def _means(results: Results) -> Table:
    rows = [[Cell(r.label), *(measured(result, metric) for metric in MASKING)] for r, result in results]
    caption = "Mean change of the loss over domains, and with equally many random units."
    return Table(caption, [Column("splice"), *map(column, MASKING)], rows)


def _purged(results: Results) -> Table:
    rows = []
    for replacement, result in results:
        for i, threshold in enumerate(result["thresholds"]):
            cells = [number(threshold, THRESHOLD.form), number(result["units"][i], PURGED.form)]
            cells.append(number(result["share"][i], PURGED_SHARE.form))
            removed = result.get("removed")
            cells.append(number(removed[i] if removed else None, BY_CHANCE.form))
            for key in ("changes", "control"):
                pairs = zip(result[key][i], result[f"{key}_se"][i], strict=False)
                cells += [with_error(number(change, HIGH.form), error) for change, error in pairs]
            rows.append([Cell(replacement.label), *cells])
    means = ", ".join(dict.fromkeys(f"{result['mean_score'].number():g}" for _, result in results))
    caption = f"Units that follow a score of the text (mean {means}) are masked: change of the loss ± standard error."
    return Table(caption, [Column("splice"), *map(column, PURGING)], rows, legend=True)


def _followers(results: Results) -> Table:
    named = [[_follower(unit) for unit in result["leading"]] for _, result in results]
    empty = Cell(NOTHING)
    rows = [[Cell(str(rank)), *cells] for rank, cells in enumerate(zip_longest(*named, fillvalue=empty), 1)]
    caption = (
        "The units that follow the score most: number, block, and correlation over the tokens and over the texts that "
        "chose them; in brackets where it is not beyond chance."
    )
    return Table(caption, [Column("place"), *(Column(replacement.label) for replacement, _ in results)], rows)


def scatters(results: Results) -> list[Part]:
    """Draw scores and activations of the units that follow the score most; nothing where the files hold no points."""
    panels: list[Panel] = []
    key = next(iter(slots(["a token"]).values()))
    for replacement, result in results:
        for unit in list(result["leading"])[:SCATTERED]:
            if (points := unit.get("points")) is None:
                continue
            drawn = [Point(x, y, source=points.source) for x, y in (pair.numbers() for pair in points)]
            name = f"#{unit['unit'].number():.0f}, block {unit['block'].number():.0f}"
            title = f"{replacement.label}: {name}, r = {unit['correlation'].number():+.2f}"
            share = unit["active"].number() / max(unit["tokens"].number(), 1)
            axes = Axis(f"score of the token (active at {share:.1%})"), Axis("activation", low=0.0)
            panels.append(lines(title, *axes, [Line(key, drawn, joined=False)]))
    caption = (
        "The units that follow the score most: score and activation of single tokens, up to 100 drawn from those where "
        "the unit is active and up to 100 from the others, so the cloud looks denser above zero than the text is. A "
        "unit of the score fires to the right and not to the left. After Monet, figure 5."
    )
    return [Figure(caption, panels, [key])] if panels else []


def _follower(follower: Node) -> Cell:
    unit, block, texts = follower["unit"].number(), follower["block"].number(), follower.get("correlation_texts")
    text = f"#{unit:.0f}, block {block:.0f}: {follower['correlation'].number():+.2f}"
    text += f", {texts.number():+.2f}" if texts else ""
    chance = follower.get("beyond_chance")
    return Cell(f"({text})" if chance is not None and chance.value is False else text, follower.source)

"""What masking a domain's units costs there and elsewhere, and what masking units that follow a score does."""

import math
from itertools import zip_longest

from mxd.metrics import BY_CHANCE, HIGH, MASKING, OWN, PURGED, PURGED_SHARE, PURGING, THRESHOLD
from mxd.report.parts import NOTHING, Cell, Column, Part, Section, Table, column, measured, number, with_error
from mxd.report.replacements import Replacement, Results, usual
from mxd.report.run import Run
from mxd.report.source import Node


def section(run: Run) -> Section | None:
    """Return what masking by domain and by score did; ``None`` where nothing was masked."""
    masked, purged = run.results("masking"), run.results("purging")
    if not masked and not purged:
        return None
    parts: list[Part] = [_matrix(replacement, result) for replacement, result in usual(masked)]
    parts += [_means(masked)] if masked else []
    parts += [_purged(purged), _followers(usual(purged))] if purged else []
    lead = (
        "Units are switched off, and the change of the loss is measured (nats per token; after Monet, sections 5.1 and "
        "5.3). Specialised units cost much on their own domain and little elsewhere."
    )
    return Section("masking", "Masking", lead, parts)


def _matrix(replacement: Replacement, result: Node) -> Table:
    domains = result["domains"].texts()
    values = [row.numbers() for row in result["matrix"]]
    largest = max((abs(v) for row in values for v in row if math.isfinite(v)), default=0.0) or 1.0
    rows = []
    for i, (domain, row) in enumerate(zip(domains, result["matrix"], strict=False)):
        units = number(result["units"].get(domain), "{:,.0f}")
        rows.append([Cell(domain), units, *(_change(cell, largest, i == j) for j, cell in enumerate(row))])
    columns = [Column("masked domain"), Column("units"), *map(Column, domains)]
    caption = f"{replacement.label}: change of the loss on each domain (columns) when the units of one (rows) are off. "
    caption += "Standard errors: matrix_se in the file."
    return Table(caption, columns, rows)


def _change(cell: Node, largest: float, diagonal: bool) -> Cell:
    value = cell.number()
    if not math.isfinite(value):
        return Cell(NOTHING, cell.source, marked=diagonal)
    return Cell(OWN.form.format(value), cell.source, round(9 * value / largest), diagonal)


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


def _follower(follower: Node) -> Cell:
    unit, block, texts = follower["unit"].number(), follower["block"].number(), follower.get("correlation_texts")
    text = f"#{unit:.0f}, block {block:.0f}: {follower['correlation'].number():+.2f}"
    text += f", {texts.number():+.2f}" if texts else ""
    chance = follower.get("beyond_chance")
    return Cell(f"({text})" if chance is not None and chance.value is False else text, follower.source)

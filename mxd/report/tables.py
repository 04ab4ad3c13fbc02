"""Results as tables: in the terminal and in Markdown."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mxd.common.markdown import grid
from mxd.common.numbers import plural
from mxd.common.progress import WIDTH
from mxd.metrics import QUESTIONS, explained
from mxd.metrics.dropped import LARGEST_DROP
from mxd.metrics.faithful import CE_INCREASE, DEAD, FIXED, NMSE, ROUTED

HEAD = ("method", "block", "sparsity")
ESSENTIAL = (NMSE, CE_INCREASE, DEAD, FIXED, ROUTED)
"""What a terminal too narrow for every column shows of an evaluation."""
PROSE = 24
"""Columns that a cell of words may be narrowed to, where its table is too wide; numbers are never broken."""
LABEL = 9
"""Columns before a text in the terminal, which say what it is; its further lines begin below it."""


def tables(evaluation: Mapping[str, Any]) -> list[list[list[str]]]:
    """Return a table for each of ``QUESTIONS`` as cells, the header first: a row for each splice, by block, method, K.

    A splice of several layers shows averages over them.
    """
    results = sorted(evaluation["results"].items(), key=_order)
    return [
        [
            [*HEAD, *(metric.title for metric in metrics)],
            *([*_head(name, result), *(metric.shown(result) for metric in metrics)] for name, result in results),
        ]
        for metrics in QUESTIONS.values()
    ]


def _head(name: str, result: Mapping[str, Any]) -> list[str]:
    first, *others = result["replacements"]
    if others:
        return [name, plural(len(result["blocks"]), "layer"), "-"]
    return [first["method"], str(first["block"]), first["sparsity"]]


def _order(item: tuple[str, Any]) -> tuple[int, str, int]:
    first = item[1]["replacements"][0]
    return first["block"], first["method"], first["k"] or 0


def terminal_tables(evaluation: Mapping[str, Any], width: int = WIDTH) -> list[Table]:
    """Return an evaluation as rich tables: all of ``tables`` where each fits, else one of what is essential.

    Args:
        evaluation: its results.
        width: of the terminal, in columns.
    """
    titles = caption(evaluation), *list(QUESTIONS)[1:]
    full = [_rich(title, rows) for title, rows in zip(titles, tables(evaluation), strict=True)]
    if all(_width(table.columns) <= width for table in full):
        return full
    results = sorted(evaluation["results"].items(), key=_order)
    rows = [
        ["method", "block", "K", *(metric.title for metric in ESSENTIAL)],
        *([*_head(name, result), *(metric.with_error(result) for metric in ESSENTIAL)] for name, result in results),
    ]
    return list(fitted(_rich(titles[0], rows), width, len(HEAD)))


def _rich(title: str, rows: Sequence[Sequence[str]]) -> Table:
    """Return cells, the header first, as a rich table; numbers stand to the right."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if number else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def hanging(text: Text, console: Console) -> Iterator[Text]:
    """Yield the lines of a text as they fit into a console, broken ones going on below what follows their label."""
    for line in text.split("\n", allow_blank=True):
        label, *rest = line.divide([LABEL])
        first, *others = (rest[0] if rest else Text()).wrap(console, max(1, console.width - LABEL))
        yield Text.assemble(label, first)
        yield from (Text.assemble(" " * LABEL, other) for other in others)


def fitted(table: Table, width: int, head: int = 1) -> Iterator[Table]:
    """Yield a table in parts that fit into a width, one below the other, without cutting off any number.

    A part has the first columns, which say what a row is, and as many of the others as fit. Columns of words are broken
    into lines; where even the first columns and one more do not fit, so is everything.

    Args:
        table: of texts.
        width: of the terminal, in columns.
        head: how many of its columns say what a row is.
    """
    first, parts = list(table.columns[:head]), [list(table.columns[:head])]
    for column in table.columns[head:]:
        if len(parts[-1]) > head and _width([*parts[-1], column]) > width:
            parts.append(first)
        parts[-1] = [*parts[-1], column]
    for number, columns in enumerate(parts):
        title = "continued" if number and table.title else table.title
        part = Table(title=title, title_justify=table.title_justify)
        fits = _width(columns) <= width
        for column in columns:
            narrow = not fits or _longest(column) > PROSE
            part.add_column(column.header, justify=column.justify, no_wrap=not narrow, overflow="fold")
        for row, cells in zip(table.rows, zip(*(column.cells for column in columns), strict=True), strict=True):
            part.add_row(*cells, style=row.style, end_section=row.end_section)
        yield part


def _width(columns: Sequence[Column]) -> int:
    """Return how wide a table of these columns is, edges and blanks included, those of words at their narrowest."""
    return 1 + sum(3 + min(_longest(column), PROSE) for column in columns)


def _longest(column: Column) -> int:
    return max(cell_len(str(cell)) for cell in (column.header, *column.cells))


def markdown_tables(evaluation: Mapping[str, Any]) -> str:
    """Return the same tables in Markdown, with the meaning of their columns."""
    parts = [caption(evaluation)]
    for (title, metrics), rows in zip(QUESTIONS.items(), tables(evaluation), strict=True):
        parts += [f"**{title}**", grid(rows), explained(metrics)]
    return "\n\n".join(parts) + "\n"


def tasks_table(scores: Mapping[str, Any]) -> Table:
    """Return a rich table of lm-eval scores: a row for each metric, a column for the base model and each splice."""
    limit = f", at most {plural(scores['limit'], 'document')} of each" if scores["limit"] else ""
    table = Table(title=f"lm-eval {scores['version']}{limit}", title_justify="left")
    columns = {"base": scores["base"], **scores["spliced"]}
    for title in ("task", "metric", *columns):
        table.add_column(title, justify="left" if title == "task" else "right")
    for task, metrics in scores["base"].items():
        for metric in (name for name in metrics if "," in name and "_stderr," not in name):
            error = metric.replace(",", "_stderr,")
            cells = [_with_error(column[task], metric, error) for column in columns.values()]
            table.add_row(task, metric.removesuffix(",none"), *cells)
    return table


def _with_error(metrics: Mapping[str, float], metric: str, error: str) -> str:
    return f"{metrics[metric]:.4f}" + (f" ± {metrics[error]:.4f}" if error in metrics else "")


def caption(evaluation: Mapping[str, Any]) -> str:
    """Return one line: model, text, number of tokens, and the reference cross-entropies."""
    any_result = next(iter(evaluation["results"].values()))
    ablations = {
        tuple(r["block"] for r in result["replacements"]): (result["ce_zero"], result["ce_mean"])
        for result in evaluation["results"].values()
    }
    listed = "; ".join(
        f"block {', '.join(map(str, blocks))}: zero-ablated {zero:.4f}, mean-ablated {mean:.4f}"
        for blocks, (zero, mean) in ablations.items()
    )
    data = evaluation["data"]
    return (
        f"{evaluation['model']} on {data['source']}/{data['split']}, {any_result['tokens']:,} tokens: "
        f"CE base {any_result['ce_base']:.4f} ± {any_result['ce_base_se']:.4f}; {listed} (nats per token)"
    )


PLACES = ("first", "second", "third", "fourth")
"""Columns of the units that lead."""
AFFECTED = 3
"""Classes that are named for a unit that is dropped."""


def most_lost(drops: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the units without which some class loses anything, those first that cost a class most.

    Args:
        drops: unit -> share of the accuracy on each class that is lost without it; NaN where there is none to lose.
    """
    most = {unit: max((d for d in values if d > 0), default=0.0) for unit, values in drops.items()}
    return sorted((unit for unit in most if most[unit] > 0), key=lambda unit: -most[unit])


def most_affected(classes: Sequence[str], drops: Sequence[float]) -> str:
    """Return the classes whose accuracy a unit changes most, with the share that is lost; a gain is negative."""
    changed = [(d, name) for d, name in zip(drops, classes, strict=False) if d and not math.isnan(d)]
    most = sorted(changed, key=lambda pair: -abs(pair[0]))[:AFFECTED]
    return ", ".join(f"{name} {LARGEST_DROP.text(d)}" for d, name in most)

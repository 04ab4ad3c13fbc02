"""Results as tables: in the terminal and in Markdown."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from mxd.common.markdown import grid
from mxd.common.progress import WIDTH
from mxd.metrics import QUESTIONS, explained
from mxd.metrics.dropped import LARGEST_DROP

HEAD = ("method", "block", "sparsity")


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
        return [name, f"{len(result['blocks'])} layers", "-"]
    return [first["method"], str(first["block"]), first["sparsity"]]


def _order(item: tuple[str, Any]) -> tuple[int, str, int]:
    first = item[1]["replacements"][0]
    return first["block"], first["method"], first["k"] or 0


def terminal_tables(evaluation: Mapping[str, Any], width: int = WIDTH) -> list[Table]:
    """Return an evaluation as rich tables that fit into ``width`` characters; wider ones are split into several."""
    fitted = []
    titles = caption(evaluation), *list(QUESTIONS)[1:]
    for title, rows in zip(titles, tables(evaluation), strict=True):
        for i, chosen in enumerate(_fitting(rows, width)):
            table = Table(title=None if i else title, title_justify="left")
            for column in chosen:
                table.add_column(rows[0][column], justify="right" if column else "left", no_wrap=True)
            for row in rows[1:]:
                table.add_row(*(row[column] for column in chosen))
            fitted.append(table)
    return fitted


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Return the columns of each table; all begin with those that identify the splice."""
    widths = [max(map(len, column)) + 3 for column in zip(*rows, strict=True)]
    head = list(range(len(HEAD)))
    parts = [head]
    for column in range(len(HEAD), len(widths)):
        if parts[-1] != head and 1 + sum(widths[i] for i in [*parts[-1], column]) > width:
            parts.append(head)
        parts[-1] = [*parts[-1], column]
    return parts


def markdown_tables(evaluation: Mapping[str, Any]) -> str:
    """Return the same tables in Markdown, with the meaning of their columns."""
    parts = [caption(evaluation)]
    for (title, metrics), rows in zip(QUESTIONS.items(), tables(evaluation), strict=True):
        parts += [f"**{title}**", grid(rows), explained(metrics)]
    return "\n\n".join(parts) + "\n"


def tasks_table(scores: Mapping[str, Any]) -> Table:
    """Return a rich table of lm-eval scores: a row for each metric, a column for the base model and each splice."""
    limit = f", at most {scores['limit']} documents of each" if scores["limit"] else ""
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
    return ", ".join(f"{name} {LARGEST_DROP.form.format(d)}" for d, name in most)

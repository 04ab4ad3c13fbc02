"""Results as tables: in the terminal and in Markdown."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from mxd.markdown import grid

COLUMNS = (
    ("NMSE", "normalized_mse", "{:.4f}"),
    ("FVU", "fvu", "{:.3f}"),
    ("L0", "l0", "{:.1f}"),
    ("dead", "dead_share", "{:.0%}"),
    ("routed", "routed_share", "{:.2f}"),
    ("CE", "ce_spliced", "{:.4f}"),
    ("CE increase", "ce_increase", "{:+.4f}"),
    ("± s.e.", "ce_increase_se", "{:.4f}"),
    ("recovered", "loss_recovered", "{:.1%}"),
    ("KL", "kl", "{:.4f}"),
    ("top-1", "top1_agreement", "{:.1%}"),
)


def rows(evaluation: Mapping[str, Any]) -> list[list[str]]:
    """Return the table's cells, one row for each splice, by layer, method and K.

    Several layers spliced at once give averages over layers.
    """
    found = []
    for name, result in sorted(evaluation["results"].items(), key=_place):
        layers = list(result["layers"].values())
        first = result["replacements"][0]
        single = len(result["replacements"]) == 1
        cells = [
            first["method"] if single else name,
            str(first["layer"]) if single else f"{len(layers)} layers",
        ]
        cells += [
            first["sparsity"] if single else "-",
            f"{sum(r['params'] for r in result['replacements']):,}",
        ]
        for _, key, form in COLUMNS:
            values = [result[key]] if key in result else [layer[key] for layer in layers if key in layer]
            cells.append(form.format(sum(values) / len(values)) if values else "-")
        found.append(cells)
    return found


HEADER = ["method", "layer", "sparsity", "params", *(title for title, _, _ in COLUMNS)]


def _place(item: tuple[str, Any]) -> tuple[int, str, int]:
    first = item[1]["replacements"][0]
    return first["layer"], first["method"], first["k"] or 0


def terminal_table(evaluation: Mapping[str, Any]) -> Table:
    """Return a rich table of an evaluation."""
    table = Table(title=caption(evaluation), title_justify="left")
    for i, title in enumerate(HEADER):
        table.add_column(title, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows(evaluation):
        table.add_row(*row)
    return table


def markdown_table(evaluation: Mapping[str, Any]) -> str:
    """Return the same table in Markdown."""
    return "\n".join([grid([HEADER, *rows(evaluation)]), "", caption(evaluation), ""])


def tasks_table(scores: Mapping[str, Any]) -> Table:
    """Return a rich table of lm-eval scores: a row for each task's metric, the base model and each splice beside it."""
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
        tuple(r["layer"] for r in result["replacements"]): (result["ce_zero"], result["ce_mean"])
        for result in evaluation["results"].values()
    }
    listed = "; ".join(
        f"layer {', '.join(map(str, place))}: zero-ablated {zero:.4f}, mean-ablated {mean:.4f}"
        for place, (zero, mean) in ablations.items()
    )
    data = evaluation["data"]
    return (
        f"{evaluation['model']} on {data['source']}/{data['split']}, {any_result['tokens']:,} tokens: "
        f"CE base {any_result['ce_base']:.4f} ± {any_result['ce_base_se']:.4f}; {listed} (nats per token)"
    )

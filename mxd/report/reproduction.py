"""A reproduction on a terminal: what it would train, and what it found."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from mxd.common.numbers import plural

Rows = Sequence[Mapping[str, Any]]


def plan_table(runs: Rows) -> Table:
    """Return what each run trains and takes, and the sums; arguments as ``planned`` yields them."""
    known = [run for run in runs if "unknown" not in run]
    what = f"{plural(len(runs), 'run')}, {plural(sum(run['layers'] for run in runs), 'layer')}"
    hours = f"{sum(run['hours'] for run in known):,.1f} hours" if len(known) == len(runs) else "not known"
    title = f"{what}; training on this machine: {hours}"
    table = Table("run", title=title, title_justify="left")
    for name in ("layers", "tokens", "GiB", "hours"):
        table.add_column(name, justify="right")
    for run in runs:
        costs = ("-", "-") if "unknown" in run else (f"{run['gib']:.1f}", f"{run['hours']:.2f}")
        table.add_row(f"{run['model']}, {run['experiment']}", str(run["layers"]), f"{run['tokens']:,}", *costs)
    return table


def findings_table(findings: Rows) -> Table:
    """Return what each claim came to; arguments as in ``reproduction.json``."""
    table = Table("item", "model", "verdict", "ours", title="Beside the paper", title_justify="left")
    for row in findings:
        table.add_row(row["item"], row["model"], row["verdict"], row["ours"])
    return table

"""How polysemantic units are against their number: a table over seeds, and a figure.

    python scripts/polysemanticity.py RUN [RUN ...] [--file ablation.json] [--json FILE] [--figure FILE] [--check]

Each run holds the file that `mxd ablate RUN` wrote and `faithfulness.json` of `mxd evaluate RUN`; runs are of one
config and differ in their seed. After figures 3 and 20 of the muMoE paper; each number is the mean over the runs, with
the range of the polysemanticity. Beside it stand what as many random coefficients give, and how many units are beyond
that: without them a p near 1 may mean that a unit serves all classes, or none.

`--check` names the layers whose p does not fall from the fewest to the most units, as the paper's does, or is not below
that of random coefficients at the most.

`--json` writes a list of rows: `layer`, `gate`, `num_units`, `runs` and `metrics`: key -> `mean`, `low`, `high`.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from goals import conclude

from mxd.common.files import whole_file, write_json
from mxd.common.markdown import grid
from mxd.report.figures import PALETTE, STYLES, save_figure

COLUMNS = {
    "normalized_mse": ("NMSE", "{:.4f}"),
    "polysemanticity": ("mean p", "{:.3f}"),
    "control": ("p, random coefficients", "{:.3f}"),
    "beyond_chance": ("units beyond chance", "{:.0%}"),
    "beyond_polysemanticity": ("their mean p", "{:.3f}"),
    "largest_drop": ("largest d", "{:.1%}"),
    "control_largest_drop": ("largest d, random", "{:.1%}"),
}
"""Key of a row's metrics -> header, and how a number is written."""

NEURONS = "neurons"


def read(run: Path, file: str) -> dict[tuple[str, str, int], dict[str, float]]:
    """Return the metrics of a run's layers by method, gate and number of units.

    Raises:
        SystemExit: the run was not measured.
    """
    for name, command in ((file, "ablate"), ("faithfulness.json", "evaluate")):
        if not (run / name).is_file():
            raise SystemExit(f"{run / name} is not there: run `mxd {command} {run}` first.")
    dropped = json.loads((run / file).read_text())["results"]
    faithful = json.loads((run / "faithfulness.json").read_text())["results"]
    found = {}
    for name, result in dropped.items():
        about = faithful[name]["replacements"][0] if name in faithful else {"method": NEURONS, "sparsity": ""}
        nmse = faithful[name]["blocks"][str(result["block"])]["normalized_mse"] if name in faithful else None
        key = about["method"], about["sparsity"], result["num_units"]
        found[key] = measured(result) | ({} if nmse is None else {"normalized_mse": nmse})
    return found


def measured(result: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of one layer; a mean over no units is left out."""
    values = {
        "polysemanticity": result["polysemanticity"],
        "control": result["control"]["polysemanticity"],
        "beyond_chance": result["beyond_chance"]["units"] / result["ablated"],
        "beyond_polysemanticity": result["beyond_chance"]["polysemanticity"],
        "largest_drop": result["largest_drop"],
        "control_largest_drop": result["control"]["largest_drop"],
    }
    return {key: value for key, value in values.items() if value is not None}


def rows(runs: Sequence[Path], file: str) -> list[dict[str, Any]]:
    """Return a row for each method, gate and number of units: mean and range over the runs."""
    found = [read(run, file) for run in runs]
    if any(set(other) != set(found[0]) for other in found):
        raise SystemExit("the runs are not of one config: other layers were measured in them.")
    table = []
    for method, gate, units in sorted(found[0]):
        metrics = {}
        for key in COLUMNS:
            values = [own[key] for one in found if key in (own := one[method, gate, units])]
            if values:
                metrics[key] = {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}
        about = {"layer": method, "gate": gate, "num_units": units, "runs": len(runs)}
        table.append(about | {"metrics": metrics})
    return table


def markdown(table: Sequence[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    return grid([["layer", "gate", "units", *(title for title, _ in COLUMNS.values())], *map(cells, table)])


def cells(row: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    line = [row["layer"], row["gate"] or "-", f"{row['num_units']:,}"]
    for key, (_, form) in COLUMNS.items():
        metric = row["metrics"].get(key)
        text = "-" if metric is None else form.format(metric["mean"])
        if key == "polysemanticity" and row["runs"] > 1:
            text += f" ({form.format(metric['low'])} to {form.format(metric['high'])})"
        line.append(text)
    return line


def lines_of(table: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the rows by layer and gate, in order of units; not neurons, nor where no unit counted."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in (row for row in table if row["layer"] != NEURONS and "polysemanticity" in row["metrics"]):
        found.setdefault((row["layer"], row["gate"]), []).append(row)
    return found


def missed(table: Sequence[dict[str, Any]]) -> list[str]:
    """Return whose p does not fall with the number of units, or is not below its control."""
    lines = []
    for (layer, gate), of_line in lines_of(table).items():
        few, many = (row["metrics"]["polysemanticity"]["mean"] for row in (of_line[0], of_line[-1]))
        control, units = of_line[-1]["metrics"]["control"]["mean"], of_line[-1]["num_units"]
        if many >= few:
            lines.append(f"{layer}, {gate}: p {few:.3f} of the fewest units, {many:.3f} of {units:,}")
        if many >= control:
            lines.append(f"{layer}, {gate}: p {many:.3f} of {units:,} units, {control:.3f} of random coefficients")
    return lines


def draw(table: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw mean p against the number of units, with its range over runs; dashed: random coefficients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.5, 4), layout="constrained")
    for number, ((layer, gate), of_line) in enumerate(lines_of(table).items()):
        units = [row["num_units"] for row in of_line]
        p = [row["metrics"]["polysemanticity"] for row in of_line]
        ends = [[v["mean"] - v["low"] for v in p], [v["high"] - v["mean"] for v in p]]
        color, marker = STYLES[layer]
        filled = "none" if gate == "softmax" else "full"
        style = {"color": PALETTE[color], "marker": marker, "fillstyle": filled}
        places = [count * 1.03**number for count in units]  # beside one another
        axes.errorbar(places, [v["mean"] for v in p], yerr=ends, capsize=3, label=f"{layer}, {gate}", **style)
        control = [row["metrics"]["control"]["mean"] for row in of_line]
        axes.plot(places, control, linestyle="--", linewidth=1, **style)
    for row in table:
        if row["layer"] == NEURONS:
            color = PALETTE["grey"]
            axes.axhline(row["metrics"]["polysemanticity"]["mean"], color=color, label="MLP neurons")
            axes.axhline(row["metrics"]["control"]["mean"], color=color, linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(xlabel="units", ylabel="mean polysemanticity p")
    axes.set_title("lower: fewer classes need a unit; dashed: as many random coefficients", fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="runs of one config with other seeds")
    parser.add_argument("--file", default="ablation.json", help="what `mxd ablate` wrote in each")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--figure", type=Path, help="draw them, as .png or .svg")
    parser.add_argument("--check", action="store_true", help="exit 1 where p does not fall as in the paper")
    args = parser.parse_args()
    table = rows(args.runs, args.file)
    print(markdown(table))
    if args.json:
        with whole_file(args.json) as file:
            write_json(file, table)
    if args.figure:
        draw(table, args.figure)
    if args.check:
        conclude(missed(table), "p falls with the number of units, and is below that of random coefficients")


if __name__ == "__main__":
    main()

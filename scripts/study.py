"""Methods beside one another, block by block and K by K: a table with paired differences, and a figure.

    python scripts/study.py FILE [FILE ...] [--method MxD] [--beside STC] [--json FILE] [--figure FILE] [--check]

Each file is what `mxd evaluate RUN` wrote: `faithfulness.json`, with layers of several blocks, methods and K, of one
base model and measured on one text. `difference` is the CE increase of `--method` less that of `--beside` at the same
block and K: its standard error is that of the differences of single contexts, since both are measured on the same
ones, and so smaller than those of the two numbers. A positive difference speaks against `--method`.

`--json` writes a list of rows: `block`, `k`, `methods` (name -> metrics), `difference`, `difference_se`. `--check`
fails where `--method` is not below `--beside` by two standard errors, and names the blocks and K.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from goals import conclude

from mxd.common.files import whole_file, write_json
from mxd.common.markdown import grid
from mxd.evaluation.walk import Mean
from mxd.report.figures import PALETTE, STYLES, save_figure

Result = dict[str, Any]
KEPT = ("normalized_mse", "nmse_mean_gate", "nmse_fixed_directions", "dead_share", "routed_share", "stable_rank")
"""What is kept of each layer's account."""


def read(files: Sequence[Path]) -> dict[tuple[int, int], dict[str, Result]]:
    """Return the results of single layers by block and K, and by method.

    Raises:
        SystemExit: a file is not there, or the files are of several base models or texts.
    """
    found: dict[tuple[int, int], dict[str, Result]] = {}
    about = None
    for file in files:
        if not file.is_file():
            raise SystemExit(f"{file} is not there: run `mxd evaluate {file.parent}` first.")
        document = json.loads(file.read_text())
        first = next(iter(document["results"].values()))
        same = document["model"], first["tokens"], first["ce_base"]
        if about not in (None, same):
            raise SystemExit(f"{file} is of another base model or text than {files[0]}.")
        about = same
        for result in document["results"].values():
            layer, *others = result["replacements"]
            if not others and layer["k"] is not None:
                found.setdefault((layer["block"], layer["k"]), {})[layer["method"]] = result
    return found


def compared(results: dict[str, Result], method: str, beside: str) -> Result:
    """Return what is said of one block and K.

    Raises:
        SystemExit: one of the two methods was not measured there.
    """
    if missing := {method, beside} - set(results):
        raise SystemExit(f"no {', '.join(sorted(missing))} here: there are {', '.join(sorted(results))}.")
    one, other = (_increase(results[name]) for name in (method, beside))
    difference = one.less(other)
    methods = {name: _metrics(result) for name, result in results.items()}
    return {"methods": methods, "difference": difference.value, "difference_se": difference.standard_error}


def _increase(result: Result) -> Mean:
    by_context = result["by_context"]
    return Mean.of(by_context["ce_increase"], by_context["tokens"])


def _metrics(result: Result) -> Result:
    account = next(iter(result["blocks"].values()))
    splice = {key: result[key] for key in ("ce_increase", "ce_increase_se", "kl", "kl_se", "top1_agreement")}
    return splice | {"params": result["params"]} | {key: account[key] for key in KEPT}


def markdown(rows: Sequence[Result], names: Sequence[str]) -> str:
    """Return the table: a line for each block and K."""
    header = ["block", "K", *(f"{name}: CE increase" for name in names), *(f"{name}: NMSE" for name in names)]
    lines = [[*header, "difference"]]
    for row in rows:
        found = [row["methods"][name] for name in names]
        increases = [f"{m['ce_increase']:+.4f} ± {m['ce_increase_se']:.4f}" for m in found]
        errors = [f"{m['normalized_mse']:.4f}" for m in found]
        difference = f"{row['difference']:+.4f} ± {row['difference_se']:.4f}"
        lines.append([str(row["block"]), str(row["k"]), *increases, *errors, difference])
    return grid(lines)


def draw(rows: Sequence[Result], names: Sequence[str], path: Path) -> None:
    """Draw the CE increase against K, a panel for each block, with standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    blocks = sorted({row["block"] for row in rows})
    size = (2.6 * len(blocks) + 0.6, 3.2)
    figure, panels = plt.subplots(1, len(blocks), figsize=size, layout="constrained", squeeze=False)
    for axes, block in zip(panels[0], blocks, strict=True):
        here = [row for row in rows if row["block"] == block]
        for place, name in enumerate(names):
            color, marker = STYLES[name]
            metrics = [row["methods"][name] for row in here]
            places = [row["k"] * 1.04 ** (place - 1) for row in here]  # bars beside one another
            heights, bars = ([m[key] for m in metrics] for key in ("ce_increase", "ce_increase_se"))
            axes.errorbar(places, heights, yerr=bars, capsize=2, color=PALETTE[color], marker=marker, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks([row["k"] for row in here])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set(xlabel="K", title=f"block {block}")
        axes.axhline(0, color=PALETTE["grey"], linewidth=0.8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("CE increase, nats per token")
    panels[0][0].legend(frameon=False)
    save_figure(figure, path)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--method", default="MxD", help="the method in question")
    parser.add_argument("--beside", default="STC", help="the method that it is to be better than")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw them, as .png or .svg")
    parser.add_argument("--check", action="store_true", help="exit 1 where the method is not the better one")
    args = parser.parse_args()
    found = read(args.files)
    rows = [
        {"block": block, "k": k, **compared(results, args.method, args.beside)}
        for (block, k), results in sorted(found.items())
    ]
    names = [name for name in STYLES if all(name in row["methods"] for row in rows)]
    print(markdown(rows, names))
    if args.json:
        with whole_file(args.json) as file:
            write_json(file, rows)
    if args.figure:
        draw(rows, names, args.figure)
    if args.check:
        above = [row for row in rows if row["difference"] + 2 * row["difference_se"] >= 0]
        places = [f"block {row['block']}, K = {row['k']}" for row in above]
        says = f"{args.method} is not below {args.beside} by two standard errors"
        conclude([f"{place}: {says}" for place in places], f"{args.method} is below {args.beside} everywhere")


if __name__ == "__main__":
    main()

"""What tuning does to wholly replaced models: a table of what `mxd evaluate RUN --together` found before and after.

    python scripts/whole.py separate=RUN,RUN,RUN tuned=RUN,RUN,RUN [...] [--json FILE] [--markdown] [--check]

Each stage is a name and its runs, one for each seed, in the same order in all stages; a run holds
`faithfulness-together.json`, measured on the same text in all. Where sets were trained apart, RUN+RUN joins the
folders of one seed. Numbers are means over the runs, with their range.

`x first` is a stage's CE increase beside that of the first, run by run. Whether layers still describe the MLPs that
they replace is told on the base model's own inputs, block by block: NMSE, averaged over blocks; `mean gate` and
`fixed`, the least that `nmse_mean_gate / nmse` and `nmse_fixed_directions / nmse` of any block are of what they were in
the first stage; and the largest share of dead units of any block.

`--check` names each set and stage whose CE increase is not below the first stage's in every run, or that keeps less
than nine tenths of `mean gate` or `fixed` in any.

`--json` writes a list of rows, one for each set of layers and stage, with `set`, `stage`, `model`, `runs` and
`metrics`: key -> `mean`, `low`, `high` over the runs.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from goals import conclude

from mxd.common.files import whole_file, write_json
from mxd.common.markdown import grid

Result = dict[str, Any]
Folders = Sequence[Path]
"""Where the sets of one seed lie."""

COLUMNS = {
    "ce_increase": ("CE increase", "{:+.3f}"),
    "beside_first": ("x first", "{:.2f}"),
    "kl": ("KL", "{:.3f}"),
    "top1_agreement": ("top-1", "{:.3f}"),
    "normalized_mse": ("NMSE", "{:.4f}"),
    "nmse_mean_gate": ("mean gate", "{:.2f}"),
    "nmse_fixed_directions": ("fixed", "{:.2f}"),
    "dead_share": ("dead", "{:.0%}"),
}
"""Key of a row's metrics -> header, and how a number is written."""

RANGED = ("ce_increase", "kl")
"""Metrics whose range over the runs is shown."""

KEPT = 0.9
"""The least of a block's ``mean gate`` and ``fixed`` that a stage may leave."""


def read(folders: Folders) -> Result:
    """Return what the folders of one run hold of their sets together.

    Raises:
        SystemExit: nothing was measured in one of them, or they are not of one base model.
    """
    found: Result = {}
    for folder in folders:
        file = folder / "faithfulness-together.json"
        if not file.is_file():
            raise SystemExit(f"{file} is not there: run `mxd evaluate {folder} --together` first.")
        part = json.loads(file.read_text())
        if found and found["model"] != part["model"]:
            raise SystemExit(f"{named(folders)} are not of one base model: {found['model']}, {part['model']}.")
        found = part | {"results": found.get("results", {}) | part["results"]}
    return found


def named(folders: Folders) -> str:
    """Return folders as the command takes them."""
    return "+".join(map(str, folders))


def measured(found: Result, first: Result) -> dict[str, float]:
    """Return the metrics of one set in one run.

    Args:
        found: of the stage.
        first: of the same set in the first stage.

    Raises:
        SystemExit: they are not of the same text.
    """
    if found["by_context"]["tokens"] != first["by_context"]["tokens"]:
        raise SystemExit("the stages were measured on different text: use the same --tokens, --split and --seed.")
    blocks = list(found["blocks"].values())
    return {
        **{key: found[key] for key in ("ce_increase", "kl", "top1_agreement")},
        "beside_first": found["ce_increase"] / first["ce_increase"],
        "normalized_mse": statistics.fmean(block["normalized_mse"] for block in blocks),
        **{key: least(key, found, first) for key in ("nmse_mean_gate", "nmse_fixed_directions")},
        "dead_share": max(block["dead_share"] for block in blocks),
    }


def least(key: str, found: Result, first: Result) -> float:
    """Return the least that ``key / normalized_mse`` of a block is of what it was in the first stage."""
    return min(
        (block[key] / block["normalized_mse"])
        / (first["blocks"][number][key] / first["blocks"][number]["normalized_mse"])
        for number, block in found["blocks"].items()
    )


def rows(stages: dict[str, Sequence[Folders]]) -> Iterator[dict[str, Any]]:
    """Yield one row for each set and stage; the first stage is what the others are set beside.

    Raises:
        SystemExit: a stage has another number of runs than the first, another base model, or lacks a set.
    """
    documents = {stage: [read(run) for run in runs] for stage, runs in stages.items()}
    reference = next(iter(documents.values()))
    for name in reference[0]["results"]:
        for stage, found in documents.items():
            if [d["model"] for d in found] != [d["model"] for d in reference]:
                raise SystemExit(f"{stage} has other runs or base models than the first stage: list them in one order.")
            if missing := [named(run) for run, d in zip(stages[stage], found, strict=True) if name not in d["results"]]:
                raise SystemExit(f"no {name} in {', '.join(missing)}.")
            pairs = zip(found, reference, strict=True)
            values = [measured(own["results"][name], first["results"][name]) for own, first in pairs]
            summary = {key: summarised([value[key] for value in values]) for key in COLUMNS}
            runs = [named(run) for run in stages[stage]]
            yield {"set": name, "stage": stage, "model": found[0]["model"], "runs": runs, "metrics": summary}


def summarised(values: Sequence[float]) -> dict[str, float]:
    """Return mean and range."""
    return {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """Return the table."""
    return grid([["layers", "stage", *(title for title, _ in COLUMNS.values())], *map(cells, found)])


def cells(row: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    line = [row["set"], row["stage"]]
    for key, (_, form) in COLUMNS.items():
        metric = row["metrics"][key]
        ends = " to ".join(form.format(metric[end]) for end in ("low", "high"))
        line.append(form.format(metric["mean"]) + (f" ({ends})" if key in RANGED and len(row["runs"]) > 1 else ""))
    return line


def missed(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return where a stage is no nearer to the base model than the first, or describes its MLPs less well."""
    lines = []
    for row in (row for row in found if row["stage"] != found[0]["stage"]):
        where, metrics = f"{row['set']}, {row['stage']}", row["metrics"]
        if (most := metrics["beside_first"]["high"]) >= 1:
            lines.append(f"{where}: CE increase {most:.2f} x that of the first stage")
        for key in ("nmse_mean_gate", "nmse_fixed_directions"):
            if (least := metrics[key]["low"]) < KEPT:
                lines.append(f"{where}: {COLUMNS[key][0]} {least:.2f} of the first stage's, at least {KEPT:.2f}")
    return lines


def stage(word: str) -> tuple[str, list[Folders]]:
    """Parse NAME=RUN,RUN+RUN."""
    name, separator, runs = word.partition("=")
    if not (name and separator and runs):
        raise argparse.ArgumentTypeError(f"{word!r} is no stage; write NAME=RUN,RUN.")
    return name, [[Path(folder) for folder in run.split("+")] for run in runs.split(",")]


def main() -> None:
    """Read the runs, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", type=stage, metavar="NAME=RUN,RUN")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--markdown", action="store_true", help="print the table")
    parser.add_argument("--check", action="store_true", help="exit 1 and name what a stage does not better, or spoils")
    args = parser.parse_args()
    if not (args.json or args.markdown or args.check):
        raise SystemExit("nothing to do: give --json FILE, --markdown or --check.")
    found = list(rows(dict(args.stages)))
    if args.json:
        with whole_file(args.json) as file:
            write_json(file, found)
    if args.markdown:
        print(markdown(found))
    if args.check:
        conclude(missed(found), "every stage is nearer to the base model, and describes its MLPs as well")


if __name__ == "__main__":
    main()

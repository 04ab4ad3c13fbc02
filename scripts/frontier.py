"""Finished runs of `mxd compare` (configs/frontier.yaml) as one JSON file, as tables and as figures.

    python scripts/frontier.py RUN [RUN ...] [--json FILE] [--figure FILE.png] [--markdown] [--check]

Runs that differ in nothing but their seed are averaged: layers are matched by the names of their folders, and a run may
hold other layers than another. Others (another model, block, text, number of tokens, recipe) stand in groups of their
own. A run holds `faithfulness.json`; tokens agreed come from `generation.json`, and the time of a step and the units
dead in training from `metrics.jsonl`, where these are there.

`--json` writes a list of groups, each with `model`, `revision`, `block`, `tokens` (trained on), `held_out` (`source`,
`split`, `tokens`, `ce_base`, `ce_base_se`), `training` (the recipe), `runs` (`folder`, `seed`) and `rows`. A row has
`layer` (folder), `line` (method and variant), `sparsity`, `k`, `units`, `seeds` and `metrics`: key -> `mean`, `low`,
`high` over the seeds, with the keys of faithfulness.json, generation.json and `EXTRA` below. A standard error is the
mean of the runs' own, for they read the same text.

`--markdown` prints the tables: by K, and by CE increase within; a layer without a K stands with the K nearest to its
L0. `--figure FILE.png` writes FILE-l0.png, FILE-decomposition.png and FILE-cost.png; of several groups FILE-2-l0.png
and so on. Points are means; bars are ranges over the seeds, of a single seed standard errors.

`--check` names each K at which no MxD is within two standard errors of the lowest CE increase on the same contexts.
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from goals import conclude

from mxd.common.errors import MxdError
from mxd.common.files import whole_file, write_json
from mxd.common.markdown import grid
from mxd.evaluation.walk import Mean
from mxd.metrics import METRICS, QUESTIONS, explained
from mxd.metrics.faithful import (
    ACTIVE_PARAMS,
    CE_INCREASE,
    CE_INCREASE_SE,
    DECOMPOSITION,
    FLOPS,
    INTERACTION,
    KL,
    L0,
    NMSE,
    PARAMS,
    ROUTED,
)
from mxd.metrics.faithful import FVU as UNEXPLAINED
from mxd.metrics.metric import Metric
from mxd.metrics.whole import AGREED, AGREED_SE
from mxd.report import svg
from mxd.report.figures import PALETTE, save_figure
from mxd.report.page import short_name
from mxd.report.parts import Key, slots
from mxd.report.replacements import Layer, Replacement, own_replacements
from mxd.report.run import Run, read_run
from mxd.report.source import Node
from mxd.report.tradeoffs import DECADE, MIXTURE, mixture, value

UNITS = Metric("units", "N", "{:,.0f}", "units of the layer", unit="units")
K = Metric("k", "K", "{:.0f}", "units that the layer chooses for a token, where that is a fixed number", unit="units")
MIXED = Metric(
    "mixture",
    "fixed / NMSE",
    "{:.2f}",
    "1 for a transcoder and what explains little; the higher, the more of a mixture",
)
DEAD_IN_TRAINING = Metric(
    "dead_in_training",
    "dead",
    "{:.1%}",
    "units that had not been active for long when training ended",
    "lower",
    "share",
)
STEP = Metric("step_ms", "ms a step", "{:.1f}", "median time of a training step of this layer alone", "lower")
TOKEN = Metric(
    "token_us", "us a token", "{:.2f}", "the same for a token of the batch", "lower", name="µs a token, training"
)
ABOVE = Metric(
    "ce_above_best",
    "above best",
    "{:+.4f}",
    "CE increase less that of the best layer of this K, with the standard error of this difference over the same "
    "contexts and seeds; – for the best itself",
    "lower",
    "nats",
    error="ce_above_best_se",
)
ABOVE_SE = Metric("ce_above_best_se", "± s.e.", "{:.4f}", "standard error of that", unit="nats")
EXTRA = (MIXED, DEAD_IN_TRAINING, STEP, TOKEN, ABOVE, ABOVE_SE)
"""Numbers that no file of results holds."""

ASKED = (*METRICS["faithfulness"], AGREED, AGREED_SE)
"""Numbers that files of results hold."""

NEAR = 1.5
"""How far L0 may be from K, as a factor, for a layer without a K to stand with those of this K."""

WITH_RANGE = (NMSE,)
WITH_ERROR = {CE_INCREASE: CE_INCREASE_SE, ABOVE: ABOVE_SE, AGREED: AGREED_SE}

FILLED = ("full", "none", "left", "bottom", "right", "top")
"""What is filled of the markers of a method's variants."""

PLAIN = svg.Axis("")
"""Says the numbers of logarithmic ticks as the page does."""

TABLES = dict(
    zip(
        QUESTIONS,
        (
            (UNITS, K, L0, NMSE, UNEXPLAINED, CE_INCREASE, ABOVE, KL, AGREED, ROUTED, MIXED),
            (UNITS, K, L0, *(m for m in DECOMPOSITION if m.key not in {"l0", "dead_share", "skip_share"}), MIXED),
            (UNITS, K, L0, DEAD_IN_TRAINING, PARAMS, ACTIVE_PARAMS, FLOPS, STEP),
        ),
        strict=True,
    )
)
"""The tables' columns, by their titles."""


@dataclass(frozen=True)
class Axis:
    """What stands along an axis of a figure."""

    metric: Metric
    label: str = ""
    log: bool = False


FAITHFUL = (Axis(NMSE), Axis(CE_INCREASE))
FIGURES = {
    "l0": ((Axis(L0, "L0, units active for a token"),), FAITHFUL),
    "decomposition": (
        (Axis(MIXED, MIXTURE.label, True), Axis(ROUTED, "routed share"), Axis(INTERACTION, "interaction share")),
        FAITHFUL,
    ),
    "cost": (
        (Axis(FLOPS, "FLOPs a token"), Axis(ACTIVE_PARAMS, "active parameters a token"), Axis(TOKEN)),
        (Axis(CE_INCREASE),),
    ),
}
"""Name -> what stands along and up its panels."""


@dataclass
class Row:
    """A layer, with what was measured under each seed."""

    layer: Layer
    replacement: Replacement
    seeds: list[int] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    increases: dict[int, Mean] = field(default_factory=dict)
    """Seed -> the CE increase in each context, where it was kept."""

    def see(self, seed: int, values: dict[str, float], increase: Mean | None) -> None:
        """Add what was measured under a seed; numbers that are not finite were not."""
        self.seeds.append(seed)
        if increase is not None:
            self.increases[seed] = increase
        for key, number in values.items():
            if math.isfinite(number):
                self.values.setdefault(key, []).append(number)

    def mean(self, metric: Metric) -> float:
        """Return a metric's mean over the seeds, ``nan`` where it was not measured."""
        values = self.values.get(metric.key)
        return statistics.mean(values) if values else math.nan

    def ends(self, metric: Metric) -> tuple[float, float]:
        """Return the range over the seeds; of one seed, a standard error to both sides where there is one."""
        values = self.values.get(metric.key, [math.nan])
        error = self.mean(WITH_ERROR[metric]) if metric in WITH_ERROR and len(values) == 1 else 0.0
        error = error if math.isfinite(error) else 0.0
        return min(values) - error, max(values) + error

    def near(self, ks: Sequence[int]) -> float:
        """Return its K, or the one of some K that is nearest to its L0, by no more than a factor of ``NEAR``."""
        k, l0 = self.replacement.k, self.mean(L0)
        if k is not None or not ks or not l0 > 0:
            return math.inf if k is None else k
        nearest = min(ks, key=lambda other: abs(math.log(other / l0)))
        return nearest if 1 / NEAR < nearest / l0 < NEAR else math.inf

    def shown(self, metric: Metric) -> str:
        """Return a cell of a table."""
        mean, (low, high) = self.mean(metric), self.ends(metric)
        if not math.isfinite(mean):
            return "–"
        text = metric.form.format(mean)
        if metric in WITH_RANGE and len(self.seeds) > 1:
            return f"{text} ({metric.form.format(low)} to {metric.form.format(high)})"
        if metric in WITH_ERROR and math.isfinite(error := self.mean(WITH_ERROR[metric])):
            return f"{text} ± {WITH_ERROR[metric].form.format(error)}"
        return text

    def plain(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "layer": self.layer.name,
            "line": self.replacement.line,
            "sparsity": self.replacement.budget,
            "k": self.replacement.k,
            "units": self.layer.config.num_units,
            "seeds": self.seeds,
            "metrics": {
                key: {"mean": statistics.mean(v), "low": min(v), "high": max(v)} for key, v in self.values.items()
            },
        }


@dataclass
class Group:
    """Runs that differ in their seed alone."""

    about: dict[str, Any]
    """What they have in common."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its heading."""
        about = self.about
        return f"{about['model']}, block {about['block']}, {about['tokens']:,} tokens"

    def tell_apart(self) -> None:
        """Name the rows by what distinguishes them from each other, whichever runs they come from."""
        names = own_replacements([row.layer for row in self.rows.values()])
        for name, row in self.rows.items():
            row.replacement = names[name]

    def compare(self) -> None:
        """Compare every row with the best of its K, where both were measured in the same contexts."""
        for k in self.ks:
            rows = [row for row in self.rows.values() if row.near(self.ks) == k and not row.replacement.floor]
            best = min(rows, key=lambda row: row.mean(CE_INCREASE))
            for row in rows:
                row.values = {key: values for key, values in row.values.items() if key not in (ABOVE.key, ABOVE_SE.key)}
                if row is not best and (difference := _difference(row, best)):
                    row.values[ABOVE.key], row.values[ABOVE_SE.key] = [difference.value], [difference.standard_error]

    def behind(self) -> list[str]:
        """Return at which K the best MxD's CE increase is above the best layer's by more than two standard errors."""
        lines = []
        for k in self.ks:
            best, *others = [row for row in self.sorted if row.near(self.ks) == k and not row.replacement.floor]
            first = next((row for row in (best, *others) if row.layer.config.method == "mxd"), best)
            where = f"{self.title}, K = {k}"
            if first is not best and ABOVE.key not in first.values:
                lines.append(f"{where}: not compared, since the losses of the contexts were not kept")
            elif first is not best and first.mean(ABOVE) > 2 * first.mean(ABOVE_SE):
                lines.append(f"{where}: MxD is {first.shown(ABOVE)} nats above {best.replacement.line}")
        return lines

    @property
    def ks(self) -> list[int]:
        """The K of its layers."""
        return sorted({row.replacement.k for row in self.rows.values() if row.replacement.k})

    @property
    def sorted(self) -> list[Row]:
        """Its rows in the tables' order."""
        return sorted(
            self.rows.values(), key=lambda row: (row.replacement.floor, row.near(self.ks), row.mean(CE_INCREASE))
        )

    def plain(self) -> dict[str, Any]:
        """Return the group as plain data."""
        return self.about | {"runs": self.runs, "rows": [row.plain() for row in self.sorted]}

    def markdown(self) -> str:
        """Return its tables."""
        held = self.about["held_out"]
        seeds = sorted({run["seed"] for run in self.runs})
        parts = [
            f"### {self.title}",
            f"{held['tokens']:,} held-out tokens of {held['source']}/{held['split']}; cross-entropy of the base model "
            f"{held['ce_base']:.4f} ± {held['ce_base_se']:.4f} nats. Seeds: {', '.join(map(str, seeds))}.",
        ]
        for title, metrics in TABLES.items():
            shown = [m for m in metrics if any(math.isfinite(row.mean(m)) for row in self.sorted)]
            head = ["layer", *(_head(metric, len(seeds) > 1) for metric in shown)]
            rows = [[self._name(row, len(seeds)), *(row.shown(metric) for metric in shown)] for row in self.sorted]
            parts += [f"**{title}**", grid([head, *rows]), explained(shown)]
        return "\n\n".join(parts) + "\n"

    @staticmethod
    def _name(row: Row, seeds: int) -> str:
        few = f" ({len(row.seeds)} of {seeds} seeds)" if len(row.seeds) < seeds else ""
        return f"{row.replacement.line}, {row.replacement.budget}{few}"


def _head(metric: Metric, several: bool) -> str:
    if metric in WITH_ERROR:
        return f"{metric.title} ± s.e."
    return f"{metric.title} (range)" if several and metric in WITH_RANGE else metric.title


def _increase(result: Node) -> Mean | None:
    """Return the CE increase context by context; ``None`` where a file does not keep it."""
    kept = result.get("by_context")
    return None if kept is None else Mean.of(kept["ce_increase"].numbers(), list(map(int, kept["tokens"].numbers())))


def _difference(row: Row, other: Row) -> Mean | None:
    """Return by how much a row's CE increase exceeds another's in each context, averaged over the seeds of both."""
    seeds = row.increases.keys() & other.increases.keys()
    if not seeds:
        return None
    pairs = [(row.increases[seed], other.increases[seed]) for seed in sorted(seeds)]
    totals = [[a - b for a, b in zip(own.totals, its.totals, strict=True)] for own, its in pairs]
    return Mean([statistics.mean(column) for column in zip(*totals, strict=True)], pairs[0][0].counts)


def read(folder: Path, groups: dict[str, Group]) -> None:
    """Add a run to the groups.

    Raises:
        MxdError: it holds no faithfulness of its layers, was given before, or has another layer under a name that an
            earlier run uses.
    """
    run = read_run(folder)
    own = {layer.name: layer for layer in run.layers}
    results = [(r, node) for r, node in run.results("faithfulness") if r.path is not None]
    if not results:
        raise MxdError(f"{folder} holds no faithfulness of layers of its own; run `mxd compare` to its end.")
    generation = {r.name: node for r, node in run.results("generation")}
    for replacement, result in results:
        layer = own[replacement.name]
        group = _group(groups, layer, run, result)
        entry = {"folder": folder.resolve().name, "seed": layer.provenance.seed}
        if entry not in group.runs:
            group.runs.append(entry)
        row = group.rows.setdefault(layer.name, Row(layer, replacement))
        if row.layer.config != layer.config or layer.provenance.seed in row.seeds:
            raise MxdError(
                f"{folder}: {layer.name} was seen before with other settings or with the same seed "
                f"({layer.provenance.seed}); give runs that differ in their seed."
            )
        values = _measured(result, generation.get(replacement.name)) | _trained(run, layer)
        values |= {"units": layer.config.num_units or 0, "k": replacement.k or math.nan}
        row.see(layer.provenance.seed, values, _increase(result))
    for group in groups.values():
        group.tell_apart()
        group.compare()


def _group(groups: dict[str, Group], layer: Layer, run: Run, result: Node) -> Group:
    data, provenance = run.documents["faithfulness"][0]["data"], layer.provenance
    held = {key: data[key].text() for key in ("source", "split")}
    about = {
        "model": short_name(provenance.model),
        "revision": provenance.revision,
        "block": provenance.block,
        "tokens": provenance.tokens,
        "held_out": held | {key: result[key].value for key in ("tokens", "ce_base", "ce_base_se")},
        "training": provenance.training,
    }
    return groups.setdefault(json.dumps(about, sort_keys=True, default=str), Group(about))


def _measured(result: Node, generation: Node | None) -> dict[str, float]:
    found = {metric.key: value(result, metric.key) for metric in ASKED}
    if generation is not None:
        found |= {metric.key: generation.get(metric.key) for metric in (AGREED, AGREED_SE)}
    return {key: node.number() for key, node in found.items() if node is not None} | {MIXED.key: mixture(result)}


def _trained(run: Run, layer: Layer) -> dict[str, float]:
    lines = [line for line in run.metrics if line["replacement"] == layer.name]
    seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
    found = {DEAD_IN_TRAINING.key: lines[-1]["dead_share"]} if lines and "dead_share" in lines[-1] else {}
    if seconds:
        step = statistics.median(seconds)
        found |= {STEP.key: 1e3 * step, TOKEN.key: 1e6 * step / layer.provenance.training["batch_tokens"]}
    return found


def draw(group: Group, name: str, path: Path) -> Path | None:
    """Draw a figure of a group.

    Args:
        group: the runs.
        name: which of ``FIGURES``.
        path: where it is written.

    Returns:
        The path; ``None`` where nothing of it was measured.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = group.sorted
    along, up = FIGURES[name]
    known = [x for x in along if any(_at(row, x) for row in rows)]
    pairs = [(x, y) for y in up for x in known]
    if not pairs:
        return None
    keys = slots([row.replacement.line for row in rows])
    columns = len(known) if len(known) > 1 else len(pairs)
    lines = math.ceil(len(pairs) / columns)
    size = 4.0 * columns, 3.4 * lines + 0.21 * math.ceil(len(keys) / _abreast(columns)) + 0.5
    figure, panels = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, (x, y) in zip(panels.flat, pairs, strict=True):
        _panel(axes, rows, (x, y), keys)
    handles = [plt.Line2D([], [], linestyle="", label=key.label, **_style(key)) for key in keys.values()]
    figure.legend(handles=handles, loc="outside lower left", ncols=_abreast(columns), frameon=False, fontsize=8)
    figure.suptitle(group.title.replace("$", r"\$"), fontsize=10)
    return save_figure(figure, path)


def _abreast(columns: int) -> int:
    """Return how many entries of a legend stand beside each other."""
    return 3 * columns // 2


def _at(row: Row, axis: Axis) -> bool:
    return math.isfinite(row.mean(axis.metric))


def _panel(axes: Any, rows: Sequence[Row], pair: tuple[Axis, Axis], keys: dict[str, Key]) -> None:
    """Draw one panel.

    Args:
        axes: matplotlib's.
        rows: the layers.
        pair: what stands along and up.
        keys: colour and marker by line.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    shown = [row for row in rows if all(_at(row, axis) for axis in pair)]
    for row in shown:
        if pair[0].metric is L0 and row.replacement.floor:  # nothing is chosen: a level to compare with
            axes.axhline(row.mean(pair[1].metric), linewidth=1, color=_style(keys[row.replacement.line])["color"])
            continue
        (x, y), (across, height) = (axis.metric for axis in pair), (row.mean(axis.metric) for axis in pair)
        bars = [[[abs(end - mean)] for end in row.ends(m)] for m, mean in ((x, across), (y, height))]
        style = _style(keys[row.replacement.line])
        axes.errorbar(across, height, xerr=bars[0], yerr=bars[1], linewidth=0.8, linestyle="", **style)
    for axis, direction in zip(pair, "xy", strict=True):
        values = [row.mean(axis.metric) for row in shown if axis.metric is not L0 or not row.replacement.floor]
        low, ratio = min(values, default=0.0), max(values, default=0.0) / min([v for v in values if v], default=1.0)
        if low > 0 and (axis.log or ratio > DECADE):
            axes.set(**{f"{direction}scale": "log"})
            ticks = getattr(axes, f"{direction}axis")
            ticks.set_major_locator(LogLocator(subs=svg.log_ticks(ratio)))
            ticks.set_major_formatter(lambda value, _: PLAIN.said(value))
            ticks.set_minor_locator(NullLocator())
        elif direction == "y":
            bottom, top = min(0.0, axes.get_ylim()[0]), axes.get_ylim()[1]
            axes.set_ylim(bottom, top + 0.03 * (top - bottom))
        axes.set(**{f"{direction}label": axis.label or axis.metric.label})
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _style(key: Key) -> dict[str, Any]:
    """Return a line's style in matplotlib: variants differ in what is filled, and further ones in size."""
    filled = FILLED[key.variant % len(FILLED)]
    return {
        "color": list(PALETTE.values())[key.colour],
        "marker": key.marker,
        "fillstyle": filled,
        "markerfacecoloralt": "white",
        "markersize": 6 + 3 * (key.variant // len(FILLED)),
    }


def main() -> None:
    """Read the runs, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of finished runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="write the figures beside this name")
    parser.add_argument("--markdown", action="store_true", help="print the tables")
    parser.add_argument("--check", action="store_true", help="exit 1 and name the K at which MxD is behind")
    args = parser.parse_args()
    if not (args.json or args.figure or args.markdown or args.check):
        raise SystemExit("nothing to do: give --json FILE, --figure FILE.png, --markdown or --check.")
    try:
        groups: dict[str, Group] = {}
        for folder in args.runs:
            read(folder, groups)
        write(list(groups.values()), args.json, args.figure)
    except MxdError as error:
        raise SystemExit(str(error)) from None
    if args.markdown:
        print("\n".join(group.markdown() for group in groups.values()), end="")
    if args.check:
        behind = [line for group in groups.values() for line in group.behind()]
        conclude(behind, "at no K is MxD above the best layer by two standard errors")


def write(groups: Sequence[Group], numbers: Path | None, figure: Path | None) -> None:
    """Write the files.

    Args:
        groups: what was read.
        numbers: the JSON file, if one is asked for.
        figure: what the figures' names begin with, if they are.
    """
    if numbers:
        with whole_file(numbers) as file:
            write_json(file, [group.plain() for group in groups])
    if figure:
        for n, group in enumerate(groups, 1):
            number = f"-{n}" if len(groups) > 1 else ""
            for name in FIGURES:
                draw(group, name, figure.with_name(f"{figure.stem}{number}-{name}{figure.suffix}"))


if __name__ == "__main__":
    main()

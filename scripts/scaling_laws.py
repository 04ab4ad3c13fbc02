"""Power laws of the error, and whether a longer run lands where they say: tables, numbers and a figure.

    python scripts/scaling_laws.py RUN [RUN ...] [--beyond RUN ... [--check]] [--metric KEY ...] [--json FILE]
        [--figure FILE]

Each run holds the `faithfulness.json` of `mxd evaluate`; layers without a fixed K are left out
(configs/scaling-laws.yaml). For each method, laws of each metric y are fitted by least squares on log y:

    power        log y = c + sum_i e_i log v_i
    interaction  the same and e_ij log v_i log v_j for every pair; Gao et al. (arXiv 2406.04093, section 3.1) have the
                 one of N and K
    floor        log (y - E) = c + sum_i e_i log v_i, with the E >= 0 that leaves the least squares of log y

over those v that differ between the layers: training tokens T, units N for each dimension of the model (so that models
of several widths can be compared), K, and width d. Logarithms are less their means over the layers: an exponent is the
slope in the middle of them, and a pair's is how the one changes with the other. `--beyond` names runs that are not
fitted but predicted.

Intervals of 95% come from 500 bootstrap samples of the layers: of an exponent its quantiles, of a prediction those of
the samples' predictions, each with a residual of some layer, enlarged by the degrees of freedom of the fit. They know
of the scatter of these layers and of nothing else: whether a law of this form goes on is what `--beyond` tests. `error`
is the root mean square of the residuals of log y, so 0.05 is 5%.

`--json` writes a list: `method`, `metric`, `form`, `layers`, `error`, `floor`, `exponents` (name -> `value`, `low`,
`high`) and `beyond` (a list with `run`, `tokens`, `units`, `k`, `measured`, `predicted`, `low`, `high`, `inside`).
`--check` fails where a law does not hold: more than a tenth of what it predicts lies outside of its intervals.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from goals import conclude
from jaxtyping import Float

from mxd.common.errors import MxdError
from mxd.common.files import whole_file, write_json
from mxd.common.markdown import grid
from mxd.metrics import METRICS as FAITHFUL
from mxd.report.figures import PALETTE, STYLES, save_figure

Result = dict[str, Any]
Logs = Float[np.ndarray, " layers"]
"""A logarithm for each layer."""
SAMPLES = 500
METRICS = ("normalized_mse", "kl", "ce_increase")
FEWEST = 12
"""Layers that a law needs."""

HELD = 0.9
"""Share of its predictions that are to lie within a law's intervals of 95%."""

FORMS = ("power", "interaction", "floor")
NAMES = {"tokens": "T", "units": "N", "k": "K", "width": "d"}


@dataclass(frozen=True)
class Layer:
    """A layer of a run and what was measured of it."""

    run: str
    method: str
    place: dict[str, float]
    """What the laws are of: tokens, units for each dimension, K, width."""
    metrics: dict[str, float]

    @property
    def units(self) -> int:
        """Units of the layer."""
        return round(self.place["units"] * self.place["width"])


@dataclass(frozen=True)
class Law:
    """A fitted law."""

    terms: tuple[tuple[str, ...], ...]
    """What it is of, each a name or two of them for a pair."""
    coefficients: Float[np.ndarray, " terms_1"]
    """The constant first."""
    middle: Mapping[str, float]
    """Where logarithms are 0, so that exponents are slopes there."""
    floor: float = 0.0

    def log(self, layers: Sequence[Layer]) -> Logs:
        """Return what it says of the logarithm of the metric."""
        return np.log(self.floor + np.exp(design(layers, self.terms, self.middle) @ self.coefficients))


def read(folder: Path) -> list[Layer]:
    """Return a run's layers that have a fixed K.

    Raises:
        MxdError: the run was not evaluated.
    """
    file = folder / "faithfulness.json"
    if not file.is_file():
        raise MxdError(f"{file} is not there: run `mxd evaluate {folder}` first.")
    layers = []
    for name, result in json.loads(file.read_text())["results"].items():
        (about,) = result["replacements"]
        (account,) = result["blocks"].values()
        if about["k"] is None:
            continue
        width = json.loads((folder / Path(name).name / "config.json").read_text())["layer"]["d_in"]
        place = {"tokens": about["tokens_trained"], "units": about["units"] / width, "k": about["k"], "width": width}
        layers.append(Layer(folder.name, about["method"], place, result | account))
    return layers


def varying(layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return the names of what differs between the layers."""
    return tuple(name for name in NAMES if len({layer.place[name] for layer in layers}) > 1)


def center(layers: Sequence[Layer]) -> dict[str, float]:
    """Return the means of the logarithms of what laws are of."""
    return {name: float(np.mean(np.log([layer.place[name] for layer in layers]))) for name in NAMES}


def design(
    layers: Sequence[Layer], terms: Sequence[tuple[str, ...]], middle: Mapping[str, float]
) -> Float[np.ndarray, "layers terms_1"]:
    """Return a column of ones and, for each term, the product of the logarithms of what it names."""
    logs = {name: np.log([layer.place[name] for layer in layers]) - middle[name] for name in NAMES}
    return np.stack([np.ones(len(layers)), *(np.prod([logs[n] for n in term], axis=0) for term in terms)], axis=1)


def fit(layers: Sequence[Layer], metric: str, form: str, middle: Mapping[str, float]) -> Law:
    """Fit one form of law to a metric of some layers.

    Args:
        layers: of one method; more than the law has terms.
        metric: key of the number, above 0 in every layer.
        form: one of `FORMS`.
        middle: see `Law`.
    """
    terms: tuple[tuple[str, ...], ...] = tuple(combinations(varying(layers), 1))
    if form == "interaction":
        terms += tuple(combinations(varying(layers), 2))
    values, columns = np.array([layer.metrics[metric] for layer in layers]), design(layers, terms, middle)
    floors = np.linspace(0, 0.99, 100) * values.min() if form == "floor" else np.zeros(1)
    coefficients = np.linalg.lstsq(columns, np.log(values[:, None] - floors))[0]  # of every floor at once
    errors = np.log(values)[:, None] - np.log(floors + np.exp(columns @ coefficients))
    best = np.argmin((errors**2).sum(0))
    return Law(terms, coefficients[:, best], middle, float(floors[best]))


def bootstrapped(layers: Sequence[Layer], metric: str, form: str) -> Iterator[Law]:
    """Yield a law for every sample of the layers; one without all terms is drawn again."""
    generator, names, middle = np.random.default_rng(0), varying(layers), center(layers)
    for _ in range(SAMPLES):
        sample: list[Layer] = []
        while varying(sample) != names:
            sample = [layers[i] for i in generator.integers(len(layers), size=len(layers))]
        yield fit(sample, metric, form, middle)


def described(layers: Sequence[Layer], beyond: Sequence[Layer], metric: str, form: str) -> Result:
    """Return a law of some layers, its intervals, and what it says of others."""
    law, generator = fit(layers, metric, form, center(layers)), np.random.default_rng(1)
    samples = list(bootstrapped(layers, metric, form))
    low, high = np.quantile([sample.coefficients for sample in samples], [0.025, 0.975], axis=0)
    found = zip(law.terms, law.coefficients[1:], low[1:], high[1:], strict=True)
    residuals = np.log([layer.metrics[metric] for layer in layers]) - law.log(layers)
    # A fit's residuals are smaller than the scatter, by the degrees of freedom that it takes.
    scatter = residuals / np.sqrt(1 - len(law.coefficients) / len(layers))
    draws = [sample.log(beyond) + generator.choice(scatter, size=len(beyond)) for sample in samples]
    ends = np.exp(np.quantile(draws, [0.025, 0.975], axis=0)) if beyond else np.empty((2, 0))
    return {
        "method": layers[0].method,
        "metric": metric,
        "form": form,
        "layers": len(layers),
        "error": float(np.sqrt(np.mean(residuals**2))),
        "floor": law.floor,
        "exponents": {symbol(term): {"value": v, "low": a, "high": b} for term, v, a, b in found},
        "beyond": [
            predicted(layer, metric, float(middle), float(a), float(b))
            for layer, middle, a, b in zip(beyond, np.exp(law.log(beyond)), *ends, strict=True)
        ],
    }


def symbol(term: Sequence[str]) -> str:
    """Return a term's letters."""
    return "".join(NAMES[name] for name in term)


def predicted(layer: Layer, metric: str, middle: float, low: float, high: float) -> Result:
    """Return what was measured of a layer beside what a law says."""
    measured = layer.metrics[metric]
    place = {"run": layer.run, "tokens": layer.place["tokens"], "units": layer.units, "k": layer.place["k"]}
    return place | {
        "measured": measured,
        "predicted": middle,
        "low": low,
        "high": high,
        "inside": low <= measured <= high,
    }


def laws(fitted: Sequence[Layer], beyond: Sequence[Layer], metrics: Sequence[str]) -> Iterator[Result]:
    """Yield every law: of each method and metric in each form.

    Raises:
        MxdError: too few layers of a method, or a metric that no logarithm can be taken of.
    """
    for method in sorted({layer.method for layer in fitted}):
        own = [layer for layer in fitted if layer.method == method]
        if len(own) < FEWEST:
            raise MxdError(f"{len(own)} layers of {method} are too few for a law; {FEWEST} are needed.")
        for metric in metrics:
            if not all(layer.metrics.get(metric, 0) > 0 for layer in own):
                raise MxdError(f"{metric} is not above 0 in every layer of {method}, so no power law is fitted.")
            for form in FORMS:
                yield described(own, [layer for layer in beyond if layer.method == method], metric, form)


def markdown(rows: Sequence[Result]) -> str:
    """Return the table of the laws."""
    terms = list(dict.fromkeys(term for row in rows for term in row["exponents"]))
    terms.sort(key=len)
    lines = [["method", "metric", "form", *terms, "floor", "error", "beyond"]]
    for row in rows:
        cells = [row["method"], row["metric"], row["form"]]
        found = [row["exponents"].get(term) for term in terms]
        cells += [f"{e['value']:+.2f} ({e['low']:+.2f} to {e['high']:+.2f})" if e else "" for e in found]
        inside = [one["inside"] for one in row["beyond"]]
        cells += [f"{row['floor']:.4f}" if row["floor"] else "", f"{row['error']:.3f}"]
        lines.append([*cells, f"{sum(inside)} of {len(inside)}" if inside else ""])
    return grid(lines)


def predictions(rows: Sequence[Result], metric: str) -> str:
    """Return the table of the runs that were predicted, by one metric."""
    rows = [row for row in rows if row["metric"] == metric]
    lines = [["method", "N", "K", "measured", *FORMS]]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row["beyond"] for row in rows if row["method"] == method]
        for forms in zip(*own, strict=True):
            one = forms[0]
            start = [method, str(one["units"]), f"{one['k']:g}", f"{one['measured']:.4f}"]
            lines.append([*start, *(interval(form) for form in forms)])
    return grid(lines)


def interval(one: Result) -> str:
    """Return a prediction as a cell, marked where it failed."""
    said = f"{one['predicted']:.4f} ({one['low']:.4f} to {one['high']:.4f})"
    return said if one["inside"] else f"{said} **no**"


def draw(fitted: Sequence[Layer], rows: Sequence[Result], metric: str, path: Path) -> None:
    """Draw a metric against training tokens and against units, a panel for each method and a line for each K.

    Against tokens: the middle number of units, and of the runs beyond what was measured (stars) and what the first form
    of law says, with its interval; against units: the longest fitted run.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    methods = [name for name in STYLES if any(layer.method == name for layer in fitted)]
    figure, panels = plt.subplots(
        2, len(methods), figsize=(3.2 * len(methods), 5.6), sharey=True, squeeze=False, layout="constrained"
    )
    ks = sorted({layer.place["k"] for layer in fitted})
    colors = dict(zip(ks, PALETTE.values(), strict=False))
    for column, method in enumerate(methods):
        own = [layer for layer in fitted if layer.method == method]
        middle = sorted({layer.units for layer in own})[len({layer.units for layer in own}) // 2]
        longest = max(layer.place["tokens"] for layer in own)
        for axes, by in zip(panels[:, column], ("tokens", "units"), strict=True):
            fixed = [x for x in own if (x.units == middle if by == "tokens" else x.place["tokens"] == longest)]
            for k in ks:
                line = sorted((x for x in fixed if x.place["k"] == k), key=lambda x: x.place[by])
                places = [x.place[by] if by == "tokens" else x.units for x in line]
                axes.plot(places, [x.metrics[metric] for x in line], color=colors[k], marker="o", label=f"K = {k:g}")
            if by == "tokens":
                told = (method, metric, FORMS[0])
                laws_here = [row for row in rows if (row["method"], row["metric"], row["form"]) == told]
                for x in (x for row in laws_here for x in row["beyond"] if x["units"] == middle):
                    color, middle_value = colors[x["k"]], x["predicted"]
                    ends = [[middle_value - x["low"]], [x["high"] - middle_value]]
                    beside = x["tokens"] * 0.75 ** (1 + ks.index(x["k"]))  # intervals of several K overlap
                    axes.errorbar(beside, middle_value, ends, color=color, marker="_", capsize=3)
                    axes.plot(x["tokens"], x["measured"], color=color, marker="*", markersize=11)
            axes.set(xscale="log", yscale="log", xlabel=f"{'training tokens' if by == 'tokens' else 'units N'}")
            if by == "units":
                units = sorted({x.units for x in own})
                axes.set_xticks(units, list(map(str, units)))
                axes.set_xticks([], minor=True)
            axes.grid(alpha=0.25, which="both")
            axes.spines[["top", "right"]].set_visible(False)
        panels[0, column].set_title(f"{method}, N = {middle:,}")
        panels[1, column].set_title(f"{method}, {longest / 1e6:.2f}M tokens")
    for axes in panels[:, 0]:
        axes.set_ylabel(next((known.label for known in FAITHFUL["faithfulness"] if known.key == metric), metric))
    panels[0, 0].legend(frameon=False)
    if any(row["beyond"] for row in rows):
        marks = {"*": "measured beyond", "_": "power law, 95%"}
        lines = [
            plt.Line2D([], [], linestyle="", color=PALETTE["grey"], marker=m, label=said) for m, said in marks.items()
        ]
        panels[0, -1].legend(handles=lines, frameon=False)
    save_figure(figure, path)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="what the laws are fitted to")
    parser.add_argument("--beyond", nargs="+", type=Path, default=[], metavar="RUN", help="what they are to predict")
    parser.add_argument("--metric", nargs="+", default=METRICS, help=f"default: {' '.join(METRICS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the first metric, as .png or .svg")
    parser.add_argument("--check", action="store_true", help="exit 1 and name the laws that --beyond does not bear out")
    args = parser.parse_args()
    try:
        fitted, beyond = ([layer for run in runs for layer in read(run)] for runs in (args.runs, args.beyond))
        rows = list(laws(fitted, beyond, args.metric))
    except MxdError as error:
        raise SystemExit(str(error)) from None
    print(markdown(rows), predictions(rows, args.metric[0]) if beyond else "", sep="\n\n")
    if args.json:
        with whole_file(args.json) as file:
            write_json(file, rows)
    if args.figure:
        draw(fitted, rows, args.metric[0], args.figure)
    if args.check:
        if not beyond:
            raise SystemExit("--check needs --beyond: a law is tested by what it was not fitted to.")
        shares = [sum(one["inside"] for one in row["beyond"]) / len(row["beyond"]) for row in rows]
        failed = [
            f"{row['method']}, {row['metric']}, {row['form']}: {share:.0%} inside"
            for row, share in zip(rows, shares, strict=True)
            if share < HELD
        ]
        conclude(failed, "every law holds")


if __name__ == "__main__":
    main()

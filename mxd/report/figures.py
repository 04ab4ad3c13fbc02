"""Results as figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxd.common.errors import printable
from mxd.common.files import atomic_file
from mxd.common.parsing import without_surrogates
from mxd.layers.sparsity import AlwaysConfig
from mxd.metrics.faithful import CE_INCREASE, NMSE
from mxd.report.source import Node

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

PALETTE = {
    "red": "#d1304b",
    "blue": "#1f5f9e",
    "teal": "#00897b",
    "amber": "#b87400",
    "grey": "#747c84",
    "violet": "#7a52c4",
    "green": "#3d6b12",
    "magenta": "#c2479f",
    "brown": "#6e3a1e",
    "sky": "#2f8fd0",
    "ink": "#1c2024",
}
"""Colours by name. The page's style sheet has the same, numbered in this order, and others for dark screens."""

STYLES = {
    "MxD": ("red", "o"),
    "TC": ("blue", "s"),
    "STC": ("teal", "^"),
    "M-TC": ("sky", "o"),
    "M-STC": ("brown", "s"),
    "CP-muMoE": ("amber", "D"),
    "TR-muMoE": ("teal", "d"),
    "Tucker-muMoE": ("red", "X"),
    "muMoE-block": ("green", "*"),
    "MoE": ("violet", "P"),
    "SMoE": ("sky", "X"),
    "MoV": ("blue", ">"),
    "Monet-HD": ("magenta", "*"),
    "Monet-VD": ("ink", "<"),
    "PEER": ("brown", "v"),
    "MOLT": ("violet", "d"),
    "SMOLT": ("amber", "^"),
    "SAE": ("grey", "v"),
    "M-SAE": ("green", "<"),
    "Linear": ("ink", "_"),
    "Low-rank": ("grey", "_"),
}
"""Colour and marker (matplotlib's letter) of each method: those that share a marker have colours that differ for every
kind of colour vision, and those that share a colour have markers of different kinds."""

OTHERS = (("blue", "o"), ("amber", "o"), ("magenta", "s"), ("green", "^"), ("grey", "D"), ("ink", "X"))
"""The same, in turn, for whatever is not in ``STYLES``."""


def frontier(evaluation: Mapping[str, Any], path: str | Path) -> Path:
    """Draw normalized MSE and cross-entropy increase against K, one line for each method and block (MxD, figure 3).

    Layers that choose nothing are level lines. Splices of several layers, and others without a K, are left out.

    Raises:
        MxdError: the evaluation lacks what is drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    document = Node(evaluation, "faithfulness.json")
    data = document["data"]
    model, source, split = (_literal(node.text()) for node in (document["model"], data["source"], data["split"]))
    lines: dict[tuple[str, str], list[tuple[float, float, float, float]]] = {}
    floors: list[tuple[str, str, float, float]] = []
    for _, result in document["results"].items():
        replacement = result["replacements"][0]
        floor = replacement["sparsity"].value == AlwaysConfig().slug
        if len(list(result["replacements"])) > 1 or (replacement["k"].value is None and not floor):
            continue
        block = str(replacement["block"].value)
        nmse = result["blocks"][block][NMSE.key].number()
        if floor:
            floors.append((_literal(replacement["method"].text()), block, nmse, result[CE_INCREASE.key].number()))
            continue
        point = (replacement["k"].number(), nmse, result[CE_INCREASE.key].number(), result[CE_INCREASE.error].number())
        lines.setdefault((_literal(replacement["method"].text()), block), []).append(point)
    several = len({block for _, block in lines} | {block for _, block, _, _ in floors}) > 1
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for (method, block), points in lines.items():
        points.sort()
        ks, errors, increase, deviations = zip(*points, strict=True)
        color, marker = STYLES.get(method, OTHERS[0])
        style = {"color": PALETTE[color], "marker": marker, "label": f"{method}, block {block}" if several else method}
        left.plot(ks, errors, **style)
        right.errorbar(ks, increase, yerr=deviations, capsize=3, **style)
    for method, block, *levels in floors:
        color = PALETTE[STYLES.get(method, OTHERS[0])[0]]
        label = f"{method}, block {block}" if several else method
        for axes, level in zip((left, right), levels, strict=True):
            axes.axhline(level, color=color, linestyle="--", linewidth=1, label=label)
    for axes, title in ((left, NMSE.label), (right, CE_INCREASE.label)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({p[0] for points in lines.values() for p in points}), minor=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("K, units active for a token")
        axes.set_title(title)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    if lines or floors:
        left.legend(frameon=False)
    figure.suptitle(f"{model}, {source} {split} text: lower is more faithful", fontsize=10)
    return save_figure(figure, Path(path))


def save_figure(figure: "MatplotlibFigure", path: Path) -> Path:
    """Write a figure, whole or not at all, and close it; the suffix of ``path`` says in which format."""
    from matplotlib import pyplot as plt

    with atomic_file(path) as file:
        figure.savefig(file, dpi=160, format=path.suffix[1:])
    plt.close(figure)
    return path


def _literal(text: str) -> str:
    """Return a text that matplotlib shows as it is, not as a formula."""
    return printable(without_surrogates(text)).replace("$", r"\$")

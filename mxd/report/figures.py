"""Results as figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxd.checkpoint import atomic_file
from mxd.errors import printable

STYLES = {
    "MxD": ("#d1495b", "o"),
    "TC": ("#30638e", "s"),
    "STC": ("#00798c", "^"),
    "CP-muMoE": ("#edae49", "D"),
    "SAE": ("#7a7a7a", "v"),
}


def frontier(evaluation: Mapping[str, Any], path: str | Path) -> Path:
    """Draw normalized MSE and cross-entropy increase against K, one line for each method and layer (MxD, figure 3).

    Splices of several layers and layers without a K are left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines: dict[tuple[str, int], list[tuple[int, float, float, float]]] = {}
    for result in evaluation["results"].values():
        what = result["replacements"][0]
        if len(result["replacements"]) > 1 or what["k"] is None:
            continue
        metrics = result["layers"][str(what["layer"])]
        point = (what["k"], metrics["normalized_mse"], result["ce_increase"], result["ce_increase_se"])
        lines.setdefault((what["method"], what["layer"]), []).append(point)
    several = len({layer for _, layer in lines}) > 1
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for (method, layer), points in lines.items():
        points.sort()
        ks, nmse, increase, error = zip(*points, strict=True)
        color, marker = STYLES.get(method, ("black", "x"))
        style = {"color": color, "marker": marker, "label": f"{method}, layer {layer}" if several else method}
        left.plot(ks, nmse, **style)
        right.errorbar(ks, increase, yerr=error, capsize=3, **style)
    for axes, title in ((left, "normalized MSE"), (right, "cross-entropy increase (nats per token)")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({p[0] for points in lines.values() for p in points}), minor=False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("K, units active for a token")
        axes.set_title(title)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    if lines:
        left.legend(frameon=False)
    data = evaluation["data"]
    title = f"{evaluation['model']}, {data['source']} {data['split']} text: lower is more faithful"
    figure.suptitle(printable(title), fontsize=10, parse_math=False)
    path = Path(path)
    with atomic_file(path) as file:
        figure.savefig(file, dpi=160, format=path.suffix[1:])
    plt.close(figure)
    return path

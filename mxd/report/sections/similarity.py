"""Which units are alike: cosine similarities between the gate rows of the busiest units."""

import base64
from io import BytesIO
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from mxd.artifacts.checkpoint import load_layer
from mxd.report.parts import NOTHING, Cell, Column, Part, Picture, Pictures, Section, Table
from mxd.report.replacements import usual
from mxd.report.run import Run
from mxd.report.source import Node

UNITS = 64
"""Units on a map."""
PAIRS = 5
"""Most similar pairs listed."""


def section(run: Run) -> Section | None:
    """Return maps of similarity; ``None`` where firing rates were not measured."""
    pictures, rows = [], []
    for replacement, result in usual(run.results("units")):
        if replacement.path is None:
            continue
        units = busiest(result["rates"])
        gates = load_layer(replacement.path).layer.gates
        units = [unit for unit in units if unit < gates.units]
        if len(units) < 3:
            continue
        weight = gates.rows(torch.tensor(units))[0].detach().float().cpu().numpy()
        order = chain(cosines(weight))
        units, similar = [units[i] for i in order], cosines(weight[order])
        pairs = closest(similar)
        off = similar[~np.eye(len(units), dtype=bool)]
        alt = f"{replacement.label}: cosine similarities of {len(units)} units, from {off.min():.2f} to {off.max():.2f}"
        pictures.append(Picture(replacement.label, picture(similar), alt))
        source = f"{replacement.path.name}/model.safetensors"
        listed = [Cell(f"{units[i]} – {units[j]}: {similar[i, j]:+.2f}", source) for i, j in pairs]
        listed += [Cell(NOTHING)] * (PAIRS - len(listed))
        rows.append([Cell(replacement.label), Cell(f"{np.abs(off).mean():.3f}", source), *listed])
    if not pictures:
        return None
    columns = [Column("replacement"), Column("mean |cosine|"), *(Column(f"pair {n + 1}") for n in range(PAIRS))]
    parts: list[Part] = [
        Pictures("Blue: alike; red: opposed; blank: unrelated. Neighbours on a map are similar.", pictures),
        Table("The most similar pairs of the busiest units, by number.", columns, rows),
    ]
    lead = (
        f"Cosine similarities between the gate rows of the {UNITS} units that fire most (rates from units.json, gates "
        "from the checkpoints). Units with similar rows fire on similar inputs."
    )
    return Section("similarity", "Similar units", lead, parts)


def busiest(rates: Node) -> list[int]:
    """Return the numbers of the units that fire most."""
    values = np.nan_to_num(np.array(rates.numbers()))
    return [int(i) for i in np.argsort(-values, kind="stable")[:UNITS] if values[i] > 0]


def cosines(rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n n"]:
    """Return the cosine similarities of all pairs of rows; 0 for a row of zeros."""
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    return unit @ unit.T


def chain(similar: Float[np.ndarray, "n n"]) -> list[int]:
    """Return an order in which each row is followed by the most similar one left, so that groups show as squares."""
    order, left = [0], set(range(1, len(similar)))
    while left:
        order.append(max(left, key=lambda i: similar[order[-1], i]))
        left.remove(order[-1])
    return order


def closest(similar: Float[np.ndarray, "n n"]) -> list[tuple[int, int]]:
    """Return the most similar pairs, the most similar first."""
    above = np.triu_indices(len(similar), 1)
    order = np.argsort(-similar[above], kind="stable")[:PAIRS]
    return [(int(above[0][i]), int(above[1][i])) for i in order]


def picture(similar: Float[np.ndarray, "n n"]) -> str:
    """Return a map as a PNG's data address: colour is the sign and opacity the size, so it suits any background."""
    from matplotlib.image import imsave

    colours: Any = np.where(similar[..., None] > 0, (0.16, 0.44, 0.73), (0.80, 0.24, 0.30))
    pixels = np.concatenate([colours, np.clip(np.abs(similar), 0, 1)[..., None]], -1)
    file = BytesIO()
    imsave(file, np.kron(pixels, np.ones((4, 4, 1))), format="png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

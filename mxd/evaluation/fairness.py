"""How evenly a classifier serves groups: metrics of its accuracy on each cell, a group's texts of one label.

The metrics are those of muMoE (Oldfield et al., NeurIPS 2024, table 2 and appendix J); the rewrite score is that of its
earlier version. All take the cells' accuracies on the last axis, so that resampled accuracies go through at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

Numbers = Float[np.ndarray, "..."] | float
"""One number for each set of accuracies; a plain one for a single set."""

DRAWS = 1000
"""Bootstrap samples of the texts."""


@dataclass(frozen=True)
class Cells:
    """The cells of a set, pairs of a label and a group: how many texts of each are measured, which is the target."""

    labels: list[str]
    groups: list[str]
    texts: Int[np.ndarray, " cells"]
    target: int

    @property
    def same_label(self) -> Bool[np.ndarray, " cells"]:
        """The other cells with the target's label."""
        same = np.array([label == self.labels[self.target] for label in self.labels])
        same[self.target] = False
        return same

    @property
    def names(self) -> list[str]:
        """What the cells are called."""
        return [f"{label}, {group}" for label, group in zip(self.labels, self.groups, strict=True)]


def cell_accuracies(
    right: Bool[np.ndarray, "*ways texts"], cell_of: Int[np.ndarray, " texts"], cells: int
) -> Float[np.ndarray, "*ways cells"]:
    """Return the accuracy on each cell.

    Args:
        right: which texts are classified right.
        cell_of: the number of each text's cell.
        cells: how many cells there are; each has a text.
    """
    return np.stack([right[..., cell_of == cell].mean(-1) for cell in range(cells)], -1)


def resampled(
    right: Bool[np.ndarray, "ways texts"], cell_of: Int[np.ndarray, " texts"], cells: int, seed: int, draws: int = DRAWS
) -> Float[np.ndarray, "ways draws cells"]:
    """Return accuracies on bootstrap samples, drawn within each cell; the same texts for all ways.

    Args:
        right: which texts are classified right, in several ways.
        cell_of: the number of each text's cell.
        cells: how many cells there are; each has a text.
        seed: draws the samples.
        draws: how many.
    """
    rng = np.random.default_rng(seed)
    found = []
    for cell in range(cells):
        members = np.flatnonzero(cell_of == cell)
        found.append(right[:, rng.choice(members, (draws, len(members)))].mean(-1))
    return np.stack(found, -1)


def equality_of_opportunity(accuracies: Float[np.ndarray, "*n cells"], cells: Cells) -> Numbers:
    """Return ``|P(yhat = y | A = a, y) - P(yhat = y | A != a, y)|``, y the target's label and a its group.

    0 where texts of the label are recognised as often in the target's group as in the others.

    Args:
        accuracies: on each cell.
        cells: what these are; some other group has the target's label.
    """
    others = cells.same_label * cells.texts
    return np.abs(accuracies[..., cells.target] - accuracies @ (others / others.sum()))


def std_bias(accuracies: Float[np.ndarray, "*n cells"]) -> Numbers:
    """Return the standard deviation of the cells' accuracies about their mean (of all of them, not of a sample)."""
    return accuracies.std(-1)


def max_min(accuracies: Float[np.ndarray, "*n cells"]) -> Numbers:
    """Return the least accuracy of a cell."""
    return accuracies.min(-1)


def overall(accuracies: Float[np.ndarray, "*n cells"], cells: Cells) -> Numbers:
    """Return the accuracy on all texts, among which a rare cell counts little."""
    return accuracies @ (cells.texts / cells.texts.sum())


def rewrite_score(
    before: Float[np.ndarray, "*#n cells"], after: Float[np.ndarray, "*#n cells"], target: int
) -> Numbers:
    """Return what the target's accuracy gains, less all that the other cells' accuracies move, up or down.

    At most ``1 - before[target]``: the target is always right, and nothing else has changed.

    Args:
        before: accuracy on each cell.
        after: the same once outputs are rewritten.
        target: the number of the target cell.
    """
    change = after - before
    gain = change[..., target]
    return gain - (np.abs(change).sum(-1) - np.abs(gain))


def metrics(
    before: Float[np.ndarray, "*#n cells"], after: Float[np.ndarray, "*#n cells"], cells: Cells
) -> dict[str, Numbers]:
    """Return every metric by name.

    Args:
        before: accuracy on each cell.
        after: the same once outputs are rewritten.
        cells: what these are.
    """
    return {
        "target_accuracy": after[..., cells.target],
        "equality_of_opportunity": equality_of_opportunity(after, cells),
        "std_bias": std_bias(after),
        "max_min": max_min(after),
        "accuracy": overall(after, cells),
        "rewrite_score": rewrite_score(before, after, cells.target),
    }


def compared(
    right: Bool[np.ndarray, "edits texts"],
    ways: Mapping[str, Sequence[int]],
    cell_of: Int[np.ndarray, " texts"],
    cells: Cells,
    gains: Mapping[str, tuple[str, str]],
    seed: int,
) -> dict[str, Any]:
    """Return the metrics of several ways of rewriting on the same texts, with bootstrap standard errors.

    Args:
        right: which texts are classified right under each edit; nothing is edited in row 0.
        ways: name -> its rows, over which metrics are averaged.
        cell_of: the number of each text's cell.
        cells: what these are.
        gains: name -> two ways, of whose rewrite scores the difference is taken, text by text.
        seed: draws the samples.

    Returns:
        ``ways``: for each what ``metrics`` returns and the accuracy on the ``cells``; and the gains. Standard
        errors have ``_se`` after the name.
    """
    accuracies = cell_accuracies(right, cell_of, len(cells.texts))
    samples = resampled(right, cell_of, len(cells.texts), seed)
    found: dict[str, Any] = {way: {} for way in ways}
    scores = {}
    for way, numbers in ways.items():
        rows = list(numbers)
        values = metrics(accuracies[:1], accuracies[rows], cells) | {"cells": accuracies[rows]}
        drawn = metrics(samples[:1], samples[rows], cells) | {"cells": samples[rows]}
        for key, value in values.items():
            found[way][key] = np.mean(value, 0).tolist()
            found[way][f"{key}_se"] = np.mean(drawn[key], 0).std(0, ddof=1).tolist()
        scores[way] = np.mean(drawn["rewrite_score"], 0)
    differences = {}
    for key, (one, other) in gains.items():
        differences[key] = found[one]["rewrite_score"] - found[other]["rewrite_score"]
        differences[f"{key}_se"] = float((scores[one] - scores[other]).std(ddof=1))
    return {"ways": found, **differences}

"""Points (score, activation) of single units: what a correlation over tokens is made of (Monet, figure 5)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from mxd.layers import Code

POINTS = 100
"""Tokens kept of a unit where it is active, and of those where it is not, at most."""


class Scatter:
    """Draws tokens evenly from those where each of some units is active, and from the others.

    Memory does not grow with the text. Units are silent at nearly all tokens, so an even draw from all would show no
    activation: ``active`` and ``tokens`` say how many each part stands for.
    """

    def __init__(self, units: Sequence[int], seed: int) -> None:
        self.units = list(units)
        self.rng = np.random.default_rng(seed)
        self.tokens = 0
        self.active = dict.fromkeys(units, 0)
        self.kept = {(unit, part): np.empty((0, 3)) for unit in units for part in (True, False)}
        """Unit and whether it is active -> the draw, score and activation of each token that is kept."""

    def see(self, code: Code, scores: Float[np.ndarray, " tokens"]) -> None:
        """Look at a batch of tokens.

        Args:
            code: their code.
            scores: the score of each.
        """
        self.tokens += len(scores)
        code = code.cpu()
        activations, indices = code.activations.double(), code.indices
        for unit in self.units:
            values = torch.where(indices == unit, activations, 0.0).sum(-1).numpy()
            self.active[unit] += int((values > 0).sum())
            rows = np.stack([self.rng.random(len(scores)), scores, values], 1)
            for part in (True, False):
                all_of_them = np.concatenate([self.kept[unit, part], rows[(values > 0) == part]])
                self.kept[unit, part] = all_of_them[np.argsort(all_of_them[:, 0])[:POINTS]]

    def report(self, unit: int) -> dict[str, Any]:
        """Return a unit's ``points``, pairs of score and activation, and how many ``tokens`` and ``active`` ones."""
        rows = np.concatenate([self.kept[unit, True], self.kept[unit, False]])
        points = [[float(f"{value:.5g}") for value in pair] for pair in rows[:, 1:]]
        return {"points": points, "tokens": self.tokens, "active": self.active[unit]}


def numbered(units: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    """Return block -> units, given the leading units of a result."""
    found: dict[int, list[int]] = {}
    for one in units:
        found.setdefault(one["block"], []).append(one["unit"])
    return found

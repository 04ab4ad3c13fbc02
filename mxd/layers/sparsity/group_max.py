"""The largest of each of K groups of units (EleutherAI's sparsify: ``groupmax``)."""

from typing import Literal

import torch
from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor

from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity.base import Sparsity, SparsityConfig
from mxd.ops import Selection

AT_ONCE = 2**26
"""Pre-activations that exist at a time: 256 MiB in float32."""


class GroupMaxConfig(SparsityConfig):
    """Divide the units into K groups of neighbours and keep the largest of each group, where it is positive."""

    kind: Literal["group_max"] = "group_max"
    """Selects this kind."""
    k: PositiveInt = 32
    """The number of groups: the most units active for a token. The number of units is a multiple of it."""

    @property
    def max_k(self) -> int:
        """K."""
        return self.k

    @property
    def slug(self) -> str:
        """For example ``groupmax32``."""
        return f"groupmax{self.k}"

    def nearest_units(self, units: int) -> int:
        """Return the nearest multiple of K."""
        return round(units / self.k) * self.k

    def check_units(self, units: int) -> None:
        """As ``SparsityConfig.check_units``: groups are equal.

        Raises:
            ValueError: they cannot be.
        """
        super().check_units(units)
        if units % self.k:
            near = self.nearest_units(units)
            raise ValueError(
                f"group_max divides the units into k = {self.k} equal groups, and num_units = {units} is no multiple "
                f"of it; set num_units to {near}, or leave it out"
            )

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return GroupMax(self.k)


class GroupMax(Sparsity):
    """``a_n = relu(x G + b_G)_n`` where n is the largest of its group ``jm ... jm + m - 1``, with ``m = N / K``.

    No top-k is taken. Units of a group exclude one another.
    """

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Float[Tensor, "tokens d_in"], gate: Gate) -> Code:
        """Keep the largest of each group."""
        first = torch.arange(0, gate.units, gate.units // self.k, device=x.device)
        with torch.no_grad():
            parts = x.split(max(1, AT_ONCE // gate.units))
            best = [gate.scores(part).unflatten(-1, (self.k, -1)).argmax(-1).squeeze(1) for part in parts]
        indices, selection = torch.cat(best) + first, Selection()
        return Code(gate.at(x, indices, selection), indices, selection=selection)

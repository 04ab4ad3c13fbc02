"""Every positive pre-activation, with an L1 term that keeps them few."""

from typing import Literal

import torch
from pydantic import NonNegativeFloat
from torch import Tensor

from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity.base import Norms, Sparsity, SparsityConfig, every_unit, one_head

Weighting = Literal["none", "factor", "norm"]


class ReLUL1Config(SparsityConfig):
    """No top-k: every unit with a positive pre-activation is active, and an L1 term keeps them few (appendix B.6.1)."""

    kind: Literal["relu_l1"] = "relu_l1"
    """Selects this kind."""
    l1: NonNegativeFloat = 1e-3
    """Weight of ``sum_n |a_n| w_n`` in the loss, averaged over tokens."""
    weighting: Weighting = "norm"
    """What ``w_n`` is. ``norm``: ``||W_n||``, of the unit's whole weight. ``factor``: the norm of its own row alone,
    ``||c_n||`` in an MxD, ``||d_n||`` in a transcoder (where both are the same): the plain penalty of a layer with rows
    of unit norm. ``none``: 1, as the paper prints it; weak units with long rows then escape it."""

    @property
    def max_k(self) -> None:
        """Not bounded."""
        return None

    @property
    def slug(self) -> str:
        """For example ``l1-0.001``, or ``l1-0.001-factor``."""
        return f"l1-{self.l1:g}" + ("" if self.weighting == "norm" else f"-{self.weighting}")

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return ReLUL1(self.l1, self.weighting)


class ReLUL1(Sparsity):
    """``a = relu(x G + b_G)`` with ``l1 * mean_tokens sum_n |a_n| w_n`` in the loss.

    The MxD paper prints ``lambda ||.||_1`` on the activations and does not say whether rows are kept at a fixed norm.
    Where they are not, half the activation and twice the row are the same function at half the penalty; weighted by
    ``norm`` or ``factor`` they cost the same. Normalising rows would add nothing to ``factor``, since ``a_n ||c_n||``
    is the activation that such a layer has.
    """

    def __init__(self, l1: float, weighting: Weighting) -> None:
        super().__init__()
        self.l1, self.weighting = l1, weighting

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep every positive pre-activation."""
        return every_unit(torch.relu(one_head(gate, x)))

    def penalty(self, code: Code, unit_norms: Norms, factor_norms: Norms) -> Tensor:
        """As ``Sparsity.penalty``: the weighted L1 norm of the activations, averaged over tokens."""
        norms = {"none": None, "factor": factor_norms, "norm": unit_norms}[self.weighting]
        rows = code.activations.reshape(-1, code.activations.shape[-1])
        return self.l1 * (rows.sum(-1) if norms is None else rows @ norms()).mean()

"""Every unit above a threshold of its own."""

from typing import Literal

import torch
from torch import Tensor

from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity.base import Sparsity, SparsityConfig, every_unit, one_head


class JumpReLUConfig(SparsityConfig):
    """Every unit above a threshold of its own is active: for layers imported from tools that train such thresholds."""

    kind: Literal["jumprelu"] = "jumprelu"
    """Selects this kind."""

    @property
    def max_k(self) -> None:
        """Not bounded."""
        return None

    @property
    def slug(self) -> str:
        """``jumprelu``."""
        return "jumprelu"

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return JumpReLU(units)


class JumpReLU(Sparsity):
    """``a = pre * (pre > threshold)`` with ``pre = relu(x G + b_G)`` (Rajamanoharan et al., 2024).

    The thresholds are state, not parameters: nothing here learns them, and with zeros this is a ReLU.
    """

    threshold: Tensor

    def __init__(self, units: int) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(units))

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep every pre-activation above its unit's threshold."""
        positive = torch.relu(one_head(gate, x))
        return every_unit(positive * (positive > self.threshold))

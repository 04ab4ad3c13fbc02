"""No choice: every unit is active at every token."""

from typing import ClassVar, Literal

from torch import Tensor

from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity.base import Sparsity, SparsityConfig, every_unit, one_head


class AlwaysConfig(SparsityConfig):
    """Every unit is active at every token: for layers without a choice, as linear maps."""

    general: ClassVar[bool] = False
    kind: Literal["always"] = "always"
    """Selects this kind."""

    @property
    def max_k(self) -> None:
        """Not bounded."""
        return None

    @property
    def slug(self) -> str:
        """``always``."""
        return "always"

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return Always()


class Always(Sparsity):
    """``a_n = 1``: the scores of a ``ConstantGate``."""

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep every unit."""
        return every_unit(one_head(gate, x))

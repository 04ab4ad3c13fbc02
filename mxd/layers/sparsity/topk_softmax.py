"""A softmax over the K largest scores: the gate of classic sparse mixtures of experts (Shazeer et al., 2017)."""

from typing import ClassVar, Literal

from pydantic import PositiveInt
from torch import Tensor

from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity.base import Sparsity, SparsityConfig
from mxd.ops import Selection


class TopKSoftmaxConfig(SparsityConfig):
    """Keep the K largest scores, whatever their sign; activations are a softmax over them and add up to 1."""

    simplex: ClassVar[bool] = True

    kind: Literal["topk_softmax"] = "topk_softmax"
    """Selects this kind."""
    k: PositiveInt = 32
    """The units active for a token."""

    @property
    def max_k(self) -> int:
        """K."""
        return self.k

    @property
    def slug(self) -> str:
        """For example ``softmax-k32``."""
        return f"softmax-k{self.k}"

    def build(self, units: int) -> "TopKSoftmax":
        """Build the module."""
        return TopKSoftmax(self.k)


class TopKSoftmax(Sparsity):
    """``a = softmax`` over the K largest of ``x G^T + b_G``; all scores are formed."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep the K largest."""
        scores = gate.scores(x).squeeze(1)
        values, units = scores.topk(self.widened(self.k, gate.units))
        return Code(values.softmax(-1), units, selection=Selection())

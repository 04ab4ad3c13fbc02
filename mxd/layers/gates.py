"""Gates: how a layer's pre-activations are made from its input, whatever is stored to make them.

Code outside ``layers/`` asks a gate and never expects a matrix ``[units, d_in]``: product keys have N = n^2 units and
store 2 n rows. ``ReplacementLayer.gates`` returns a new gate each time, a view of the layer's parameters.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.ops import CandidateDtype, Selection, topk_linear

MOST_SCORES = 2**30
"""The most pre-activations that are formed at a time: 4 GiB in float32."""


class Gate(ABC):
    """Pre-activations of ``units`` units, in each of ``heads`` heads."""

    units: int
    heads: int = 1

    def scores(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens heads units"]:
        """Return all pre-activations, dense.

        Raises:
            MxdError: there are more than ``MOST_SCORES``.
        """
        if len(x) * self.heads * self.units > MOST_SCORES:
            raise MxdError(
                f"{len(x):,} tokens have {len(x) * self.heads * self.units:,} pre-activations, more than fit "
                f"({MOST_SCORES:,}); give fewer tokens at a time (in training: a larger training.accumulation)."
            )
        return self._scores(x)

    @abstractmethod
    def top(
        self, x: Float[Tensor, "tokens d_in"], k: int, candidates: CandidateDtype, selection: Selection
    ) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """Return the ``k`` largest of ``relu(scores)`` of each token with the numbers of their units.

        Args:
            x: what the layer reads.
            k: how many.
            candidates: the dtype in which all pre-activations may be computed to find candidates, whose
                pre-activations are then computed in float32.
            selection: a new one, to be passed on to the decoder of the same indices.
        """

    @abstractmethod
    def rows(self, ids: Int[Tensor, " k"], head: int = 0) -> tuple[Float[Tensor, "k d_in"], Float[Tensor, " k"]]:
        """Return weight and bias of some units: ``scores(x)[:, head, ids] = x @ weight.T + bias``."""

    @abstractmethod
    def project(self, v: Float[Tensor, " d_in"], head: int = 0) -> Float[Tensor, " units"]:
        """Return ``weight @ v`` for all units, without the biases and without forming ``weight``."""

    @abstractmethod
    def centre(self, mean_in: Float[Tensor, " d_in"]) -> None:
        """Set the biases so that the pre-activations of the mean input are zero."""

    @abstractmethod
    def _scores(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens heads units"]:
        """Return all pre-activations."""


class LinearGate(Gate):
    """``x @ weight.T + bias``: one row for each unit."""

    def __init__(self, weight: Float[Tensor, "units d_in"], bias: Float[Tensor, " units"]) -> None:
        self.weight, self.bias = weight, bias
        self.units = len(bias)

    def top(
        self, x: Float[Tensor, "tokens d_in"], k: int, candidates: CandidateDtype, selection: Selection
    ) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """As ``Gate.top``, tile by tile: the dense pre-activations never exist."""
        return topk_linear(x, self.weight, self.bias, k, candidates, selection)

    def rows(self, ids: Int[Tensor, " k"], head: int = 0) -> tuple[Float[Tensor, "k d_in"], Float[Tensor, " k"]]:
        """Return the units' rows and biases."""
        return self.weight[ids], self.bias[ids]

    def project(self, v: Float[Tensor, " d_in"], head: int = 0) -> Float[Tensor, " units"]:
        """Return ``weight @ v``."""
        return self.weight @ v

    @torch.no_grad()
    def centre(self, mean_in: Float[Tensor, " d_in"]) -> None:
        """Set the biases to ``-weight @ mean_in``."""
        self.bias.copy_(-self.project(mean_in))

    def _scores(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens 1 units"]:
        return F.linear(x, self.weight, self.bias).unsqueeze(1)

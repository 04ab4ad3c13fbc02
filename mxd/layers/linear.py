"""Linear maps: the floor that a replacement has to beat, and that a skip connection can learn.

    y^ = x S + b                    linear
    y^ = (x A) B + b                low rank: A [d_in, R], B [R, d_out]

The map is one unit that is always on. Both start at the best fit in the squares of the errors over the first window:
least squares, and reduced-rank regression (Izenman, 1975). From there they train as every layer does, on the
normalized MSE, which weights tokens otherwise.
"""

from abc import abstractmethod
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.layers.base import ReplacementLayer, linear_init, zeros
from mxd.layers.config import Covariance, Initialisation, ReplacementConfig
from mxd.layers.gates import Code, ConstantGate
from mxd.layers.sparsity import AlwaysConfig, AnySparsity

SMALLEST = 1e-10
"""Directions in which inputs vary by less than this, relative to the main one's variance, are left out of a fit: after
a layer norm one direction holds nothing but rounding."""


class OneMapConfig(ReplacementConfig):
    """Fields of the methods whose one unit is always on."""

    kinds = ("always",)

    num_units: Literal[1] | None = 1
    """The map itself."""
    sparsity: AnySparsity = AlwaysConfig()
    """``always``: nothing is chosen."""

    @property
    def needs_covariance(self) -> bool:
        """The start is a fit."""
        return True


class OneMap(ReplacementLayer):
    """A linear map of the input as the one unit; a subclass says how it is stored."""

    @property
    def gates(self) -> ConstantGate:
        """1 for every token."""
        return ConstantGate(1, self.config.d_in or 0, self.bias)

    @abstractmethod
    def fit(self, weight: Float[Tensor, "d_in d_out"], covariance: Covariance) -> Float[Tensor, "d_in d_out"]:
        """Set the map to the best fit that it can hold, and return that.

        Args:
            weight: the best fit of any rank.
            covariance: that of inputs and outputs, in float64.
        """

    @torch.no_grad()
    def initialise(
        self,
        mean_in: Float[Tensor, " d_in"],
        mean_out: Float[Tensor, " d_out"],
        start: Initialisation = "paper",
        covariance: Covariance | None = None,
    ) -> None:
        """As ``ReplacementLayer.initialise``: the best affine fit, whatever ``start``; without second moments, only b.

        Args:
            mean_in: mean of the MLP's inputs.
            mean_out: mean of its outputs.
            start: not used; nothing is drawn that could be kept.
            covariance: second moments of both.
        """
        super().initialise(mean_in, mean_out, start, covariance)
        if covariance is not None:
            weight = self.fit(affine_fit(covariance), covariance)
            self.bias.sub_(mean_in.double() @ weight)

    def factor_norms(self) -> Float[Tensor, " units"]:
        """As ``unit_norms``: nothing is shared."""
        return self.unit_norms()

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return the map of ``x``."""
        return x.to(self.bias.dtype) @ self.unit_weight(n)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens d_out"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        hidden = self._hidden(x) if hidden is None else hidden
        return torch.addcmul(self.bias, code.activations.sum(-1, keepdim=True), hidden)


class LinearConfig(OneMapConfig):
    """One linear map, of full rank; its size is what it is, whatever the budget."""

    method: Literal["linear"] = "linear"
    """Selects this method."""

    @property
    def label(self) -> str:
        """Linear."""
        return "Linear"

    @property
    def slug(self) -> str:
        """``linear``."""
        return "linear"

    @property
    def layer_params(self) -> int:
        """The matrix and the output bias."""
        return ((self.d_in or 0) + 1) * (self.d_out or 0)

    def sized(self, budget: int) -> "LinearConfig":
        """Return itself."""
        return self

    def _make(self) -> "Linear":
        return Linear(self)


class Linear(OneMap):
    """``x S + b``."""

    config: LinearConfig

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        self.weight = zeros(config.d_in or 0, config.d_out or 0)

    def fit(self, weight: Float[Tensor, "d_in d_out"], covariance: Covariance) -> Float[Tensor, "d_in d_out"]:
        """Become the best fit."""
        self.weight.copy_(weight)
        return weight

    def unit_weight(self, n: int) -> Float[Tensor, "d_in d_out"]:
        """Return S."""
        return self.weight

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||S||_F``."""
        return self.weight.square().sum().clamp_min(1e-30).sqrt().reshape(1)

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | {"weight": (1, -1)}

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens d_out"]:
        return x @ self.weight


class LowRankConfig(OneMapConfig):
    """One linear map of rank at most R."""

    method: Literal["low_rank"] = "low_rank"
    """Selects this method."""
    num_units: Literal[1] | None = None
    """The map itself; set once the rank is."""
    rank: PositiveInt | None = None
    """R; by default sized to the parameter budget, up to the widths of input and output. From an expansion of 1 on the
    budget pays for all of it."""

    @property
    def label(self) -> str:
        """Low-rank."""
        return "Low-rank"

    @property
    def slug(self) -> str:
        """For example ``low-rank-r8``."""
        return f"low-rank-r{self.rank}"

    @property
    def layer_params(self) -> int:
        """Both factors and the output bias."""
        d, o, r = (v or 0 for v in (self.d_in, self.d_out, self.rank))
        return r * (d + o) + o

    def sized(self, budget: int) -> "LowRankConfig":
        """Return a copy with the rank whose parameter count is nearest to ``budget``; a stated rank is kept.

        Args:
            budget: number of parameters.

        Raises:
            MxdError: the budget does not pay for rank 1, or the rank is more than a map of these widths can have.
        """
        d, o = self.d_in or 0, self.d_out or 0
        if (self.rank or 0) > min(d, o):
            raise MxdError(f"{self.label}: rank = {self.rank} is more than the widths {d} and {o} allow; lower it.")
        rank = self.rank or min(round((budget - o) / (d + o)), d, o)
        if rank < 1:
            raise MxdError(
                f"{self.label}: a budget of {budget:,} parameters does not pay for rank 1 ({d + 2 * o:,}); raise "
                "sizing.expansion, or state the rank."
            )
        return self.model_copy(update={"rank": rank, "num_units": 1})

    def _make(self) -> "LowRank":
        return LowRank(self)


class LowRank(OneMap):
    """``(x A) B + b``."""

    config: LowRankConfig

    def __init__(self, config: LowRankConfig) -> None:
        super().__init__(config)
        d, o, r = config.d_in, config.d_out, config.rank
        assert d and o and r
        self.input_factor = linear_init(d, r, fan_in=d)  # A
        self.output_factor = zeros(r, o)  # B

    def fit(self, weight: Float[Tensor, "d_in d_out"], covariance: Covariance) -> Float[Tensor, "d_in d_out"]:
        """Become the best fit of rank R: ``A = S V``, ``B = V^T``, V the main directions of the fitted outputs.

        Where R is larger than their number, the rest of A stays as drawn, and that of B zero.
        """
        _, directions = torch.linalg.eigh(weight.T @ covariance.read @ weight)  # ascending
        directions = directions.flip(1)[:, : self.config.rank]
        main = directions.shape[1]
        self.input_factor[:, :main] = (weight @ directions).to(self.input_factor)
        self.output_factor[:main] = directions.T.to(self.output_factor)
        return weight @ directions @ directions.T

    def unit_weight(self, n: int) -> Float[Tensor, "d_in d_out"]:
        """Return ``A B``."""
        return self.input_factor @ self.output_factor

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||A B||_F``, whose square is the sum of ``(A^T A) * (B B^T)``."""
        gram = (self.input_factor.T @ self.input_factor) * (self.output_factor @ self.output_factor.T)
        return gram.sum().clamp_min(1e-30).sqrt().reshape(1)

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | {"input_factor": (1, 0), "output_factor": (0, -1)}

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens d_out"]:
        return (x @ self.input_factor) @ self.output_factor


def affine_fit(covariance: Covariance) -> Float[Tensor, "d_in d_out"]:
    """Return the S with the least ``||y - x S - b||^2``; the b that goes with it is ``mean(y) - mean(x) S``.

    ``S = C_xx^+ C_xy``, the smallest of these maps where inputs do not span their space.
    """
    return torch.linalg.pinv(covariance.read, rtol=SMALLEST, hermitian=True) @ covariance.cross

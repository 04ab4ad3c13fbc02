"""TR-muMoE in the decoder: experts from a tensor ring (Oldfield et al., muMoE, NeurIPS 2024, section 3.1).

    W_n[h, o] = trace(U1[:, n, :] U2[:, h, :] U3[:, o, :]),   U1 [R1, N, R2],  U2 [R2, H, R3],  U3 [R3, O, R1]
    y^_o = sum_{r1, r3} ((a . U1) (z . U2))[r1, r3] U3[r3, o, r1] + b

An expert has only ``R1 R2`` numbers of its own and costs ``d + 1 + R1 R2`` parameters, yet its rank may reach
``min(R3 min(R1, R2), H, O)``. With ``R1 = 1`` it is a tensor train.
"""

import math
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from mxd.layers.config import MLPShape
from mxd.layers.levels import Hierarchy
from mxd.layers.mumoe import MuMoE, MuMoEConfig


class TRMuMoEConfig(MuMoEConfig):
    """TR-muMoE: N experts whose weights are slices of a tensor ring."""

    method: Literal["tr_mumoe"] = "tr_mumoe"
    """Selects this method."""
    rank_1: PositiveInt = 4
    """The rank R1 between outputs and experts; 1 makes a tensor train."""
    rank_2: PositiveInt = 4
    """The rank R2 between experts and hidden units."""
    rank_share: PositiveFloat = 1.0
    """The bound on the experts' rank as a share of the output width, R3 min(R1, R2) / d_out; used where ``rank_3`` is
    not given."""
    rank_3: PositiveInt | None = None
    """The rank R3 between hidden units and outputs; by default ``rank_share * d_out / min(rank_1, rank_2)``."""

    @property
    def label(self) -> str:
        """TR-muMoE."""
        return "TR-muMoE"

    @property
    def ranks(self) -> str:
        """For example ``r4x4x192``."""
        return f"r{self.rank_1}x{self.rank_2}x{self.rank_3}"

    @property
    def widths(self) -> tuple[int, int, int]:
        """R1 R2, R2 R3 and R3 R1."""
        one, two, three = self.rank_1, self.rank_2, self.rank_3 or 0
        return one * two, two * three, three * one

    @property
    def columns(self) -> tuple[int, ...]:
        """R1 R2, and R2 R2 in further levels, which are more cores of the ring."""
        return (self.rank_1 * self.rank_2, *[self.rank_2**2] * (len(self.sizes) - 1))

    def resolve(self, mlp: MLPShape) -> "TRMuMoEConfig":
        """Take widths, activation and encoder form from the base MLP, and ``rank_3`` from ``rank_share``."""
        rank = math.ceil(self.rank_share * mlp.d_out / min(self.rank_1, self.rank_2))
        return super().resolve(mlp).with_defaults(rank_3=rank)

    def _make(self) -> "TRMuMoE":
        return HierarchicalTRMuMoE(self) if self.levels else TRMuMoE(self)


class TRMuMoE(MuMoE):
    """Tensor-ring mixture of experts.

    The cores are stored as ``expert_factor [N, R1 R2]``, ``input_factor [H, R2 R3]`` and ``output_factor [R1 R3, O]``.
    """

    config: TRMuMoEConfig

    @torch.no_grad()
    def _replicate(self) -> None:
        """As ``MuMoE``, of the diagonals of the experts' matrices ``[R1, R2]``; all else in them is zero."""
        super()._replicate()
        self.expert_factor.mul_(torch.eye(self.config.rank_1, self.config.rank_2).flatten())

    def _combine(
        self, experts: Float[Tensor, "*#batch r1_r2"], hidden: Float[Tensor, "*#batch r2_r3"]
    ) -> Float[Tensor, "*batch d_out"]:
        """Return the product of experts ``[R1, R2]`` and hidden states ``[R2, R3]``, closed by ``U3``."""
        one, two = self.config.rank_1, self.config.rank_2
        product = experts.unflatten(-1, (one, two)) @ hidden.unflatten(-1, (two, -1))
        return product.flatten(-2) @ self.output_factor

    def _gram(self) -> Float[Tensor, "r1_r2 r1_r2"]:
        """Return ``M[ab, xy] = sum_{h c o w} U2[b, h, c] U2[y, h, w] U3[c, o, a] U3[w, o, x]``."""
        one, two = self.config.rank_1, self.config.rank_2
        into = (self.input_factor.T @ self.input_factor).view(two, -1, two, self.config.rank_3 or 0)
        out = (self.output_factor @ self.output_factor.T).view(one, -1, one, self.config.rank_3 or 0)
        return torch.einsum("bcyw,acxw->abxy", into, out).reshape(one * two, one * two)


class HierarchicalTRMuMoE(Hierarchy, TRMuMoE):
    """TR-muMoE in levels: each is one more core, and a unit's matrix ``[R1, R2]`` the product of its experts'."""

    def product(
        self, first: Float[Tensor, "*#batch _"], later: Float[Tensor, "*#batch r2_r2"]
    ) -> Float[Tensor, "*batch _"]:
        """Return the matrix product of cores ``[_, R2]`` with later ones ``[R2, R2]``."""
        two = self.config.rank_2
        return (first.unflatten(-1, (-1, two)) @ later.unflatten(-1, (two, two))).flatten(-2)

    def neutral_row(self, columns: int) -> Float[Tensor, " r2_r2"]:
        """Return the identity."""
        return torch.eye(self.config.rank_2).flatten()

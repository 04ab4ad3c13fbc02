"""Tucker-muMoE in the decoder: experts from a core tensor and three factors (muMoE, first version).

    W_n[h, o] = sum_{p q r} Z[p, q, r] A1[n, p] A2[h, q] A3[o, r],   Z [RN, RI, RO]
    y^ = (((a A1) (x) (z A2)) . Z) A3^T + b

An expert's rank is at most ``min(H, O, RI, RO)``, and the core grows with the product of the ranks.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn

from mxd.layers.config import MLPShape
from mxd.layers.levels import Hierarchy
from mxd.layers.mumoe import MuMoE, MuMoEConfig
from mxd.ops import bilinear

RANK = 64
"""The most that a rank is by default, the smaller of the paper's two."""


class TuckerMuMoEConfig(MuMoEConfig):
    """Tucker-muMoE: N experts that are mixtures of ``rank_units`` matrices between two subspaces."""

    method: Literal["tucker_mumoe"] = "tucker_mumoe"
    """Selects this method."""
    rank_units: PositiveInt | None = None
    """The rank RN of the experts; by default 64, or a quarter of the output width if that is less."""
    rank_in: PositiveInt | None = None
    """The rank RI of the hidden units; the same by default."""
    rank_out: PositiveInt | None = None
    """The rank RO of the outputs; the same by default."""

    @property
    def label(self) -> str:
        """Tucker-muMoE."""
        return "Tucker-muMoE"

    @property
    def ranks(self) -> str:
        """For example ``r64x64x64``."""
        return f"r{self.rank_units}x{self.rank_in}x{self.rank_out}"

    @property
    def widths(self) -> tuple[int, int, int]:
        """RN, RI and RO."""
        return self.rank_units or 0, self.rank_in or 0, self.rank_out or 0

    @property
    def expert_params(self) -> int:
        """The factors and the core."""
        _, inputs, outputs = self.widths
        return super().expert_params + math.prod(self.columns) * inputs * outputs

    @property
    def columns(self) -> tuple[int, ...]:
        """RN, or in further levels as many as there are experts, if they are fewer."""
        rank = self.rank_units or 0
        return (rank, *(min(rank, size) for size in self.sizes[1:]))

    def resolve(self, mlp: MLPShape) -> "TuckerMuMoEConfig":
        """Take widths, activation and encoder form from the base MLP, and the open ranks from the output width."""
        rank = min(RANK, math.ceil(mlp.d_out / 4))
        return super().resolve(mlp).with_defaults(rank_units=rank, rank_in=rank, rank_out=rank)

    def _make(self) -> "TuckerMuMoE":
        return HierarchicalTuckerMuMoE(self) if self.levels else TuckerMuMoE(self)


class TuckerMuMoE(MuMoE):
    """Tucker mixture of experts: ``expert_factor`` is A1, ``input_factor`` A2, ``output_factor`` A3 transposed."""

    config: TuckerMuMoEConfig

    def __init__(self, config: TuckerMuMoEConfig) -> None:
        super().__init__(config)
        _, inputs, outputs = config.widths
        experts = math.prod(config.columns)
        bound = (experts * inputs) ** -0.5
        self.core = nn.Parameter(torch.empty(experts, inputs, outputs).uniform_(-bound, bound))
        if config.start == "replicate":
            self.core.data.normal_().div_(self.core.data.norm())

    @torch.no_grad()
    def _replicate(self) -> None:
        """As ``MuMoE``; the rows of ``input_factor`` and the whole core are normal, scaled to norm 1."""
        super()._replicate()
        self.input_factor.copy_(F.normalize(self.input_factor.normal_()))

    def _combine(
        self, experts: Float[Tensor, "*#batch rank_units"], hidden: Float[Tensor, "*#batch rank_in"]
    ) -> Float[Tensor, "*batch d_out"]:
        """Return ``((experts (x) hidden) . Z) A3^T``."""
        lead = torch.broadcast_shapes(experts.shape[:-1], hidden.shape[:-1])
        left, right = (side.expand(*lead, -1).reshape(-1, side.shape[-1]) for side in (experts, hidden))
        return (bilinear(left, right, self.core) @ self.output_factor).reshape(*lead, self.output_factor.shape[1])

    def _gram(self) -> Float[Tensor, "rank_units rank_units"]:
        """Return ``M[p, p'] = sum Z[p, q, r] (A2^T A2)[q, q'] (A3^T A3)[r, r'] Z[p', q', r']``."""
        into, out = self.input_factor.T @ self.input_factor, self.output_factor @ self.output_factor.T
        return self.core.flatten(1) @ (into @ self.core @ out).flatten(1).T


class HierarchicalTuckerMuMoE(Hierarchy, TuckerMuMoE):
    """Tucker-muMoE in levels: each is one more factor of the core tensor, which grows by its rank."""

    def product(
        self, first: Float[Tensor, "*#batch _"], later: Float[Tensor, "*#batch _"]
    ) -> Float[Tensor, "*batch _"]:
        """Return the outer product of rows, as one row."""
        return (first.unsqueeze(-1) * later.unsqueeze(-2)).flatten(-2)

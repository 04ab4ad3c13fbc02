"""The muMoE family in the decoder (Oldfield et al., muMoE, NeurIPS 2024): experts that are factorised together.

A factorisation has a row of ``expert_factor`` for each expert, a row of ``input_factor`` for each hidden unit, and
``output_factor``. Expert n's output is bilinear in its row and in the projected hidden state, so that the sum over
experts is taken before anything is multiplied (lemma 2 of MxD):

    y^ = combine(a C', z D') + b,   z W_n = combine(c'_n, z D')

Here also CP-muMoE, MxD's low-rank counterpart (MxD, equation 22):

    y^ = ((a C') * (z D')) W + b,   C' [N, R],  D' [H, R],  W [R, d_out]

Expert n is ``W_n = D' diag(c'_n) W``, of rank at most min(H, d_out, R).
"""

from abc import abstractmethod
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from mxd.layers.base import linear_init, zeros
from mxd.layers.config import MLPShape
from mxd.layers.gates import Code
from mxd.layers.levels import Hierarchy, TableConfig, TableLayer


class MuMoEConfig(TableConfig):
    """Fields of the factorised mixtures."""

    start: Literal["paper", "replicate"] = "paper"
    """How the experts' factor is drawn: ``paper`` as ``nn.Linear`` (MxD, appendix B.4); ``replicate`` from N(1, 1)
    (muMoE), so that all experts begin alike, up to noise, and those of further levels without an effect. Either way the
    output factor begins at zero."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int, int]:
        """Numbers that each expert, each hidden unit and each output has in its factor."""

    @property
    def expert_params(self) -> int:
        """The factors."""
        _, inputs, outputs = self.widths
        return self.table_params + self.inputs * inputs + outputs * (self.d_out or 0)

    @property
    def columns(self) -> tuple[int, ...]:
        """An expert's numbers are as many in each level."""
        return self.widths[:1] * len(self.sizes)

    @property
    def neutral(self) -> bool:
        """With the start ``replicate``."""
        return self.start == "replicate"

    @property
    def form(self) -> tuple[str, ...]:
        """As ``ExpertConfig``, with the ranks, and with the start where it is not the default."""
        return (self.ranks, *super().form, *(("replicate",) if self.start == "replicate" else ()))

    @property
    @abstractmethod
    def ranks(self) -> str:
        """The ranks as they stand in the slug."""


class MuMoE(TableLayer):
    """A factorised mixture of experts. Units are experts."""

    config: MuMoEConfig

    def __init__(self, config: MuMoEConfig) -> None:
        super().__init__(config)
        experts, inputs, outputs = config.widths
        n, o = config.experts, config.d_out
        assert n and o
        self.expert_factor = linear_init(n, experts, fan_in=n)
        self.input_factor = linear_init(config.inputs, inputs, fan_in=config.inputs)
        self.output_factor = zeros(outputs, o)
        if config.start == "replicate":
            self._replicate()

    @property
    def table(self) -> Float[Tensor, "units columns"]:
        """The experts' factor."""
        return self.expert_factor

    @torch.no_grad()
    def _replicate(self) -> None:
        """Draw again what the start ``replicate`` draws from other distributions."""
        self.expert_factor.normal_(1.0, 1.0)

    @abstractmethod
    def _combine(
        self, experts: Float[Tensor, "*#batch experts"], hidden: Float[Tensor, "*#batch inputs"]
    ) -> Float[Tensor, "*batch d_out"]:
        """Return the experts' output, given rows of (or a mixture of) the expert factor and projected hidden states."""

    @abstractmethod
    def _gram(self) -> Float[Tensor, "experts experts"]:
        """Return M with ``||W_n||_F^2 = c'_n M c'_n^T``."""

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``z W_n``."""
        return self._combine(self.row(n), self.project(x, self.input_factor))

    def unit_weight(self, n: int) -> Float[Tensor, "inputs d_out"]:
        """Return ``W_n``: its rows are what the expert makes of each hidden unit alone."""
        return self._combine(self.row(n), self.input_factor)

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||W_n||_F``."""
        gram = self._gram()
        return self.of_rows(lambda rows: ((rows @ gram) * rows).sum(-1).clamp_min(1e-30).sqrt())

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``; of the factors the last alone has a unit."""
        return super().scaling() | {"output_factor": (0, -1)}

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens inputs"]:
        return self.project(x, self.input_factor)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens inputs"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        hidden = self._hidden(x) if hidden is None else hidden
        return self._combine(self.mixture(code), hidden) + self.bias


class CPMuMoEConfig(MuMoEConfig):
    """CP-muMoE: N experts that share an encoder and are linear maps of rank at most R."""

    method: Literal["cp_mumoe"] = "cp_mumoe"
    """Selects this method."""
    rank_share: PositiveFloat = 0.5
    """The CP rank as a share of the output width, R / d_out; used where ``rank`` is not given."""
    rank: PositiveInt | None = None
    """The CP rank R; by default ``rank_share * d_out``."""

    @property
    def label(self) -> str:
        """CP-muMoE."""
        return "CP-muMoE"

    @property
    def ranks(self) -> str:
        """For example ``r64``."""
        return f"r{self.rank}"

    @property
    def widths(self) -> tuple[int, int, int]:
        """R each."""
        rank = self.rank or 0
        return rank, rank, rank

    def resolve(self, mlp: MLPShape) -> "CPMuMoEConfig":
        """Take widths, activation and encoder form from the base MLP, and the rank from ``rank_share``."""
        return super().resolve(mlp).with_defaults(rank=max(1, round(self.rank_share * mlp.d_out)))

    def _make(self) -> "CPMuMoE":
        return HierarchicalCPMuMoE(self) if self.levels else CPMuMoE(self)


class CPMuMoE(MuMoE):
    """CP-factorised mixture of experts."""

    config: CPMuMoEConfig

    def _combine(
        self, experts: Float[Tensor, "*#batch rank"], hidden: Float[Tensor, "*#batch rank"]
    ) -> Float[Tensor, "*batch d_out"]:
        """Return ``(experts * hidden) W``."""
        return (experts * hidden) @ self.output_factor

    def _gram(self) -> Float[Tensor, "rank rank"]:
        """Return ``(D'^T D') * (W W^T)``."""
        return (self.input_factor.T @ self.input_factor) * (self.output_factor @ self.output_factor.T)


class HierarchicalCPMuMoE(Hierarchy, CPMuMoE):
    """CP-muMoE in levels: ``y^ = (prod_e (a_e C_e) * (z D')) W + b``."""

"""Mixture of Decoders (Oldfield et al., arXiv 2505.21364).

    y^ = (a C) * (z D) + b,   z = phi(x E^T + b_E),   a = TopK(relu(x G^T + b_G), K)          equation 5

with ``z`` in the base MLP's own form (section 2.5). Expert n is the full-rank linear map ``W_n = D diag(c_n)``
(equation 4, lemma 1); the sum over experts ``sum_n a_n (z W_n)`` is never formed (lemma 2).
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mxd.layers.base import linear_init, zeros
from mxd.layers.config import Covariance, Initialisation, MLPWeights
from mxd.layers.gates import Code
from mxd.layers.levels import Hierarchy, TableConfig, TableLayer


class MxDConfig(TableConfig):
    """Mixture of Decoders: N experts that share an encoder and are full-rank linear maps."""

    method: Literal["mxd"] = "mxd"
    """Selects this method."""

    @property
    def label(self) -> str:
        """MxD."""
        return "MxD"

    @property
    def expert_params(self) -> int:
        """C and D."""
        return self.table_params + self.inputs * (self.d_out or 0)

    @property
    def columns(self) -> tuple[int, ...]:
        """The output width."""
        return (self.d_out or 0,) * len(self.sizes)

    def paper_units(self, width: int) -> int:
        """Return N of the paper's table 2, by its two conventions (one for each encoder form).

        With an MLP encoder it counts ``width`` encoder biases on both sides; with a GLU encoder the counts are true.
        """
        d, h = self.d_in or 0, self.hidden or 0
        if self.glu:
            return (width * (2 * d + 1) + d - 2 * h * (d + 1) - d * (h + 1)) // (2 * d + 1)
        return round((2 * d * width - 2 * d * h) / (2 * d + 1))

    def _make(self) -> "MxD":
        return HierarchicalMxD(self) if self.levels else MxD(self)


SPREAD = 2.0
"""What ``initialisation: centred`` multiplies the drawn ``C`` by. ``D`` learns through the signs of ``C``: where these
are small against what ``C`` learns, all experts come to share the few directions that ``D`` learns first
(docs/recipes.md)."""


class MxD(TableLayer):
    """Mixture of Decoders. Units are experts."""

    config: MxDConfig

    def __init__(self, config: MxDConfig) -> None:
        super().__init__(config)
        o, n = config.d_out, config.experts
        assert o and n
        self.expert_scale = linear_init(n, o, fan_in=n)  # C; nn.Linear(n, o) draws with fan-in n
        self.decoder = zeros(config.inputs, o)

    @property
    def table(self) -> Float[Tensor, "units columns"]:
        """C."""
        return self.expert_scale

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``z W_n = c_n * (z D)`` (section 3.2.2)."""
        return self.project(x, self.decoder) * self.row(n)

    def unit_weight(self, n: int) -> Float[Tensor, "inputs d_out"]:
        """Return ``W_n = D diag(c_n)`` (equation 4)."""
        return self.decoder * self.row(n)

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||W_n||_F = sqrt(sum_o c_no^2 ||D[:, o]||^2)``."""
        columns = self.decoder.square().sum(0)
        return self.of_rows(lambda rows: (rows.square() @ columns).clamp_min(1e-30).sqrt())

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``; ``C`` has no unit."""
        return super().scaling() | {"decoder": (0, -1)}

    def copy_base(self, base: MLPWeights) -> None:
        """Become the base MLP exactly: E, D and b copied, and expert 0 always on with ``a_0 = 1``, ``c_0 = 1``.

        The other experts start with zero gates, so they are never chosen; used to test splices and as a control.

        Raises:
            MxdError: the base MLP has another shape.
        """
        self.encoder.copy_from(base)
        self.decoder.data.zero_()[: len(base.decoder)] = base.decoder
        if base.decoder_bias is not None:
            self.bias.data.copy_(base.decoder_bias)
        else:
            self.bias.data.zero_()
        self.gate.data.zero_()
        self.gate_bias.data.zero_()[0] = 1.0
        self.expert_scale.data[0] = 1.0

    @torch.no_grad()
    def initialise(
        self,
        mean_in: Float[Tensor, " d_in"],
        mean_out: Float[Tensor, " d_out"],
        start: Initialisation = "paper",
        covariance: Covariance | None = None,
    ) -> None:
        """As ``ReplacementLayer.initialise``; ``centred`` also makes ``C`` ``SPREAD`` times as large as drawn."""
        super().initialise(mean_in, mean_out, start, covariance)
        if start == "centred":
            self.expert_scale.mul_(SPREAD)

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens d_out"]:
        return self.project(x, self.decoder)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens d_out"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        hidden = self._hidden(x) if hidden is None else hidden
        return torch.addcmul(self.bias, self.mixture(code), hidden)


class HierarchicalMxD(Hierarchy, MxD):
    """Mixture of Decoders in levels: ``y^ = prod_e (a_e C_e) * (z D) + b``; experts keep the rank of D."""

    def copy_base(self, base: MLPWeights) -> None:
        """As ``MxD``; expert 0 of each further level is always on, too, with ``a = 1`` and a row of ones."""
        super().copy_base(base)
        self.later_gate.data.zero_()
        self.later_gate_bias.data.zero_()
        for bias, table in zip(self.later_gate_bias.data.split(self.config.sizes[1:]), self.later_tables, strict=True):
            bias[0] = 1.0
            table.data[0] = 1.0

"""Sparse mixture of small MLPs (Shazeer et al., 2017): the coarse experts that language models are built with.

    y^ = b + sum_n a_n V_n phi(U_n x),   a = softmax over the K largest of x G^T + b_G

Each expert is computed for the tokens that chose it alone.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor

from mxd.layers.base import ReplacementLayer, linear_init, zeros
from mxd.layers.config import ACTIVATIONS, Activation, ReplacementConfig
from mxd.layers.gates import Code, LinearGate
from mxd.layers.sparsity import AnySparsity, TopKSoftmaxConfig
from mxd.ops import Selection, experts_into_rows, rows_into_experts


class SMoEConfig(ReplacementConfig):
    """Sparse mixture of N small MLPs."""

    inherits: ClassVar[tuple[str, ...]] = ("activation",)

    method: Literal["smoe"] = "smoe"
    """Selects this method."""
    expert_width: PositiveInt = 64
    """Hidden units of an expert: the fewer, the more experts for the same parameters."""
    activation: Activation | None = None
    """Activation of the experts; the base MLP's by default."""
    sparsity: AnySparsity = TopKSoftmaxConfig()
    """How experts are chosen."""

    @property
    def label(self) -> str:
        """SMoE."""
        return "SMoE"

    @property
    def slug(self) -> str:
        """For example ``smoe-m64-softmax-k32``."""
        return f"smoe-m{self.expert_width}-{self.sparsity.slug}"

    @property
    def layer_params(self) -> int:
        """Gate with biases, the experts' two matrices, and the output bias."""
        d, o, n = self.d_in or 0, self.d_out or 0, self.num_units or 0
        return n * (d + 1) + n * self.expert_width * (d + o) + o

    def _make(self) -> "SMoE":
        return SMoE(self)


class SMoE(ReplacementLayer):
    """Mixture of small MLPs. Units are experts; hidden unit l of expert n is row ``n m + l``."""

    config: SMoEConfig

    def __init__(self, config: SMoEConfig) -> None:
        super().__init__(config)
        d, o, n, m = config.d_in, config.d_out, config.num_units, config.expert_width
        assert d and o and n and config.activation
        self.activation = ACTIVATIONS[config.activation]
        self.gate = linear_init(n, d, fan_in=d)
        self.gate_bias = zeros(n)
        self.encoder = linear_init(n * m, d, fan_in=d)
        self.decoder = zeros(n * m, o)

    @property
    def gates(self) -> LinearGate:
        """``x @ gate.T + gate_bias``: one row for each expert."""
        return LinearGate(self.gate, self.gate_bias)

    def unit_weight(self, n: int) -> Float[Tensor, "expert_width d_out"]:
        """Return ``V_n^T``, the last linear map of the expert: it says what outputs the expert can give."""
        return self.decoder.unflatten(0, (self.num_units, -1))[n]

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||V_n||``."""
        return self.decoder.unflatten(0, (self.num_units, -1)).square().sum((1, 2)).clamp_min(1e-30).sqrt()

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return ``||V_n||``: nothing of an expert is shared."""
        return self.unit_norms()

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | {"gate": (1, 0), "encoder": (1, 0), "decoder": (0, -1)}

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``V_n phi(U_n x)``."""
        encoder = self.encoder.unflatten(0, (self.num_units, -1))[n]
        return self.activation(x.to(encoder.dtype) @ encoder.T) @ self.unit_weight(n)

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens width"]:
        return self.activation(F.linear(x, self.encoder))

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens width"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        if hidden is None and not code.all_units:
            return self._grouped(x, code) + self.bias
        hidden = self._hidden(x) if hidden is None else hidden
        strength = code.activations
        if not code.all_units:
            strength = strength.new_zeros(len(x), self.num_units).scatter_add(1, code.indices, strength)
        weighted = hidden.unflatten(1, (self.num_units, -1)) * strength.unsqueeze(-1)
        return torch.addmm(self.bias, weighted.flatten(1), self.decoder)

    def _grouped(self, x: Float[Tensor, "tokens d_in"], code: Code) -> Float[Tensor, "tokens d_out"]:
        """Return the sum of the chosen experts' outputs, expert by expert, each for its tokens."""
        selection = code.selection or Selection()
        encoder, decoder = (weight.unflatten(0, (self.num_units, -1)) for weight in (self.encoder, self.decoder))
        states = self.activation(rows_into_experts(x, encoder, code.indices, selection))
        order = selection.by_unit(code.indices, self.num_units).order
        weighted = states * code.activations.flatten()[order].unsqueeze(-1)
        return experts_into_rows(weighted, decoder, code.indices, selection)

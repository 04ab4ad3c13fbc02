"""Mixture of (IA)^3 vectors (MoV; Zadouri et al., arXiv 2309.05444; MxD, appendix A.5): MxD's experts, from the left.

    y^ = ((a C) * z) D + b,   C [N, H],  D [H, d_out],  z the dense encoder's hidden state

Expert n is ``W_n = diag(c_n) D``, of rank at most that of D: it scales hidden neurons, where MxD's scales outputs.
One expert that is always on is (IA)^3 (Liu et al., arXiv 2205.05638).
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from mxd.layers.base import code_product, linear_init, zeros
from mxd.layers.experts import ExpertConfig, ExpertLayer
from mxd.layers.gates import Code


class MoVConfig(ExpertConfig):
    """Mixture of (IA)^3 vectors: N experts that share encoder and decoder, and scale the hidden state between them."""

    method: Literal["mov"] = "mov"
    """Selects this method."""

    @property
    def label(self) -> str:
        """MoV."""
        return "MoV"

    @property
    def expert_params(self) -> int:
        """C and D."""
        return self.inputs * ((self.num_units or 0) + (self.d_out or 0))

    def _make(self) -> "MoV":
        return MoV(self)


class MoV(ExpertLayer):
    """Mixture of (IA)^3 vectors. Units are experts."""

    config: MoVConfig

    def __init__(self, config: MoVConfig) -> None:
        super().__init__(config)
        o, n = config.d_out, config.num_units
        assert o and n
        self.expert_scale = linear_init(n, config.inputs, fan_in=n)
        self.decoder = zeros(config.inputs, o)

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``z W_n = (z * c_n) D``."""
        return (self.encoded(x) * self.expert_scale[n]) @ self.decoder

    def unit_weight(self, n: int) -> Float[Tensor, "inputs d_out"]:
        """Return ``W_n = diag(c_n) D``."""
        return self.expert_scale[n].unsqueeze(-1) * self.decoder

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||W_n||_F = sqrt(sum_h c_nh^2 ||d_h||^2)``."""
        return (self.expert_scale.square() @ self.decoder.square().sum(1)).clamp_min(1e-30).sqrt()

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return ``||c_n||``."""
        return self.expert_scale.square().sum(-1).clamp_min(1e-30).sqrt()

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``; ``C`` has no unit."""
        return super().scaling() | {"decoder": (0, -1)}

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens inputs"]:
        return self.encoded(x)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens inputs"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        hidden = self._hidden(x) if hidden is None else hidden
        return (code_product(code, self.expert_scale) * hidden) @ self.decoder + self.bias

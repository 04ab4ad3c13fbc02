"""Mixture of (IA)^3 vectors (MoV; Zadouri et al., arXiv 2309.05444; MxD, appendix A.5): MxD's experts, from the left.

    y^ = ((a C) * z) D + b,   C [N, H],  D [H, d_out],  z the dense encoder's hidden state

Expert n is ``W_n = diag(c_n) D``, of rank at most that of D: it scales hidden neurons, where MxD's scales outputs.
One expert that is always on is (IA)^3 (Liu et al., arXiv 2205.05638).
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from mxd.layers.base import ReplacementLayer, code_product, linear_init, zeros
from mxd.layers.config import MLPShape
from mxd.layers.encoder import DenseEncoder, EncodedConfig
from mxd.layers.gates import Code, LinearGate
from mxd.layers.sizing import transcoder_params


class MoVConfig(EncodedConfig):
    """Mixture of (IA)^3 vectors: N experts that share encoder and decoder, and scale the hidden state between them."""

    method: Literal["mov"] = "mov"
    """Selects this method."""

    @property
    def label(self) -> str:
        """MoV."""
        return "MoV"

    @property
    def layer_params(self) -> int:
        """Encoder, gate with biases, C, D and the output bias."""
        d, o, n, h = (v or 0 for v in (self.d_in, self.d_out, self.num_units, self.hidden))
        return self.encoder_params + n * (d + 1) + n * h + h * o + o

    def resolve(self, mlp: MLPShape) -> "MoVConfig":
        """Take widths, activation and encoder form from the base MLP."""
        return self.resolve_encoder(mlp)

    def paper_units(self, width: int) -> int:
        """Return N that matches the true parameters of the transcoder; the paper states no convention of its own."""
        return self.sized(transcoder_params(self.d_in or 0, self.d_out or 0, width)).num_units or 0

    def _make(self) -> "MoV":
        return MoV(self)


class MoV(ReplacementLayer):
    """Mixture of (IA)^3 vectors. Units are experts."""

    config: MoVConfig

    def __init__(self, config: MoVConfig) -> None:
        super().__init__(config)
        d, o, n, h = config.d_in, config.d_out, config.num_units, config.hidden
        assert d and o and n and h
        self.encoder = DenseEncoder(config)
        self.gate = linear_init(n, d, fan_in=d)
        self.gate_bias = zeros(n)
        self.expert_scale = linear_init(n, h, fan_in=n)
        self.decoder = zeros(h, o)

    @property
    def gates(self) -> LinearGate:
        """``x @ gate.T + gate_bias``: one row for each expert."""
        return LinearGate(self.gate, self.gate_bias)

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``z W_n = (z * c_n) D``."""
        return (self.encoder(x) * self.expert_scale[n]) @ self.decoder

    def unit_weight(self, n: int) -> Float[Tensor, "hidden d_out"]:
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
        return super().scaling() | self.encoder.scaling() | {"gate": (1, 0), "decoder": (0, -1)}

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens hidden"]:
        return self.encoder(x)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens hidden"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        hidden = self._hidden(x) if hidden is None else hidden
        return (code_product(code, self.expert_scale) * hidden) @ self.decoder + self.bias

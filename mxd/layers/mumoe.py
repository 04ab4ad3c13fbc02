"""CP-muMoE in the decoder (Oldfield et al., muMoE, NeurIPS 2024; MxD, equation 22): MxD's low-rank counterpart.

    y^ = ((a C') * (z D')) W + b,   C' [N, R],  D' [H, R],  W [R, d_out]

Expert n is ``W_n = D' diag(c'_n) W``, of rank at most min(H, d_out, R).
"""

from typing import Literal

from jaxtyping import Float
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from mxd.layers.base import ReplacementLayer, code_product, linear_init, zeros
from mxd.layers.config import MLPShape
from mxd.layers.encoder import DenseEncoder, EncodedConfig
from mxd.layers.gates import Code, LinearGate
from mxd.layers.sizing import transcoder_params


class CPMuMoEConfig(EncodedConfig):
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
    def slug(self) -> str:
        """For example ``cp-mumoe-r64-k32``."""
        return f"cp-mumoe-r{self.rank}-{self.sparsity.slug}"

    @property
    def layer_params(self) -> int:
        """Encoder, gate with biases, the three factors and the output bias."""
        d, o, n, h, r = (v or 0 for v in (self.d_in, self.d_out, self.num_units, self.hidden, self.rank))
        return self.encoder_params + n * (d + 1) + n * r + h * r + r * o + o

    def resolve(self, mlp: MLPShape) -> "CPMuMoEConfig":
        """Take widths, activation and encoder form from the base MLP, and the rank from ``rank_share``."""
        return self.resolve_encoder(mlp).with_defaults(rank=max(1, round(self.rank_share * mlp.d_out)))

    def paper_units(self, width: int) -> int:
        """Return N that matches the true parameters of the transcoder; the paper states no convention of its own."""
        return self.sized(transcoder_params(self.d_in or 0, self.d_out or 0, width)).num_units or 0

    def _make(self) -> "CPMuMoE":
        return CPMuMoE(self)


class CPMuMoE(ReplacementLayer):
    """CP-factorised mixture of experts. Units are experts."""

    config: CPMuMoEConfig

    def __init__(self, config: CPMuMoEConfig) -> None:
        super().__init__(config)
        d, o, n, h, r = config.d_in, config.d_out, config.num_units, config.hidden, config.rank
        assert d and o and n and h and r
        self.encoder = DenseEncoder(config)
        self.gate = linear_init(n, d, fan_in=d)
        self.gate_bias = zeros(n)
        self.expert_factor = linear_init(n, r, fan_in=n)
        self.input_factor = linear_init(h, r, fan_in=h)
        self.output_factor = zeros(r, o)

    @property
    def gates(self) -> LinearGate:
        """``x @ gate.T + gate_bias``: one row for each expert."""
        return LinearGate(self.gate, self.gate_bias)

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``z W_n = ((z D') * c'_n) W``."""
        return ((self.encoder(x) @ self.input_factor) * self.expert_factor[n]) @ self.output_factor

    def unit_weight(self, n: int) -> Float[Tensor, "hidden d_out"]:
        """Return ``W_n = D' diag(c'_n) W``."""
        return (self.input_factor * self.expert_factor[n]) @ self.output_factor

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``; of the three factors the last alone has a unit."""
        return super().scaling() | self.encoder.scaling() | {"gate": (1, 0), "output_factor": (0, -1)}

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||W_n||_F``, whose square is ``c'_n ((D'^T D') * (W W^T)) c'_n^T``."""
        gram = (self.input_factor.T @ self.input_factor) * (self.output_factor @ self.output_factor.T)
        return ((self.expert_factor @ gram) * self.expert_factor).sum(-1).clamp_min(1e-30).sqrt()

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return ``||c'_n||``."""
        return self.expert_factor.square().sum(-1).clamp_min(1e-30).sqrt()

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens rank"]:
        return self.encoder(x) @ self.input_factor

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens rank"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        hidden = self._hidden(x) if hidden is None else hidden
        return (code_product(code, self.expert_factor) * hidden) @ self.output_factor + self.bias

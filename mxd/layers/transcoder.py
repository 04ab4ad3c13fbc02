"""Transcoder (Dunefsky et al., 2024) and skip transcoder (Paulo et al., 2025): a wide sparse MLP.

y^ = z D + b [+ x S],   z = TopK(relu(x E^T + b_E), K)                                   MxD paper, equation 2
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mxd.layers.base import ReplacementLayer, code_product, linear_init, zeros
from mxd.layers.config import MLPShape, ReplacementConfig
from mxd.layers.gates import Code, LinearGate
from mxd.layers.sizing import transcoder_params


class FeatureLayer(ReplacementLayer):
    """``z D + b`` with ``z`` sparse; starts with the decoder at zero. Units are features."""

    def __init__(self, config: ReplacementConfig) -> None:
        super().__init__(config)
        d, o, n = config.d_in, config.d_out, config.num_units
        assert d and o and n
        self.encoder = linear_init(n, d, fan_in=d)
        self.encoder_bias = zeros(n)
        self.decoder = zeros(n, o)

    @property
    def gates(self) -> LinearGate:
        """``x @ encoder.T + encoder_bias``: one row for each feature."""
        return LinearGate(self.encoder, self.encoder_bias)

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``d_n``, the same for every input."""
        return self.decoder[n].expand(*x.shape[:-1], -1)

    def unit_weight(self, n: int) -> Float[Tensor, "1 d_out"]:
        """Return ``d_n`` as one row."""
        return self.decoder[n : n + 1]

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||d_n||``."""
        return self.decoder.square().sum(-1).clamp_min(1e-30).sqrt()

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return ``||d_n||``: nothing of a feature's weight is shared."""
        return self.unit_norms()

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens 0"]:
        return x.new_empty(len(x), 0)

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | {"encoder": (1, 0), "decoder": (0, -1)}

    def features_out(self, code: Code) -> Float[Tensor, "tokens d_out"]:
        """Return ``z D + b``."""
        return code_product(code, self.decoder) + self.bias


class TranscoderConfig(ReplacementConfig):
    """Transcoder: sparse features, each adding one direction; with ``skip``, plus a linear map of the input."""

    method: Literal["transcoder"] = "transcoder"
    """Selects this method."""
    skip: bool = False
    """Add ``x S``: a skip transcoder."""

    @property
    def label(self) -> str:
        """TC, or STC with the skip."""
        return "STC" if self.skip else "TC"

    @property
    def layer_params(self) -> int:
        """Encoder with biases, decoder, output bias, and the skip's matrix."""
        d, o = self.d_in or 0, self.d_out or 0
        return transcoder_params(d, o, self.num_units or 0) + (d * o if self.skip else 0)

    def resolve(self, mlp: MLPShape) -> "TranscoderConfig":
        """Take the widths from the base MLP."""
        return self.with_defaults(d_in=mlp.d_in, d_out=mlp.d_out)

    def paper_units(self, width: int) -> int:
        """Return ``width``: the paper does not count the skip."""
        return width

    def _make(self) -> "Transcoder":
        return Transcoder(self)


class Transcoder(FeatureLayer):
    """Transcoder, with or without skip."""

    config: TranscoderConfig

    def __init__(self, config: TranscoderConfig) -> None:
        super().__init__(config)
        self.skip = zeros(config.d_in or 0, config.d_out or 0) if config.skip else None

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | ({"skip": (1, -1)} if self.skip is not None else {})

    def _rest(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens d_out"]:
        return super()._rest(x) if self.skip is None else torch.addmm(self.bias, x, self.skip)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens 0"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        out = self.features_out(code)
        return out if self.skip is None else torch.addmm(out, x, self.skip)

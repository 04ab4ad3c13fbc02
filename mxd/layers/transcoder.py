"""Transcoder (Dunefsky et al., 2024) and skip transcoder (Paulo et al., 2025): a wide sparse MLP.

y^ = z D + b [+ x S],   z = TopK(relu(x E^T + b_E), K)                                   MxD paper, equation 2
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mxd.layers.base import MLPShape, ReplacementConfig, zeros
from mxd.layers.code import Code
from mxd.layers.features import FeatureLayer
from mxd.layers.sizing import transcoder_params


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
    def learned_params(self) -> int:
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

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens 0"]
    ) -> Float[Tensor, "tokens d_out"]:
        out = self.features_out(code)
        return out if self.skip is None else torch.addmm(out, x, self.skip)

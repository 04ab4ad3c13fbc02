"""TopK sparse autoencoder (Gao et al., 2024) on the MLP's output: the post-hoc baseline.

    y^ = z D + b,   z = TopK(relu(y E^T + b_E), K)

It reads the output ``y`` of the base MLP, so it explains that MLP but cannot replace it.
"""

from typing import ClassVar, Literal

import torch.nn.functional as F
from jaxtyping import Float
from pydantic import model_validator
from torch import Tensor

from mxd.layers.config import MLPShape, transcoder_params
from mxd.layers.gates import Code
from mxd.layers.transcoder import FeatureConfig, FeatureLayer


class TopKSAEConfig(FeatureConfig):
    """Sparse autoencoder of the MLP's output; its units read what the base MLP wrote."""

    method: Literal["topk_sae"] = "topk_sae"
    """Selects this method."""

    reads: ClassVar[Literal["mlp_in", "mlp_out"]] = "mlp_out"

    @model_validator(mode="after")
    def _one_width(self) -> "TopKSAEConfig":
        if None not in (self.d_in, self.d_out) and self.d_in != self.d_out:
            raise ValueError(f"d_in = {self.d_in} and d_out = {self.d_out} differ; an autoencoder has one width")
        return self

    @property
    def label(self) -> str:
        """SAE, or M-SAE with groups."""
        return self.nested_label("SAE")

    @property
    def layer_params(self) -> int:
        """Encoder with biases, decoder and output bias."""
        return transcoder_params(self.d_in or 0, self.d_out or 0, self.num_units or 0)

    def resolve(self, mlp: MLPShape) -> "TopKSAEConfig":
        """Take both widths from the base MLP's output."""
        return self.with_defaults(d_in=mlp.d_out, d_out=mlp.d_out)

    def paper_units(self, width: int) -> int:
        """Return ``width``, as a transcoder's."""
        return width

    def _make(self) -> "TopKSAE":
        return TopKSAE(self)


class TopKSAE(FeatureLayer):
    """TopK sparse autoencoder. The decoder starts as the encoder's rows at unit norm, as Gao et al. do."""

    config: TopKSAEConfig

    def __init__(self, config: TopKSAEConfig) -> None:
        super().__init__(config)
        self.decoder.data.copy_(F.normalize(self.encoder.data, dim=1))

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens 0"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        return self.features_out(code)

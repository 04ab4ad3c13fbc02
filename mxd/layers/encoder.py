"""The dense encoder that the experts of an MxD or muMoE layer share, in the base MLP's form.

z = phi(x E^T + b_E)                                        MLP
z = psi(x E_glu^T + b_glu) * (x E^T + b_E)                  GLU (MxD, section 2.5)
"""

from typing import ClassVar

from jaxtyping import Float
from pydantic import PositiveInt
from torch import Tensor, nn

from mxd.common.errors import MxdError
from mxd.layers.base import linear_init, zeros
from mxd.layers.config import ACTIVATIONS, Activation, MLPWeights, ReplacementConfig
from mxd.ops import linear


class EncodedConfig(ReplacementConfig):
    """Fields of the methods that have a dense encoder."""

    inherits: ClassVar[tuple[str, ...]] = ("hidden", "activation", "glu")

    hidden: PositiveInt | None = None
    """Width of the dense encoder; the base MLP's width by default."""
    activation: Activation | None = None
    """Activation of the encoder; the base MLP's by default."""
    glu: bool | None = None
    """Whether the encoder is a gated linear unit; as the base MLP by default."""

    @property
    def encoder_params(self) -> int:
        """Number of the encoder's parameters, biases included."""
        return (2 if self.glu else 1) * (self.hidden or 0) * ((self.d_in or 0) + 1)


class DenseEncoder(nn.Module):
    """``x -> z``, MLP or GLU."""

    def __init__(self, config: EncodedConfig) -> None:
        super().__init__()
        d, h = config.d_in, config.hidden
        assert d and h and config.activation
        self.activation = ACTIVATIONS[config.activation]
        self.weight = linear_init(h, d, fan_in=d)
        self.bias = zeros(h)
        self.glu_weight = linear_init(h, d, fan_in=d) if config.glu else None
        self.glu_bias = zeros(h) if config.glu else None

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch hidden"]:
        """Return the hidden state in the encoder's dtype."""
        x = x.to(self.weight.dtype)
        encoded = linear(x, self.weight, self.bias)
        if self.glu_weight is None or self.glu_bias is None:
            return self.activation(encoded)
        return self.activation(linear(x, self.glu_weight, self.glu_bias)) * encoded

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``, of a layer whose ``encoder`` this is."""
        return {"encoder.weight": (1, 0)} | ({"encoder.glu_weight": (1, 0)} if self.glu_weight is not None else {})

    def copy_from(self, base: MLPWeights) -> None:
        """Copy the base MLP's encoder; a missing bias is zero.

        Raises:
            MxdError: the shapes or forms differ.
        """
        if base.encoder.shape != self.weight.shape or (base.encoder_glu is None) != (self.glu_weight is None):
            raise MxdError(
                f"cannot copy a base encoder of shape {tuple(base.encoder.shape)} (GLU: {base.encoder_glu is not None})"
                f" into one of {tuple(self.weight.shape)} (GLU: {self.glu_weight is not None}); "
                "leave hidden and glu of the config to the base model."
            )
        pairs = [
            (self.weight, base.encoder),
            (self.bias, base.encoder_bias),
            (self.glu_weight, base.encoder_glu),
            (self.glu_bias, None),
        ]
        for parameter, source in pairs:
            if parameter is not None:
                parameter.data.copy_(source) if source is not None else parameter.data.zero_()

"""The base MLP's own neurons as units: a view of its weights that keeps the contract of a replacement layer.

    y = h D + b,   h = act(x E^T + b_E),  or  act(x E_glu^T) * (x E^T + b_E)

Neuron n is unit n. Its activation is ``|h_n|``, since a neuron acts as much where it is negative, and what it adds per
unit of activation is ``sign(h_n) D[n]``: so whatever ranks units by strength, masks them or drops them works on neurons
as well. With nothing masked the layer is the MLP, up to rounding. It is a control, never trained or saved: what a
replacement's units can do and the model's own neurons cannot is what the replacement is good for.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from mxd.common.errors import MxdError
from mxd.layers.base import ReplacementLayer, code_product, zeros
from mxd.layers.config import ACTIVATIONS, Activation, MLPShape, MLPWeights, ReplacementConfig
from mxd.layers.gates import Code, LinearGate
from mxd.layers.sparsity import AlwaysConfig, AnySparsity
from mxd.layers.sparsity.base import every_unit


class NeuronsConfig(ReplacementConfig):
    """The form of the MLP; nothing is chosen, and the size is what it is."""

    kinds = ("always",)

    sparsity: AnySparsity = AlwaysConfig()
    """``always``: nothing is chosen."""
    activation: Activation | None = None
    """The MLP's activation function."""
    glu: bool = False
    """Whether the activation gates a second linear map."""
    encoder_bias: bool = False
    """Whether the encoder has a bias."""

    @property
    def label(self) -> str:
        """MLP neurons."""
        return "MLP neurons"

    @property
    def slug(self) -> Literal["neurons"]:
        """``neurons``."""
        return "neurons"

    @property
    def layer_params(self) -> int:
        """Encoder, the gate of a GLU, biases, decoder."""
        d, o, n = self.d_in or 0, self.d_out or 0, self.num_units or 0
        return n * (d * (1 + self.glu) + self.encoder_bias + o) + o

    def _make(self) -> "Neurons":
        return Neurons(self)


class Neurons(ReplacementLayer):
    """An MLP whose hidden activations are the code."""

    config: NeuronsConfig

    def __init__(self, config: NeuronsConfig) -> None:
        super().__init__(config)
        d, o, n = config.d_in, config.d_out, config.num_units
        assert d and o and n
        self.encoder = zeros(n, d)
        self.encoder_glu = zeros(n, d) if config.glu else None
        self.encoder_bias = zeros(n) if config.encoder_bias else None
        self.decoder = zeros(n, o)

    @classmethod
    def of(cls, shape: MLPShape, weights: MLPWeights) -> "Neurons":
        """Return an MLP's neurons as units; its weights are shared with the MLP, not copied.

        Raises:
            MxdError: the activation could not be read from the model.
        """
        if shape.activation is None:
            raise MxdError("the base MLP's activation function could not be read, so its neurons cannot be units.")
        config = NeuronsConfig(
            d_in=shape.d_in,
            d_out=shape.d_out,
            num_units=len(weights.encoder),
            activation=shape.activation,
            glu=weights.encoder_glu is not None,
            encoder_bias=weights.encoder_bias is not None,
        )
        with torch.device("meta"):
            layer = cls(config)
        bias = weights.decoder.new_zeros(shape.d_out) if weights.decoder_bias is None else weights.decoder_bias
        tensors = {"encoder": weights.encoder, "encoder_glu": weights.encoder_glu, "bias": bias}
        tensors |= {"encoder_bias": weights.encoder_bias, "decoder": weights.decoder}
        for name, tensor in tensors.items():
            setattr(layer, name, None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False))
        return layer.eval()

    @property
    def gates(self) -> LinearGate:
        """What the activation function is applied to: of a GLU, the gate."""
        weight = self.encoder if self.encoder_glu is None else self.encoder_glu
        bias = self.encoder_bias if self.encoder_glu is None else None
        return LinearGate(weight, weight.new_zeros(len(weight)) if bias is None else bias)

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Code:
        """Return ``|h|`` of every neuron."""
        return every_unit(self._activations(self._rows(x)).abs()).reshape(x.shape[:-1])

    def unit_weight(self, n: int) -> Float[Tensor, "1 d_out"]:
        """Return ``D[n]`` as one row."""
        return self.decoder[n : n + 1]

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||D[n]||``."""
        return self.decoder.square().sum(-1).clamp_min(1e-30).sqrt()

    def factor_norms(self) -> Float[Tensor, " units"]:
        """As ``unit_norms``: nothing is shared."""
        return self.unit_norms()

    def _activations(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens units"]:
        assert self.config.activation
        hidden = mlp_hidden(ACTIVATIONS[self.config.activation], self.encoder, self.encoder_bias, self.encoder_glu)
        return hidden(x)

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens units"]:
        """Return the signs of the neurons."""
        return self._activations(x).sign()

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        return self.hidden(x)[..., n : n + 1] * self.decoder[n]

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens units"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        signs = self._hidden(x) if hidden is None else hidden
        signs = signs if code.all_units else signs.gather(-1, code.indices)
        return code_product(code.with_activations(code.activations * signs), self.decoder) + self.bias


def mlp_hidden(
    activation: Callable[[Tensor], Tensor],
    encoder: Float[Tensor, "hidden d_in"],
    bias: Float[Tensor, " hidden"] | None,
    glu: Float[Tensor, "hidden d_in"] | None,
) -> Callable[[Tensor], Tensor]:
    """Return the function from an MLP's input to the input of its down projection.

    Args:
        activation: the activation function.
        encoder: the up projection.
        bias: its bias.
        glu: the gate's weights, of a GLU.
    """

    def hidden(x: Tensor) -> Tensor:
        up = F.linear(x, encoder, bias)
        return activation(up) if glu is None else activation(F.linear(x, glu)) * up

    return hidden

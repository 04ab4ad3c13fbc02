"""TopK -> JumpReLU, for tools that have no TopK: a threshold for each unit, fitted on activations.

A unit's place among the K largest depends on the other units, a threshold does not, so something is always lost. The
threshold of a unit is the one that minimises the squared error of its activations against TopK's: docs/formats.md
compares it with a common threshold and with one that keeps each unit's firing rate.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mxd.layers.code import Code
from mxd.layers.sparsity import JumpReLUConfig
from mxd.layers.transcoder import Transcoder
from mxd.ops.losses import normalized_mse

CHUNK_BYTES = 256 * 2**20
"""Memory of the pre-activations that are looked at together."""


@dataclass(frozen=True)
class Loss:
    """What another forward pass than the layer's own costs, on activations that nothing was fitted on."""

    tokens: int
    changed: float
    """RankPart of tokens whose code is another."""
    nmse: float
    """Normalized MSE of the layer against the MLP's output."""
    nmse_converted: float
    """The same of what was written."""
    l0: float
    """Units active for a token, on average."""
    l0_converted: float

    @property
    def line(self) -> str:
        """The same in words."""
        return (
            f"not the same for {self.changed:.1%} of {self.tokens:,} held-out tokens: NMSE {self.nmse:.5f} -> "
            f"{self.nmse_converted:.5f}, mean L0 {self.l0:.2f} -> {self.l0_converted:.2f}"
        )


@torch.no_grad()
def fit_and_measure(
    layer: Transcoder,
    x: Float[Tensor, "tokens d_in"],
    held_x: Float[Tensor, "held d_in"],
    held_y: Float[Tensor, "held d_out"],
) -> tuple[Transcoder, Loss]:
    """Return the same transcoder with a JumpReLU, fitted on ``x``, in the place of its TopK, and what that loses."""
    config = layer.config.model_copy(update={"sparsity": JumpReLUConfig()})
    converted = config.build().to(x.device).eval().requires_grad_(False)
    own = {name: tensor for name, tensor in layer.state_dict().items() if not name.startswith("sparsity.")}
    converted.load_state_dict(own | {"sparsity.threshold": fit_thresholds(layer, x)})
    assert isinstance(converted, Transcoder)
    return converted, measure(layer, converted.encode(held_x), converted(held_x), held_x, held_y)


@torch.no_grad()
def measure(
    layer: Transcoder,
    code: Code,
    out: Float[Tensor, "tokens d_out"],
    x: Float[Tensor, "tokens d_in"],
    y: Float[Tensor, "tokens d_out"],
) -> Loss:
    """Return what is lost by another code and output than the layer's."""
    own = layer.encode(x)
    counts = [(c.activations != 0).sum(-1) for c in (own, code)]
    changed = (counts[0] != counts[1]) | ~torch.isclose(own.activations.sum(-1), code.activations.sum(-1), rtol=1e-4)
    nmse, nmse_converted = (normalized_mse(prediction, y).item() for prediction in (layer(x), out))
    l0, l0_converted = (float(count.float().mean()) for count in counts)
    return Loss(len(x), float(changed.float().mean()), nmse, nmse_converted, l0, l0_converted)


@torch.no_grad()
def fit_thresholds(layer: Transcoder, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, " units"]:
    """Return the thresholds ``t`` that minimise ``sum_tokens (pre * (pre > t) - a)^2`` for each unit.

    Of all ``t`` between two neighbouring activations the middle is taken. A unit that should never be active on these
    tokens gets its largest pre-activation there.
    """
    code = layer.encode(x)
    smallest = torch.where(code.activations > 0, code.activations, torch.inf).amin(
        -1, keepdim=True
    )  # of the chosen, by token
    weight, bias = layer.encoder, layer.encoder_bias
    chunk = max(1, CHUNK_BYTES // (4 * len(x)))
    pieces = [
        _fit(torch.relu(torch.addmm(b, x, w.T)), smallest)
        for w, b in zip(weight.split(chunk), bias.split(chunk), strict=True)
    ]
    return torch.cat(pieces)


def _fit(pre: Float[Tensor, "tokens units"], smallest: Float[Tensor, "tokens 1"]) -> Float[Tensor, " units"]:
    values, order = pre.sort(dim=0, descending=True)
    # A chunk's products may round otherwise than the tiles of encode: what is within rounding of the smallest counts.
    kept = values >= smallest.expand_as(pre).gather(0, order) * (1 - 1e-5)
    energy = values.square()
    # With the first i values active: the energy of those that TopK drops, less the energy of those that it keeps.
    error = torch.where(kept, -energy, energy).double().cumsum(0)
    edge = torch.cat([torch.zeros_like(error[:1]), error]).argmin(0)
    above = values.gather(0, (edge - 1).clamp_min(0).unsqueeze(0))[0]
    below = torch.cat([values, torch.zeros_like(values[:1])]).gather(0, edge.unsqueeze(0))[0]
    return torch.where(edge > 0, (above + below) / 2, below)

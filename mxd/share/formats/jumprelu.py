"""Other kinds of sparsity -> JumpReLU, for tools that have no other.

BatchTopK is evaluated with one threshold, so it is a JumpReLU already. For TopK a threshold is fitted for each unit.

Whether a unit is among the K largest depends on the other units, while a threshold does not, so something is always
lost. Each threshold minimises the squared error of its unit's activations against TopK's: docs/formats.md compares this
with a common threshold and with thresholds that keep each unit's firing rate.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mxd.layers.gates import Code
from mxd.layers.losses import normalized_mse
from mxd.layers.sparsity import BatchTopK, JumpReLUConfig
from mxd.layers.transcoder import Transcoder

CHUNK_BYTES = 256 * 2**20
"""Memory for the pre-activations of one chunk of units."""


@dataclass(frozen=True)
class Loss:
    """What a converted layer loses against the original, on activations that nothing was fitted to."""

    tokens: int
    changed: float
    """Share of tokens whose code differs."""
    nmse: float
    """Normalized MSE of the original against the MLP's output."""
    nmse_converted: float
    """The same for the converted layer."""
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
def same_as_jumprelu(layer: Transcoder) -> Transcoder | None:
    """Return a BatchTopK transcoder with its one threshold as those of a JumpReLU: the same function. Else ``None``."""
    if not isinstance(layer.sparsity, BatchTopK):
        return None
    return _with_thresholds(layer, layer.sparsity.threshold.float().expand(layer.num_units))


def _with_thresholds(layer: Transcoder, thresholds: Float[Tensor, " units"]) -> Transcoder:
    """Return the same transcoder with a JumpReLU in place of its sparsity."""
    config = layer.config.model_copy(update={"sparsity": JumpReLUConfig()})
    converted = config.build().to(thresholds.device).eval().requires_grad_(False)
    weights = {name: tensor for name, tensor in layer.state_dict().items() if not name.startswith("sparsity.")}
    converted.load_state_dict(weights | {"sparsity.threshold": thresholds})
    assert isinstance(converted, Transcoder)
    return converted


@torch.no_grad()
def fit_and_measure(
    layer: Transcoder,
    x: Float[Tensor, "tokens d_in"],
    held_x: Float[Tensor, "held d_in"],
    held_y: Float[Tensor, "held d_out"],
) -> tuple[Transcoder, Loss]:
    """Return the same transcoder with a JumpReLU in place of its TopK, and what that loses.

    Args:
        layer: the transcoder.
        x: MLP inputs that thresholds are fitted on.
        held_x: other MLP inputs, to measure on.
        held_y: the MLP's outputs for them.
    """
    converted = _with_thresholds(layer, fit_thresholds(layer, x))
    return converted, measure(layer, converted.encode(held_x), converted(held_x), held_x, held_y)


@torch.no_grad()
def measure(
    layer: Transcoder,
    code: Code,
    out: Float[Tensor, "tokens d_out"],
    x: Float[Tensor, "tokens d_in"],
    y: Float[Tensor, "tokens d_out"],
) -> Loss:
    """Return what another code and output lose against the layer's.

    Args:
        layer: the layer.
        code: the code that replaces the layer's.
        out: the output that replaces the layer's.
        x: MLP inputs.
        y: the MLP's outputs.
    """
    original = layer.encode(x)
    counts = [(c.activations != 0).sum(-1) for c in (original, code)]
    # Codes may list the same units in another order, so their sums are compared.
    before, after = (c.activations.sum(-1) for c in (original, code))
    changed = (counts[0] != counts[1]) | ~torch.isclose(before, after, rtol=1e-4)
    nmse, nmse_converted = (normalized_mse(prediction, y).item() for prediction in (layer(x), out))
    l0, l0_converted = (float(count.float().mean()) for count in counts)
    return Loss(len(x), float(changed.float().mean()), nmse, nmse_converted, l0, l0_converted)


@torch.no_grad()
def fit_thresholds(layer: Transcoder, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, " units"]:
    """Return the thresholds ``t`` that minimise ``sum_tokens (pre * (pre > t) - a)^2`` for each unit.

    All ``t`` between two neighbouring pre-activations of a unit give the same error; the middle is taken. A unit that
    is best never active on these tokens gets its largest pre-activation there.
    """
    code = layer.encode(x)
    # The smallest activation among each token's K; where nothing is active, infinity.
    smallest = torch.where(code.activations > 0, code.activations, torch.inf).amin(-1, keepdim=True)
    weight, bias = layer.encoder, layer.encoder_bias
    chunk = max(1, CHUNK_BYTES // (4 * len(x)))
    pieces = [
        _fit(torch.relu(torch.addmm(b, x, w.T)), smallest)
        for w, b in zip(weight.split(chunk), bias.split(chunk), strict=True)
    ]
    return torch.cat(pieces)


def _fit(pre: Float[Tensor, "tokens units"], smallest: Float[Tensor, "tokens 1"]) -> Float[Tensor, " units"]:
    """Return the thresholds for one chunk of units: in each column, the best of all splits of its sorted values."""
    values, order = pre.sort(dim=0, descending=True)
    # Products of a chunk may round differently from those in encode: equality with the smallest is up to rounding.
    kept = values >= smallest.expand_as(pre).gather(0, order) * (1 - 1e-5)
    energy = values.square()
    # Row i: the error with the i + 1 largest values active, up to a constant. A value that
    # TopK drops adds its energy, one that it keeps removes it.
    error = torch.where(kept, -energy, energy).double().cumsum(0)
    # ``edge`` values are best active (0: none); the threshold lies between the last of them and the next.
    edge = torch.cat([torch.zeros_like(error[:1]), error]).argmin(0)
    above = values.gather(0, (edge - 1).clamp_min(0).unsqueeze(0))[0]
    below = torch.cat([values, torch.zeros_like(values[:1])]).gather(0, edge.unsqueeze(0))[0]
    return torch.where(edge > 0, (above + below) / 2, below)

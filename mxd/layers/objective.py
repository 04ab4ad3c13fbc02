"""What training minimises: a layer's loss and its sparsity's penalty, forward and backward.

``forward_backward`` is what the trainer runs and what the planner measures.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mxd.layers.base import ReplacementLayer
from mxd.layers.gates import Code
from mxd.layers.losses import normalize, squared_error


class Objective(NamedTuple):
    """The results of one forward and backward pass."""

    code: Code
    """Which units were active."""
    error: Float[Tensor, " tokens"]
    """Squared error of each token."""
    loss: Float[Tensor, ""]
    """Normalized MSE, without the sparsity's penalty."""


def forward_backward(
    layer: ReplacementLayer,
    x: Float[Tensor, "tokens d_in"],
    y: Float[Tensor, "tokens d_out"],
    parts: int = 1,
    dead: Bool[Tensor, " units"] | None = None,
    weight: float = 0.0,
) -> Objective:
    """Run a layer forward and backward over one part of a batch, and add to its gradients (MxD, section 3.1).

    Args:
        layer: the layer.
        x: the MLP's inputs.
        y: the MLP's outputs.
        parts: number of equal parts of the batch; their gradients add up to the whole batch's.
        dead: units that ``auxk_loss`` revives, if any.
        weight: its weight.
    """
    read = layer.read(x, y)
    code = layer.encode(read)
    error, loss = layer.loss(read, code, y)
    total = loss + layer.penalty(code)
    if dead is not None and dead.any():
        total = total + weight * auxk_loss(layer, read, code, y, dead)
    (total / parts).backward()
    return Objective(code, error, loss)


def auxk_loss(
    layer: ReplacementLayer,
    read: Float[Tensor, "tokens d_in"],
    code: Code,
    y: Float[Tensor, "tokens d_out"],
    dead: Bool[Tensor, " units"],
) -> Float[Tensor, ""]:
    """Return how badly dead units predict what the others leave (AuxK; Gao et al., 2024, section 2.4 and appendix A.2).

    For each token the ``d_out / 2`` dead units with the largest positive pre-activations are taken. Neither bias nor
    skip belong to the prediction, and the residual is a constant. In the units of the normalized MSE; smaller in
    proportion where fewer units are dead than a token takes.

    Args:
        layer: the layer.
        read: what it reads.
        code: its code.
        y: the MLP's outputs.
        dead: which units are dead.
    """
    with torch.no_grad():
        residual = y - layer.decode(read, code)
    most = y.shape[-1] // 2
    prediction = layer.decode(read, layer.dead_code(read, dead, most)) - layer.rest(read)
    share = min(1.0, int(dead.sum()) / most)
    return share * normalize(squared_error(prediction, residual), y)

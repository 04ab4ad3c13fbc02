"""What training minimises: a layer's loss and its sparsity's penalty, forward and backward.

``forward_backward`` is what the trainer runs and what the planner measures.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from mxd.layers.base import ReplacementLayer
from mxd.layers.gates import Code


class Objective(NamedTuple):
    """The results of one forward and backward pass."""

    code: Code
    """Which units were active."""
    error: Float[Tensor, " tokens"]
    """Squared error of each token."""
    loss: Float[Tensor, ""]
    """Normalized MSE, without the sparsity's penalty."""


def forward_backward(
    layer: ReplacementLayer, x: Float[Tensor, "tokens d_in"], y: Float[Tensor, "tokens d_out"], parts: int = 1
) -> Objective:
    """Run a layer forward and backward over one part of a batch, and add to its gradients (MxD, section 3.1).

    Args:
        layer: the layer.
        x: the MLP's inputs.
        y: the MLP's outputs.
        parts: number of equal parts of the batch; their gradients add up to the whole batch's.
    """
    read = layer.read(x, y)
    code = layer.encode(read)
    error, loss = layer.loss(read, code, y)
    ((loss + layer.penalty(code)) / parts).backward()
    return Objective(code, error, loss)

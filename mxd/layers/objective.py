"""What training minimises, forward and backward: the trainer runs it, and the planner measures it."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from mxd.layers.base import ReplacementLayer
from mxd.layers.code import Code
from mxd.ops.losses import normalize, squared_error


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
    error = squared_error(layer.decode(read, code), y)
    loss = normalize(error, y)
    ((loss + layer.penalty(code)) / parts).backward()
    return Objective(code, error, loss)

"""What training minimises: the normalized MSE and a layer's penalty, forward and backward.

The losses are pure functions, accumulated in float32, zero at perfect reconstruction. ``forward_backward`` is what the
trainer runs and what the planner measures.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxd.layers.base import ReplacementLayer
from mxd.layers.gates import Code


def normalized_mse(
    prediction: Float[Tensor, "*batch d_out"], target: Float[Tensor, "*batch d_out"]
) -> Float[Tensor, ""]:
    """Return the mean over tokens of ``||y - y^||^2 / (||y|| d_out)`` (MxD, section 3.1; the norm is not squared)."""
    return normalize(squared_error(prediction, target), target)


def normalize(error: Float[Tensor, "*batch"], target: Float[Tensor, "*batch d_out"]) -> Float[Tensor, ""]:
    """Return the normalized MSE, given each token's squared error.

    A target of norm zero would divide by zero: norms are clamped at 1e-30, and the activation source refuses such
    tokens before they get here.
    """
    norm = torch.linalg.vector_norm(target.float(), dim=-1).clamp_min(1e-30)
    return (error / norm).mean() / target.shape[-1]


def squared_error(
    prediction: Float[Tensor, "*batch d_out"], target: Float[Tensor, "*batch d_out"]
) -> Float[Tensor, "*batch"]:
    """Return ``||y - y^||^2`` of each token, in float32; one temporary forward, one backward."""
    return _SquaredError.apply(prediction.float(), target.float())


class _SquaredError(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prediction: Float[Tensor, "*batch d_out"], target: Float[Tensor, "*batch d_out"]
    ) -> Float[Tensor, "*batch"]:
        difference = prediction - target
        ctx.save_for_backward(difference)
        return torch.linalg.vecdot(difference, difference)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        (difference,) = ctx.saved_tensors
        grad = difference * (2 * grad).unsqueeze(-1)
        return grad, -grad if ctx.needs_input_grad[1] else None


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

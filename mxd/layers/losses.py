"""The losses of training: pure functions, accumulated in float32, zero at perfect reconstruction."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


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

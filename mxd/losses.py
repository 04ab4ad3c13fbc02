"""Losses: pure functions, accumulated in float32, zero at perfect reconstruction."""

import torch
from jaxtyping import Float
from torch import Tensor


def normalized_mse(
    prediction: Float[Tensor, "*batch d_out"], target: Float[Tensor, "*batch d_out"]
) -> Float[Tensor, ""]:
    """Return the mean over tokens of ``||y - y^||^2 / (||y|| d_out)`` (MxD, section 3.1; the norm is not squared).

    A target of norm zero would divide by zero; its norm is raised to the smallest normal float32, and the
    activation stream refuses such tokens before they get here.
    """
    prediction, target = prediction.float(), target.float()
    norm = torch.linalg.vector_norm(target, dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    squared = (target - prediction).square().mean(-1)
    return (squared / norm).mean()

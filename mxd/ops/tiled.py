"""A sum of losses over many rows whose intermediate results (logits, say) exist for some rows at a time."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def tiled_sum(
    rows: Float[Tensor, "rows width"],
    loss: Callable[[Float[Tensor, "some width"], slice], Float[Tensor, ""]],
    size: int,
) -> Float[Tensor, ""]:
    """Return the sum of ``loss(rows[part], part)`` over parts of ``size`` rows, with its gradient to the rows alone.

    Gradients are taken part by part, forward and backward at once, and only those to the rows are kept: the memory is
    that of one part, and no part runs twice.

    Args:
        rows: what the loss is a function of; every row counts by itself.
        loss: the loss of some rows, given where they are.
        size: rows in a part.
    """
    return _TiledSum.apply(rows, loss, size)


class _TiledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, loss: Callable[[Tensor, slice], Tensor], size: int) -> Tensor:
        total, grad = rows.new_zeros((), dtype=torch.float32), torch.empty_like(rows)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            with torch.enable_grad():
                own = rows[part].detach().requires_grad_()
                value = loss(own, part)
            (grad[part],) = torch.autograd.grad(value, own)
            total += value.detach()
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * upstream.to(grad.dtype), None, None

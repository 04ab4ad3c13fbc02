"""Dense products of inputs that are rounded to bfloat16, for processors that multiply bfloat16 faster than float32.

Inside ``rounded_products`` both inputs of a product and the gradient that comes back to it are rounded to bfloat16;
sums are taken in float32 within a product, and its result is rounded once. Outside, products are PyTorch's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxd.ops.devices import candidate_dtype

DenseDtype = Literal["float32", "bfloat16"]

WORTH = 2**18
"""Numbers of the smaller matrix from which a product in bfloat16 pays, with the rounding of its inputs."""

_rounding: ContextVar[bool] = ContextVar("_rounding", default=False)


def dense_dtype(device: torch.device, asked: Literal["auto"] | DenseDtype = "auto") -> DenseDtype:
    """Return what was asked for; for ``auto``, ``bfloat16`` on a CPU with instructions for it (a GPU has TF32)."""
    if asked != "auto":
        return asked
    return candidate_dtype(device) if device.type == "cpu" else "float32"


@contextmanager
def rounded_products(dtype: DenseDtype = "bfloat16") -> Iterator[None]:
    """Round the inputs of large dense products in the ``with`` block, and in the backward pass of what it computes."""
    before = _rounding.set(dtype == "bfloat16")
    try:
        yield
    finally:
        _rounding.reset(before)


def product(
    x: Float[Tensor, "*batch inner"], matrix: Float[Tensor, "inner columns"]
) -> Float[Tensor, "*batch columns"]:
    """Return ``x @ matrix``; of rounded inputs where ``rounded_products`` says so and it pays."""
    if not _pays(x, matrix):
        return x @ matrix
    return _Rounded.apply(x.flatten(0, -2), matrix).unflatten(0, x.shape[:-1])


def linear(
    x: Float[Tensor, "*batch inner"], weight: Float[Tensor, "columns inner"], bias: Float[Tensor, " columns"]
) -> Float[Tensor, "*batch columns"]:
    """Return ``x weight^T + bias``, the product as in ``product``.

    Args:
        x: inputs.
        weight: one row for each column of the result.
        bias: one number for each, which is not rounded.
    """
    return product(x, weight.T) + bias if _pays(x, weight) else F.linear(x, weight, bias)


def add_product(
    out: Float[Tensor, "rows columns"], x: Float[Tensor, "rows inner"], matrix: Float[Tensor, "inner columns"]
) -> Float[Tensor, "rows columns"]:
    """Return ``out + x @ matrix``, the product as in ``product``.

    Args:
        out: what is added, which is not rounded.
        x: inputs.
        matrix: what they are multiplied with.
    """
    return out + product(x, matrix) if _pays(x, matrix) else torch.addmm(out, x, matrix)


def _pays(x: Tensor, matrix: Tensor) -> bool:
    return _rounding.get() and x.dtype == torch.float32 and min(x.numel(), matrix.numel()) >= WORTH


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        low_x, low_matrix = x.bfloat16(), matrix.bfloat16()
        ctx.save_for_backward(low_x, low_matrix)
        return (low_x @ low_matrix).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        low_x, low_matrix = ctx.saved_tensors
        grad = grad.bfloat16()
        grad_x = (grad @ low_matrix.T).float() if ctx.needs_input_grad[0] else None
        grad_matrix = (low_x.T @ grad).float() if ctx.needs_input_grad[1] else None
        return grad_x, grad_matrix

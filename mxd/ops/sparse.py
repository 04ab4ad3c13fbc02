"""Top-k linear map and sparse decode with sparse backward passes.

Units are rows everywhere (``weight[n]`` belongs to unit ``n``), so that a gather of K units reads K contiguous rows.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

with warnings.catch_warnings():  # torch says once that CSR tensors are in beta; only their product is used here
    warnings.simplefilter("ignore")
    torch.zeros(1, 1).to_sparse_csr()

BLOCK_BYTES = 16 * 2**20
"""Pre-activations are formed in blocks of about this many bytes, so that they stay in cache on their way to top-k."""


def topk_linear(
    x: Float[Tensor, "tokens d_in"],
    weight: Float[Tensor, "units d_in"],
    bias: Float[Tensor, " units"],
    k: int,
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """Return the ``k`` largest of ``relu(x weight^T + bias)`` of each row, with their indices, in no fixed order.

    Only ``[block, units]`` pre-activations exist at any time, and the backward pass touches the chosen units alone.

    Args:
        x: inputs.
        weight: one row per unit.
        bias: one number per unit.
        k: how many units to keep, ``1 <= k <= units``.
    """
    return _TopKLinear.apply(x, weight, bias, k)


def sparse_decode(
    values: Float[Tensor, "tokens k"], indices: Int[Tensor, "tokens k"], weight: Float[Tensor, "units d_out"]
) -> Float[Tensor, "tokens d_out"]:
    """Return ``sum_k values[:, k] * weight[indices[:, k]]``, that is ``a @ weight`` for the sparse code ``a``."""
    return _SparseDecode.apply(values, indices, weight)


def _gather_sum(values: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    """Sum ``values[:, k] * weight[indices[:, k]]`` over k. Shape ``[tokens, weight columns]``."""
    if indices.numel() == 0:
        return weight.new_zeros(len(indices), weight.shape[1])
    return F.embedding_bag(indices, weight, per_sample_weights=values, mode="sum")


def _gather_dot(grad: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
    """Return ``grad[t] . weight[indices[t, k]]`` for every token t and slot k: the gradient of the values."""
    if indices.numel() == 0:
        return weight.new_zeros(indices.shape)
    with torch.enable_grad():
        probe = torch.zeros(indices.shape, dtype=weight.dtype, device=weight.device, requires_grad=True)
        bag = F.embedding_bag(indices, weight.detach(), per_sample_weights=probe, mode="sum")
    return torch.autograd.grad(bag, probe, grad.contiguous())[0]


@dataclass(frozen=True)
class _ByUnit:
    """A selection of units sorted by unit: the transposed code's CSR structure."""

    indices: Tensor
    version: int
    units: int
    order: Tensor
    starts: Tensor
    tokens: Tensor


_last: list[_ByUnit] = []
"""The latest selection: the decoder's and the encoder's gradients of one step need the same one."""


def _by_unit(indices: Tensor, units: int) -> _ByUnit:
    for known in _last:
        same = known.indices.data_ptr() == indices.data_ptr() and known.indices.shape == indices.shape
        if same and known.version == indices._version and known.units == units:
            return known
    flat = indices.reshape(-1)
    order = flat.to(torch.int32).argsort(stable=True)
    starts = torch.zeros(units + 1, dtype=torch.int64, device=flat.device)
    torch.cumsum(torch.bincount(flat, minlength=units), 0, out=starts[1:])
    tokens = torch.div(order, max(indices.shape[1], 1), rounding_mode="floor")
    _last[:] = [_ByUnit(indices, indices._version, units, order, starts, tokens)]
    return _last[0]


def _scatter_rows(values: Tensor, indices: Tensor, rows: Tensor, units: int) -> Tensor:
    """Return ``a^T @ rows`` for the sparse code ``a``: shape ``[units, rows' columns]``, as one CSR product."""
    plan = _by_unit(indices, units)
    transposed = torch.sparse_csr_tensor(
        plan.starts,
        plan.tokens,
        values.reshape(-1)[plan.order],
        size=(units, len(indices)),
        check_invariants=False,
    )
    return transposed @ rows


class _TopKLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
        tokens, units = len(x), len(weight)
        values = x.new_empty(tokens, k)
        indices = torch.empty(tokens, k, dtype=torch.int64, device=x.device)
        block = max(1, BLOCK_BYTES // (units * x.element_size()))
        block = max(block, 1024) if x.is_cuda else block
        buffer = x.new_empty(min(block, tokens), units)
        for start in range(0, tokens, block):
            part = x[start : start + block]
            pre = torch.addmm(bias, part, weight.T, out=buffer[: len(part)])
            torch.topk(
                pre,
                k,
                dim=-1,
                sorted=False,
                out=(values[start : start + block], indices[start : start + block]),
            )
        values = values.relu_()
        ctx.save_for_backward(x, weight, values, indices)
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, values, indices = ctx.saved_tensors
        grad = grad * (values > 0)
        grad_x = _gather_sum(grad, indices, weight) if ctx.needs_input_grad[0] else None
        grad_weight = _scatter_rows(grad, indices, x, len(weight)) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = weight.new_zeros(len(weight)).index_add_(0, indices.reshape(-1), grad.reshape(-1))
        return grad_x, grad_weight, grad_bias, None


class _SparseDecode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, weight: Tensor) -> Tensor:
        values, indices = values.contiguous(), indices.contiguous()
        ctx.save_for_backward(values, indices, weight)
        return _gather_sum(values, indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, indices, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_values = _gather_dot(grad, indices, weight) if ctx.needs_input_grad[0] else None
        grad_weight = _scatter_rows(values, indices, grad, len(weight)) if ctx.needs_input_grad[2] else None
        return grad_values, None, grad_weight

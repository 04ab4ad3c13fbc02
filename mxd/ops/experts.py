"""Products with experts' weights: of each token with the matrices it chose, and of two vectors with a core tensor.

Neither keeps more for the backward pass than its arguments.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxd.ops.sparse import Selection

TILE = 2**24
"""Numbers of the outer products that exist at a time in ``bilinear``: 64 MiB in float32."""


def grouped_linear(
    values: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    rows: Float[Tensor, "tokens d_in"],
    weight: Float[Tensor, "units d_in d_out"],
    selection: Selection | None = None,
) -> Float[Tensor, "tokens d_out"]:
    """Return ``sum_k values[:, k] * (rows @ weight[indices[:, k]])``, one product for each unit with its tokens.

    Args:
        values: activations of the units that each token uses.
        indices: the numbers of these units, different ones for each token.
        rows: what the units multiply.
        weight: one matrix per unit.
        selection: the one given to the ``topk_linear`` that chose these indices; by default they are sorted again.
    """
    return _GroupedLinear.apply(values, indices, rows, weight, selection or Selection())


def bilinear(
    left: Float[Tensor, "tokens p"], right: Float[Tensor, "tokens q"], core: Float[Tensor, "p q r"]
) -> Float[Tensor, "tokens r"]:
    """Return ``sum_{p q} left[:, p] right[:, q] core[p, q]``, some tokens at a time.

    Args:
        left: one vector per token.
        right: another per token.
        core: what both are contracted with.
    """
    return _Bilinear.apply(left, right, core)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, indices: Tensor, rows: Tensor, weight: Tensor, selection: Selection
    ) -> Tensor:
        ctx.save_for_backward(values, indices, rows, weight)
        ctx.selection = selection
        out = rows.new_zeros(len(rows), weight.shape[2])
        flat = values.reshape(-1, 1)
        for unit, entries, tokens in selection.groups(indices, len(weight)):
            out.index_add_(0, tokens, flat[entries] * (rows[tokens] @ weight[unit]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, indices, rows, weight = ctx.saved_tensors
        flat = values.reshape(-1, 1)
        to_values, to_rows, to_weight = torch.zeros_like(flat), torch.zeros_like(rows), torch.zeros_like(weight)
        for unit, entries, tokens in ctx.selection.groups(indices, len(weight)):
            read, upstream, value = rows[tokens], grad[tokens], flat[entries]
            back = upstream @ weight[unit].T
            to_values[entries] = (back * read).sum(1, keepdim=True)
            to_rows.index_add_(0, tokens, value * back)
            torch.mm((value * read).T, upstream, out=to_weight[unit])
        return to_values.view_as(values), None, to_rows, to_weight, None


class _Bilinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, core: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, core)
        flat, out = core.flatten(0, 1), left.new_empty(len(left), core.shape[2])
        for tile in _tiles(left, right):
            torch.mm(_outer(left[tile], right[tile]), flat, out=out[tile])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        left, right, core = ctx.saved_tensors
        flat = core.flatten(0, 1)
        to_left, to_right, to_core = torch.empty_like(left), torch.empty_like(right), torch.zeros_like(flat)
        for tile in _tiles(left, right):
            to_core.addmm_(_outer(left[tile], right[tile]).T, grad[tile])
            pairs = (grad[tile] @ flat.T).view(-1, left.shape[1], right.shape[1])
            to_left[tile] = (pairs @ right[tile].unsqueeze(2)).squeeze(2)
            to_right[tile] = (left[tile].unsqueeze(1) @ pairs).squeeze(1)
        return to_left, to_right, to_core.view_as(core)


def _tiles(left: Tensor, right: Tensor) -> Iterator[slice]:
    """Yield the tokens whose outer products are formed together."""
    step = max(1, TILE // (left.shape[1] * right.shape[1]))
    for start in range(0, len(left), step):
        yield slice(start, start + step)


def _outer(left: Tensor, right: Tensor) -> Float[Tensor, "tokens pairs"]:
    return (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1)

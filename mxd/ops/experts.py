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


def rows_into_experts(
    rows: Float[Tensor, "tokens d"],
    weight: Float[Tensor, "units m d"],
    indices: Int[Tensor, "tokens k"],
    selection: Selection,
) -> Float[Tensor, "chosen m"]:
    """Return ``rows[t] @ weight[n].T`` for each unit n that token t uses, sorted by unit (``Selection.by_unit``).

    Args:
        rows: what the units multiply.
        weight: one matrix per unit.
        indices: the numbers of the units that each token uses.
        selection: of these indices.
    """
    return _Into.apply(rows, weight, indices, selection)


def experts_into_rows(
    states: Float[Tensor, "chosen m"],
    weight: Float[Tensor, "units m d"],
    indices: Int[Tensor, "tokens k"],
    selection: Selection,
) -> Float[Tensor, "tokens d"]:
    """Return for each token t the sum of ``states[e] @ weight[n]`` over its units n, with e as ``rows_into_experts``.

    Args:
        states: one vector for each pair of a token and a unit that it uses, sorted by unit.
        weight: one matrix per unit.
        indices: the numbers of the units that each token uses.
        selection: of these indices.
    """
    return _OutOf.apply(states, weight, indices, selection)


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
            out.index_add_(0, tokens, flat[entries] * (rows.index_select(0, tokens) @ weight[unit]))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, indices, rows, weight = ctx.saved_tensors
        flat = values.reshape(-1, 1)
        to_values, to_rows, to_weight = torch.zeros_like(flat), torch.zeros_like(rows), torch.zeros_like(weight)
        for unit, entries, tokens in ctx.selection.groups(indices, len(weight)):
            read, upstream = (full.index_select(0, tokens) for full in (rows, grad))
            value = flat[entries]
            back = upstream @ weight[unit].T
            to_values[entries] = (back * read).sum(1, keepdim=True)
            to_rows.index_add_(0, tokens, value * back)
            torch.mm((value * read).T, upstream, out=to_weight[unit])
        return to_values.view_as(values), None, to_rows, to_weight, None


class _Into(torch.autograd.Function):
    """Rows are gathered unit by unit, here and in ``_OutOf``: all of them, [tokens k, d], would not stay in cache."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, indices: Tensor, selection: Selection) -> Tensor:
        ctx.save_for_backward(rows, weight, indices)
        ctx.selection = selection
        states = rows.new_empty(indices.numel(), weight.shape[1])
        sizes, tokens = _parts(indices, len(weight), selection)
        for own, chosen, part in zip(weight, tokens, states.split(sizes), strict=True):
            torch.mm(rows.index_select(0, chosen), own.T, out=part)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, indices = ctx.saved_tensors
        grad, to_weight = grad.contiguous(), torch.empty_like(weight)
        sizes, tokens = _parts(indices, len(weight), ctx.selection)
        for to_own, chosen, part in zip(to_weight, tokens, grad.split(sizes), strict=True):
            torch.mm(part.T, rows.index_select(0, chosen), out=to_own)
        to_rows = _out_of(grad, weight, indices, ctx.selection) if ctx.needs_input_grad[0] else None
        return to_rows, to_weight, None, None


class _OutOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, indices: Tensor, selection: Selection) -> Tensor:
        ctx.save_for_backward(states, weight, indices)
        ctx.selection = selection
        return _out_of(states, weight, indices, selection)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, indices = ctx.saved_tensors
        to_states, to_weight = torch.empty_like(states), torch.empty_like(weight)
        sizes, tokens = _parts(indices, len(weight), ctx.selection)
        groups = zip(weight, to_weight, tokens, states.split(sizes), to_states.split(sizes), strict=True)
        for own, to_own, chosen, part, to_part in groups:
            upstream = grad.index_select(0, chosen)
            torch.mm(upstream, own.T, out=to_part)
            torch.mm(part.T, upstream, out=to_own)
        return to_states, to_weight, None, None


def _out_of(states: Tensor, weight: Tensor, indices: Tensor, selection: Selection) -> Tensor:
    out = states.new_zeros(len(indices), weight.shape[2])
    sizes, tokens = _parts(indices, len(weight), selection)
    for own, chosen, part in zip(weight, tokens, states.split(sizes), strict=True):
        out.index_add_(0, chosen, part @ own)
    return out


def _parts(indices: Tensor, units: int, selection: Selection) -> tuple[list[int], tuple[Tensor, ...]]:
    """Return how many tokens each unit has, and which."""
    plan = selection.by_unit(indices, units)
    return plan.sizes, plan.tokens.split(plan.sizes)


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
            torch.addmm(to_core, _outer(left[tile], right[tile]).T, grad[tile], out=to_core)
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

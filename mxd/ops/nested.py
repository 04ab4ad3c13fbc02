"""Sparse decode of nested codes: what each level of units adds, with as many gathers as one sparse decode."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxd.ops import reference
from mxd.ops.devices import runs_sparse
from mxd.ops.sparse import _SUM, Selection, starts_of, sum_by_unit


def nested_decode(
    values: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    levels: Int[Tensor, "tokens k"],
    weight: Float[Tensor, "units d_out"],
    count: int,
    selection: Selection | None = None,
) -> Float[Tensor, "tokens {count} d_out"]:
    """Return ``sum_k [levels[:, k] = l] values[:, k] weight[indices[:, k]]`` for each level l.

    Args:
        values: activations of the units that each token uses.
        indices: the numbers of these units.
        levels: the level of each entry, ``0 ... count - 1``.
        weight: one row per unit.
        count: number of levels.
        selection: the one given to the ``topk_linear`` that chose these indices; by default they are sorted again.
    """
    if not runs_sparse(values):
        return reference.nested_decode(values, indices, levels, weight, count)
    return _NestedDecode.apply(values, indices, levels, weight, count, selection or Selection())


class _NestedDecode(torch.autograd.Function):
    """Each pair of a token and a level is a bag of rows; the bags of a token lie side by side."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, indices: Tensor, levels: Tensor, weight: Tensor, count: int, selection: Selection
    ) -> Tensor:
        tokens = len(values)
        bags = levels + torch.arange(tokens, device=levels.device).unsqueeze(1) * count
        ctx.save_for_backward(values, indices, bags, weight)
        ctx.selection = selection
        if indices.numel() == 0:
            return weight.new_zeros(tokens, count, weight.shape[1])
        order = levels.argsort(dim=1)
        entries, weights, sorted_bags = (part.gather(1, order).reshape(-1) for part in (indices, values, bags))
        starts = starts_of(sorted_bags, tokens * count)
        sums = F.embedding_bag(
            entries, weight, starts, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        return sums.view(tokens, count, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, indices, bags, weight = ctx.saved_tensors
        if indices.numel() == 0:
            return torch.zeros_like(values), None, None, torch.zeros_like(weight), None, None
        rows = grad.reshape(-1, grad.shape[-1])
        plan = ctx.selection.by_unit(indices, len(weight))
        sources = bags.reshape(-1)[plan.order]  # as in _gather_dot, with bags in place of tokens
        dots = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            weight, rows, sources, plan.starts, indices.reshape(-1)[plan.order], _SUM
        )
        grad_values = torch.empty_like(dots).index_copy_(0, plan.order, dots).view(values.shape)
        grad_weight = sum_by_unit(values, rows, sources, plan)
        return grad_values, None, None, grad_weight, None, None

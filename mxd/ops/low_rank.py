"""Sparse mixtures of low-rank linear maps: ``y_t = sum_n a_tn (x_t V_n^T) U_n``, over the units that token t uses.

The units' rows lie one below the other: ``V_n = down[firsts[n] : firsts[n + 1]]``, and so ``U_n`` in ``up``. A unit of
rank r with T_n tokens costs two products, ``[T_n, d] [d, r]`` and ``[T_n, r] [r, o]``; nothing is ``[tokens, rows]``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxd.ops import reference
from mxd.ops.devices import runs_sparse
from mxd.ops.shares import in_shares
from mxd.ops.sparse import Selection, linear_at, sparse_decode

GATHER = 40
"""Ranks whose products take about as long as gathering and adding a token's rows: a rough figure, to deal out units."""


def low_rank_mixture(
    x: Float[Tensor, "tokens d_in"],
    values: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    down: Float[Tensor, "rows d_in"],
    up: Float[Tensor, "rows d_out"],
    firsts: Sequence[int],
    selection: Selection | None = None,
) -> Float[Tensor, "tokens d_out"]:
    """Return ``sum_k values[:, k] (x V_n^T) U_n`` with ``n = indices[:, k]``; no unit is listed twice for a token.

    Units of rank 1 are gathered, row by row; of units of larger ranks each is two products over its tokens. All
    ``x_t V_n^T`` are kept for the backward pass: as many numbers as the ranks of all the tokens' units sum up to.

    Args:
        x: inputs.
        values: activations of the units that each token uses.
        indices: the numbers of these units.
        down: the rows of all V.
        up: the rows of all U.
        firsts: where each unit's rows begin, followed by the number of rows.
        selection: the one given to the ``topk_linear`` that chose these indices; by default they are sorted again.
    """
    if not runs_sparse(x):
        return reference.low_rank_mixture(x, values, indices, down, up, firsts)
    selection = selection or Selection()
    if len(firsts) - 1 == len(down):
        return sparse_decode(values * linear_at(x, indices, down, selection), indices, up, selection)
    return _LowRankMixture.apply(x, values, indices, down, up, firsts, selection)


class _LowRankMixture(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        indices: Tensor,
        down: Tensor,
        up: Tensor,
        firsts: Sequence[int],
        selection: Selection,
    ) -> Tensor:
        groups = list(selection.groups(indices, len(firsts) - 1))
        ctx.firsts, ctx.groups = firsts, groups
        kept: list[Any] = [None] * len(groups)
        flat = values.reshape(-1, 1)

        def work(share: Sequence[int]) -> Tensor:
            out, gathered, scaled, made = x.new_zeros(len(x), up.shape[1]), _scratch(x), _scratch(x), _scratch(x)
            for number in share:
                unit, places, tokens = groups[number]
                own = slice(firsts[unit], firsts[unit + 1])
                rows = torch.index_select(x, 0, tokens, out=gathered(len(tokens), x.shape[1]))
                hidden = kept[number] = rows @ down[own].T
                state = torch.mul(hidden, flat.index_select(0, places), out=scaled(*hidden.shape))
                out.index_add_(0, tokens, torch.mm(state, up[own], out=made(len(tokens), up.shape[1])))
            return out

        outputs = in_shares(work, _costs(groups, firsts), x.device)
        ctx.save_for_backward(x, values, down, up, *kept)
        return _total(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values, down, up, *kept = ctx.saved_tensors
        grad, flat = grad.contiguous(), values.reshape(-1, 1)
        grad_values, grad_down, grad_up = torch.zeros_like(flat), torch.empty_like(down), torch.empty_like(up)
        groups, firsts, needs_x = ctx.groups, ctx.firsts, ctx.needs_input_grad[0]
        for unit in set(range(len(firsts) - 1)).difference(unit for unit, _, _ in groups):  # no token used it
            for table in (grad_down, grad_up):
                table[firsts[unit] : firsts[unit + 1]] = 0

        def work(share: Sequence[int]) -> Tensor:
            grad_x = x.new_zeros(x.shape if needs_x else 0)
            gathered, gathered_grad, scaled, returned = (_scratch(x) for _ in range(4))
            for number in share:
                unit, places, tokens = groups[number]
                own, hidden = slice(firsts[unit], firsts[unit + 1]), kept[number]
                rows = torch.index_select(x, 0, tokens, out=gathered(len(tokens), x.shape[1]))
                upstream = torch.index_select(grad, 0, tokens, out=gathered_grad(len(tokens), grad.shape[1]))
                activation = flat.index_select(0, places)
                state = scaled(*hidden.shape)
                # the gradient of the hidden state, per unit of activation
                back = torch.mm(upstream, up[own].T, out=returned(*hidden.shape))
                grad_values.index_copy_(0, places, torch.mul(back, hidden, out=state).sum(1, keepdim=True))
                torch.mm(torch.mul(hidden, activation, out=state).T, upstream, out=grad_up[own])
                torch.mm(back.mul_(activation).T, rows, out=grad_down[own])
                if needs_x:
                    grad_x.index_add_(0, tokens, back @ down[own])
            return grad_x

        gradients = in_shares(work, _costs(groups, firsts), x.device)
        grad_x = _total(gradients) if needs_x else None
        return grad_x, grad_values.view_as(values), None, grad_down, grad_up, None, None


def _scratch(like: Tensor) -> Callable[[int, int], Tensor]:
    """Return a maker of matrices, which gives the same memory each time, so that it stays in the processor's cache."""
    memory = like.new_empty(0)

    def matrix(rows: int, columns: int) -> Tensor:
        nonlocal memory
        if len(memory) < rows * columns:
            memory = like.new_empty(rows * columns)
        return memory[: rows * columns].view(rows, columns)

    return matrix


def _costs(groups: Sequence[tuple[int, Tensor, Tensor]], firsts: Sequence[int]) -> list[int]:
    """Return about what each unit takes: its tokens times its rank and what gathering a row costs beside it."""
    return [len(tokens) * (firsts[unit + 1] - firsts[unit] + GATHER) for unit, _, tokens in groups]


def _total(parts: list[Tensor]) -> Tensor:
    """Add up what the shares made, in place."""
    total, *others = parts
    for part in others:
        total += part
    return total

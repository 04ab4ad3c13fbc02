"""Dense reference of the sparse operations: slow, obvious, differentiated by autograd. Used as the tests' oracle."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def topk_linear(
    x: Float[Tensor, "tokens d_in"],
    weight: Float[Tensor, "units d_in"],
    bias: Float[Tensor, " units"],
    k: int,
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """Return the ``k`` largest of ``relu(x weight^T + bias)`` of each row, with their indices (MxD, section 2.4).

    Args:
        x: inputs.
        weight: one row per unit.
        bias: one number per unit.
        k: how many units to keep.
    """
    dense = torch.relu(x @ weight.T + bias)
    values, indices = dense.topk(k, dim=-1)
    return values, indices


def linear_at(
    x: Float[Tensor, "tokens d_in"], indices: Int[Tensor, "tokens k"], weight: Float[Tensor, "units d_in"]
) -> Float[Tensor, "tokens k"]:
    """Return the entries of ``x weight^T`` at ``indices``.

    Args:
        x: inputs.
        indices: the numbers of the units of each token.
        weight: one row per unit.
    """
    return (x @ weight.T).gather(1, indices)


def sparse_decode(
    values: Float[Tensor, "tokens k"], indices: Int[Tensor, "tokens k"], weight: Float[Tensor, "units d_out"]
) -> Float[Tensor, "tokens d_out"]:
    """Return ``a @ weight`` for the dense code ``a`` that holds ``values`` at ``indices`` (MxD, equation 5).

    Args:
        values: activations of the listed units.
        indices: the numbers of these units.
        weight: one row per unit.
    """
    dense = values.new_zeros(len(values), len(weight)).scatter_add(1, indices, values)
    return dense @ weight


def low_rank_mixture(
    x: Float[Tensor, "tokens d_in"],
    values: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    down: Float[Tensor, "rows d_in"],
    up: Float[Tensor, "rows d_out"],
    firsts: Sequence[int],
) -> Float[Tensor, "tokens d_out"]:
    """Return ``sum_n a_n (x V_n^T) U_n`` for the dense code ``a`` that holds ``values`` at ``indices``.

    Args:
        x: inputs.
        values: activations of the listed units.
        indices: the numbers of these units.
        down: the rows of all V.
        up: the rows of all U.
        firsts: where each unit's rows begin, followed by the number of rows.
    """
    ranks = torch.tensor(firsts, device=x.device).diff()
    owner = torch.arange(len(ranks), device=x.device).repeat_interleave(ranks, output_size=len(down))
    dense = values.new_zeros(len(values), len(ranks)).scatter_add(1, indices, values)
    return (dense[:, owner] * (x @ down.T)) @ up


def nested_decode(
    values: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    levels: Int[Tensor, "tokens k"],
    weight: Float[Tensor, "units d_out"],
    count: int,
) -> Float[Tensor, "tokens {count} d_out"]:
    """Return ``sparse_decode`` of the entries of each level.

    Args:
        values: activations of the listed units.
        indices: the numbers of these units.
        levels: the level of each entry.
        weight: one row per unit.
        count: number of levels.
    """
    parts = [sparse_decode(values * (levels == level), indices, weight) for level in range(count)]
    return torch.stack(parts, 1)

"""The rank of units' weights (MxD, arXiv 2505.21364, app. B.4)."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mxd.layers import ReplacementLayer

RANK_NUMBERS = 2**23
"""Numbers in one batch of weights whose ranks are computed together."""


@torch.no_grad()
def weight_ranks(
    layer: ReplacementLayer, units: Sequence[int], advance: Any = None
) -> tuple[Float[Tensor, " units"], Float[Tensor, " units"]]:
    """Return the normalized rank and the stable rank of units' weights.

    The normalized rank is ``rank(W_n) / min(H, O)`` (equation 23), where a rank counts the singular values above
    ``max(H, O) eps`` times the largest: it is 1 also where nearly all energy lies in one direction. The stable rank,
    ``||W_n||_F^2 / ||W_n||_2^2``, says how many directions carry the energy; at most the rank, 0 for a weight of zeros.
    A feature's weight is a single row, so both are 1, or 0 if the row is zero.

    Args:
        layer: any replacement layer; the weights are materialised in batches.
        units: which units.
        advance: told of each batch of units that is done.
    """
    rows, columns = layer.unit_weight(0).shape
    chunk = max(1, RANK_NUMBERS // (rows * columns))
    parts = [torch.zeros(2, 0)]
    for start in range(0, len(units), chunk):
        batch = units[start : start + chunk]
        singular = torch.linalg.svdvals(torch.stack([layer.unit_weight(n).float() for n in batch]))
        largest = singular[:, :1]
        ranks = (singular > max(rows, columns) * torch.finfo(singular.dtype).eps * largest).sum(-1)
        stable = (singular / largest.clamp_min(1e-30)).square().sum(-1)
        parts.append(torch.stack([ranks / min(rows, columns), stable]).cpu())
        if advance is not None:
            advance(len(batch))
    normalized, stable = torch.cat(parts, 1)
    return normalized, stable

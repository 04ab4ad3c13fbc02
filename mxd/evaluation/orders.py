"""In which order the blocks of a set are replaced, and how many of them at a time."""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

Order = Literal["bottom", "top", "random"]
"""From the first block up, from the last block down, or as drawn."""
ORDERS: tuple[Order, ...] = get_args(Order)


def numbers_replaced(blocks: int) -> list[int]:
    """Return how many blocks are replaced at a time: 1, 2, 4 ... and all."""
    return [*(1 << power for power in range((blocks - 1).bit_length())), blocks]


def orders(blocks: Sequence[int], draws: int, seed: int) -> dict[Order, list[list[int]]]:
    """Return orders of some blocks; there is one from the bottom, one from the top, and ``draws`` random ones.

    Args:
        blocks: the blocks.
        draws: how many random orders are drawn.
        seed: draws them.
    """
    up, rng = sorted(blocks), np.random.default_rng(seed)
    return {"bottom": [up], "top": [up[::-1]], "random": [rng.permutation(up).tolist() for _ in range(draws)]}

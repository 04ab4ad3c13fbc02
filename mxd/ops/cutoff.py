"""The k-th largest of very many numbers, which may be spread over processes."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def kth_largest(
    lists: Sequence[Float[Tensor, "..."]], k: int, total: Callable[[Tensor], Tensor] = lambda count: count
) -> Float[Tensor, ""]:
    """Return the ``k``-th largest of all numbers in some lists, none of them negative; 0 where fewer are positive.

    By bisection: bits of non-negative floats, read as integers, are ordered as the numbers are. It is exact, nothing is
    sorted, and processes exchange one count for each bit.

    Args:
        lists: tensors of one dtype, on one device.
        k: rank, counted from 1.
        total: sums a count over the processes that hold parts of the numbers, in place or not.
    """
    dtype = lists[0].dtype
    bits = [numbers.contiguous().view(_INTEGERS[dtype.itemsize]) for numbers in lists]
    low = bits[0].new_zeros((), dtype=torch.int64)  # at least k numbers are no smaller than this
    for bit in reversed(range(8 * dtype.itemsize - 1)):
        middle = low + (1 << bit)
        count = torch.stack([(part >= middle).sum() for part in bits]).sum()
        low = torch.where(total(count) >= k, middle, low)
    return low.to(bits[0].dtype).view(dtype)

"""Triton kernels of the sparse operations, for CUDA. The only file that imports triton; imported where they run.

Three sum rows that are scaled and scattered in memory, and never form a dense code. A program reads tiles of ``[rows,
columns]`` numbers, whose loads are independent of one another, adds them up in float32 (in float64 for float64 rows)
and sums over the tile once, at its end. Two others prepare and search pre-activations, a program for each row. No
atomics: the same inputs give the same bits.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

TILE = 2048
"""The largest number of elements in a tile: 16 for each thread of a program."""


def gather_sum(
    values: Float[Tensor, "tokens k"], indices: Int[Tensor, "tokens k"], weight: Float[Tensor, "units d"]
) -> Float[Tensor, "tokens d"]:
    """Return ``sum_k values[t, k] * weight[indices[t, k]]`` for every token t, in the dtype of ``weight``.

    Args:
        values: the factor of each row, of any floating-point dtype.
        indices: the rows that each token sums.
        weight: one row per unit.
    """
    (tokens, k), d = indices.shape, weight.shape[1]
    if 0 in (tokens, k, d):
        return weight.new_zeros(tokens, d)
    out = weight.new_empty(tokens, d)
    rows, columns = _tile(k, 8, d)
    with torch.cuda.device_of(weight):
        _gather_sum[(tokens, _blocks(d, columns))](
            out, values.contiguous(), indices.contiguous(), weight.contiguous(), k, d, rows, columns, _sum_type(weight)
        )
    return out


def gather_dot(
    grad: Float[Tensor, "tokens d"], indices: Int[Tensor, "tokens k"], weight: Float[Tensor, "units d"]
) -> Float[Tensor, "tokens k"]:
    """Return ``grad[t] . weight[indices[t, k]]`` for every token t and slot k, in the dtype of ``weight``.

    Args:
        grad: one row per token, for example the gradient of a decoded output.
        indices: the units of each token.
        weight: one row per unit.
    """
    (tokens, k), d = indices.shape, weight.shape[1]
    if 0 in (tokens, k, d):
        return weight.new_zeros(tokens, k)
    out = weight.new_empty(tokens, k)
    rows, columns = _tile(k, 32, d)
    with torch.cuda.device_of(weight):
        _gather_dot[(tokens, _blocks(k, rows))](
            out, grad.contiguous(), indices.contiguous(), weight.contiguous(), k, d, rows, columns, _sum_type(weight)
        )
    return out


def sum_lists(
    values: Float[Tensor, "tokens k"],
    rows: Float[Tensor, "rows d"],
    order: Int[Tensor, " entries"],
    starts: Int[Tensor, " lists_and_one"],
    tokens: Int[Tensor, " entries"],
) -> Float[Tensor, "lists d"]:
    """Return the sum of ``values.flatten()[order[i]] * rows[tokens[i]]`` over each list's entries i.

    In the dtype of ``rows``; lists without entries give zeros.

    Args:
        values: a code's values.
        rows: what is summed.
        order: positions in the flat ``values``, list after list.
        starts: where each list's entries in ``order`` begin, followed by the length of ``order``.
        tokens: the row of each position.
    """
    lists, d = len(starts) - 1, rows.shape[1]
    if 0 in (len(order), lists, d):
        return rows.new_zeros(lists, d)
    out = rows.new_empty(lists, d)
    count, columns = _tile(len(order), 16, d)
    with torch.cuda.device_of(rows):
        _sum_lists[(lists, _blocks(d, columns))](
            out,
            values.contiguous(),
            rows.contiguous(),
            order.contiguous(),
            starts.contiguous(),
            tokens.contiguous(),
            d,
            count,
            columns,
            _sum_type(rows),
        )
    return out


def largest(
    numbers: Float[Tensor, "tokens columns"], k: int
) -> tuple[Float[Tensor, "tokens {k}"], Int[Tensor, "tokens {k}"]]:
    """Return the ``k`` largest of each row and their columns, in ascending order of columns; NaN is above all.

    Of numbers that equal the smallest of these, those of the first columns are taken.

    Args:
        numbers: of 16 or 32 bits; each row lies together, rows need not.
        k: how many of each row.
    """
    tokens, width = numbers.shape
    values, columns = numbers.new_empty(tokens, k), torch.empty(tokens, k, dtype=torch.int64, device=numbers.device)
    if tokens:
        bits = numbers.view(torch.int16 if numbers.element_size() == 2 else torch.int32)
        special = torch.tensor(torch.inf, dtype=numbers.dtype).view(bits.dtype).item()
        with torch.cuda.device_of(numbers):
            _largest[(tokens,)](
                values.view(bits.dtype), columns, bits, numbers.stride(0), width, k,
                8 * numbers.element_size(), special, min(triton.next_power_of_2(width), TILE),
            )  # fmt: skip
    return values, columns


def lowered(
    rows: Float[Tensor, "rows d"], width: int
) -> tuple[Float[Tensor, "rows {width}"], Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Return rows in bfloat16, with zeros up to ``width``; their norms, and their errors' norms.

    Args:
        rows: in float32 or float64.
        width: at least theirs.
    """
    count, d = rows.shape
    low = torch.empty(count, width, dtype=torch.bfloat16, device=rows.device)
    norms, errors = rows.new_empty(count), rows.new_empty(count)
    if count:
        with torch.cuda.device_of(rows):
            _lowered[(count,)](
                low,
                norms,
                errors,
                rows.contiguous(),
                d,
                width,
                min(triton.next_power_of_2(width), TILE),
                _sum_type(rows),
            )
    return low, norms, errors


def _tile(rows: int, most_rows: int, columns: int) -> tuple[int, int]:
    """Return a tile's rows and columns, powers of two with a product of at most ``TILE``."""
    rows = min(triton.next_power_of_2(rows), most_rows)
    return rows, min(triton.next_power_of_2(columns), TILE // most_rows)


def _blocks(size: int, block: int) -> int:
    """Return the number of thread blocks that cover ``size``."""
    return -(-size // block)


def _sum_type(tensor: Tensor) -> Any:
    return tl.float64 if tensor.dtype is torch.float64 else tl.float32


# Kernels are compiled from their source and must not be wrapped: no_type_check keeps jaxtyping's import hook away.
# K is an argument of a run, the same for each compiled kernel: random-K draws another one at every step.


@triton.jit(do_not_specialize=["K"])
@no_type_check
def _gather_sum(
    out,
    values,
    indices,
    weight,
    K,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full((ROWS, COLUMNS), 0, SUM)
    first = 0
    while first < K:  # not a range, as below
        slot = first + tl.arange(0, ROWS)
        value = tl.load(values + token * K + slot, mask=slot < K, other=0).to(SUM)
        unit = tl.load(indices + token * K + slot, mask=slot < K, other=0)
        inside = (slot < K)[:, None] & (column < D)[None, :]
        row = tl.load(weight + unit[:, None] * D + column[None, :], mask=inside, other=0).to(SUM)
        total += value[:, None] * row
        first += ROWS
    tl.store(out + token * D + column, tl.sum(total, 0), mask=column < D)


@triton.jit(do_not_specialize=["K"])
@no_type_check
def _gather_dot(
    out,
    grad,
    indices,
    weight,
    K,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    unit = tl.load(indices + token * K + slot, mask=slot < K, other=0)
    total = tl.full((ROWS, COLUMNS), 0, SUM)
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        upstream = tl.load(grad + token * D + column, mask=column < D, other=0).to(SUM)
        inside = (slot < K)[:, None] & (column < D)[None, :]
        row = tl.load(weight + unit[:, None] * D + column[None, :], mask=inside, other=0).to(SUM)
        total += upstream[None, :] * row
    tl.store(out + token * K + slot, tl.sum(total, 1), mask=slot < K)


# One program sums a list, tile after tile. ``mxd.ops.sparse`` keeps lists short: of a unit that is on in every token it
# asks for spans first, and then for the sum of these.
@triton.jit
@no_type_check
def _sum_lists(
    out,
    values,
    rows,
    order,
    starts,
    tokens,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full((ROWS, COLUMNS), 0, SUM)
    first = tl.load(starts + own)
    end = tl.load(starts + own + 1)
    while first < end:  # not a range: under NumPy 2.4, Triton 3.6's interpreter cannot read bounds that were loaded
        entry = first + tl.arange(0, ROWS)
        position = tl.load(order + entry, mask=entry < end, other=0)
        token = tl.load(tokens + entry, mask=entry < end, other=0)
        value = tl.load(values + position, mask=entry < end, other=0).to(SUM)
        inside = (entry < end)[:, None] & (column < D)[None, :]
        row = tl.load(rows + token[:, None] * D + column[None, :], mask=inside, other=0).to(SUM)
        total += value[:, None] * row
        first += ROWS
    tl.store(out + own * D + column, tl.sum(total, 0), mask=column < D)


# The K-th largest is found bit by bit, as the largest threshold that K numbers reach; a row stays in the cache of its
# processor while it is read once for each bit. Numbers are compared as integers in the same order.
@triton.jit
@no_type_check
def _keys(bits, offset, inside, BITS: tl.constexpr, SPECIAL: tl.constexpr):
    MOST: tl.constexpr = (1 << (BITS - 1)) - 1
    number = tl.load(bits + offset, mask=inside, other=0).to(tl.int32)
    size = number & MOST
    key = tl.where(number < 0, -size - 1, size)
    key = tl.where(size > SPECIAL, MOST, key)  # NaN
    return tl.where(inside, key, -MOST - 1)


@triton.jit
@no_type_check
def _reached(bits, row, width, threshold, BITS: tl.constexpr, SPECIAL: tl.constexpr, COLUMNS: tl.constexpr):
    total = tl.full((COLUMNS,), 0, tl.int32)
    first = 0
    while first < width:
        column = first + tl.arange(0, COLUMNS)
        total += (_keys(bits, row + column, column < width, BITS, SPECIAL) >= threshold).to(tl.int32)
        first += COLUMNS
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["K"])
@no_type_check
def _largest(
    out,
    columns,
    bits,
    stride,
    width,
    K,
    BITS: tl.constexpr,
    SPECIAL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    row = own * stride
    above = _reached(bits, row, width, 0, BITS, SPECIAL, COLUMNS)
    threshold = tl.where(above >= K, 0, -(1 << (BITS - 2)) * 2).to(tl.int32)
    above = tl.where(above >= K, 0, above)  # how many are larger than the threshold will be
    step = 1 << (BITS - 2)
    while step > 0:
        count = _reached(bits, row, width, threshold + step, BITS, SPECIAL, COLUMNS)
        threshold = tl.where(count >= K, threshold + step, threshold)
        above = tl.where(count >= K, above, count)
        step = step // 2
    placed = 0
    first = 0
    while first < width:
        column = first + tl.arange(0, COLUMNS)
        inside = column < width
        key = _keys(bits, row + column, inside, BITS, SPECIAL)
        equal = (key == threshold).to(tl.int32)
        above += tl.sum(equal, 0)
        kept = equal * ((above - tl.sum(equal, 0) + tl.cumsum(equal, 0)) <= K).to(tl.int32)
        taken = (key > threshold).to(tl.int32) + kept
        place = own * K + placed + tl.cumsum(taken, 0) - 1
        tl.store(out + place, tl.load(bits + row + column, mask=inside, other=0), mask=taken > 0)
        tl.store(columns + place, column.to(tl.int64), mask=taken > 0)
        placed += tl.sum(taken, 0)
        first += COLUMNS


@triton.jit
@no_type_check
def _lowered(
    low,
    norms,
    errors,
    rows,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUM: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    square = tl.full((COLUMNS,), 0, SUM)
    lost = tl.full((COLUMNS,), 0, SUM)
    first = 0
    while first < WIDTH:
        column = first + tl.arange(0, COLUMNS)
        number = tl.load(rows + own * D + column, mask=column < D, other=0)
        rounded = number.to(tl.float32).to(tl.bfloat16)
        tl.store(low + own * WIDTH + column, rounded, mask=column < WIDTH)
        error = number - rounded.to(SUM)
        square += number * number
        lost += error * error
        first += COLUMNS
    tl.store(norms + own, tl.sqrt(tl.sum(square, 0)))
    tl.store(errors + own, tl.sqrt(tl.sum(lost, 0)))

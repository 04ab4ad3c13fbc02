"""Top-k linear map and sparse decode with sparse backward passes.

Units are rows everywhere (``weight[n]`` belongs to unit ``n``), so that a gather of K units reads K contiguous rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxd.common.hardware import exact_products
from mxd.ops import reference
from mxd.ops.devices import CandidateDtype, device_type, runs_sparse, runs_triton

TILES = {"cpu": (2048, 2**28), "cuda": (8192, 2**33)}
"""Tokens and bytes of a tile of pre-activations; on a CPU a tile stays in cache until its top-k is taken."""

GROUP = 4
"""Units in a group of the two-stage top-k."""

SPREAD, NARROW = 2.5, 180
"""How many candidates there are: see ``candidate_count``."""

WORTH = (20, 12_000)
"""Candidates pay where there are ``a + b / d`` units for each, with these two numbers and the width d: a candidate
costs a dot product and a place in the searches, a unit a product of its row; see `scripts/measure_candidates.py`."""

PART = 512
"""Rows rounded to bfloat16 at a time on a CPU, to stay in cache."""

SPAN = 64
"""Entries of a list that a GPU sums one after the other; longer lists are summed in parts, side by side."""

BOUNDS = 8
"""Columns for the bias, for the three parts of a bound, and to keep rows aligned for tensor cores."""

LOST = 2.0**-61
"""Times the square root of a row's width: a bound on what its norm can lose to underflow of squares in float32."""

_SUM = 0  # embedding_bag's code for mode="sum"

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def candidate_count(k: int, units: int, d: int) -> int:
    """Return how many candidates prove the choice of 99% of rows of random numbers, and of nearly all in most cases.

    Enough for those that rounding may lift above the k-th largest. In units of the pre-activations' standard deviation
    the bound on rounding is a constant times ``sqrt(d)``; near the k-th largest, at ``t = sqrt(2 ln(units / k))`` or
    so, a shift by s changes how many lie above by a factor of ``exp(s t)``. ``SPREAD`` allows for chance, in units of
    ``sqrt(k)``. Both constants are read off `scripts/measure_candidates.py`.

    Args:
        k: how many units are chosen.
        units: of how many.
        d: width of the inputs.
    """
    lifted = math.exp(math.sqrt(d * math.log(max(units / k, 1))) / NARROW)
    return min(math.ceil((k + SPREAD * math.sqrt(k)) * lifted), units)


def candidates_pay(k: int, units: int, d: int) -> bool:
    """Return whether there are enough units for bfloat16 candidates to pay; if not, they are never used.

    Args:
        k: how many units are chosen.
        units: of how many.
        d: width of the inputs.
    """
    return candidate_count(k, units, d) * (WORTH[0] + WORTH[1] / max(d, 1)) <= units


@dataclass(frozen=True)
class ByUnit:
    """A selection sorted by unit: the transposed code, row by row."""

    order: Int[Tensor, " chosen"]
    """Positions in the flat indices, sorted by unit."""
    starts: Int[Tensor, " units_and_one"]
    """Where each unit's entries in ``order`` begin, followed by the length of ``order``."""
    tokens: Int[Tensor, " chosen"]
    """The token of each position in ``order``."""

    @cached_property
    def sizes(self) -> list[int]:
        """How many entries each unit has; as many for each as on average where numbers are not known (meta)."""
        if self.starts.is_meta:
            total, units = len(self.order), len(self.starts) - 1
            return [total * (n + 1) // units - total * n // units for n in range(units)]
        return self.starts.diff().tolist()

    @cached_property
    def spans(self) -> tuple[Int[Tensor, " spans_and_one"], Int[Tensor, " units_and_one"]]:
        """The lists cut at every multiple of ``SPAN``: where the spans begin, and the first span of each unit.

        A unit with m cuts has m + 1 spans, some of them empty, so their number is known without asking the device.
        """
        cuts = torch.arange(0, len(self.order), SPAN, device=self.starts.device)
        begins = torch.cat([self.starts, cuts]).sort().values
        before = torch.div(self.starts + (SPAN - 1), SPAN, rounding_mode="floor")  # cuts before each unit's first entry
        return begins, torch.arange(len(self.starts), device=self.starts.device) + before


class Selection:
    """The units that one call of ``topk_linear`` chose, which the backward passes need sorted by unit.

    Pass the same object to ``topk_linear`` and to the ``sparse_decode`` of its indices, and they are sorted only once.
    """

    def __init__(self) -> None:
        self._sorted: ByUnit | None = None

    def by_unit(self, indices: Int[Tensor, "tokens k"], units: int) -> ByUnit:
        """Return the indices sorted by unit; the first call sorts, later ones return its result."""
        if self._sorted is None or (len(self._sorted.order), len(self._sorted.starts)) != (indices.numel(), units + 1):
            # Compressed rows of the transposed code: a stable sort keeps each unit's tokens in ascending order.
            in_order, order = indices.reshape(-1).to(torch.int32).sort(stable=True)
            starts = starts_of(in_order, units)
            tokens = torch.div(order, max(indices.shape[1], 1), rounding_mode="floor")
            self._sorted = ByUnit(order, starts, tokens)
        return self._sorted

    def groups(
        self, indices: Int[Tensor, "tokens k"], units: int
    ) -> Iterator[tuple[int, Int[Tensor, " chosen"], Int[Tensor, " chosen"]]]:
        """Yield each unit that some token uses, the places of its entries in the flat indices, and their tokens."""
        plan, start = self.by_unit(indices, units), 0
        for unit, size in enumerate(plan.sizes):
            if size:
                yield unit, plan.order[start : start + size], plan.tokens[start : start + size]
            start += size


def starts_of(numbers: Int[Tensor, " entries"], count: int) -> Int[Tensor, " count_and_one"]:
    """Return where each of the numbers 0 ... ``count - 1`` begins in a sorted list of them, and the list's length."""
    if device_type(numbers) == "cpu":
        starts = torch.zeros(count + 1, dtype=torch.int64, device=numbers.device)
        torch.cumsum(torch.bincount(numbers, minlength=count), 0, out=starts[1:])
        return starts
    # Slower on a CPU, but a count would make the host wait for the largest number.
    return torch.searchsorted(numbers, torch.arange(count + 1, dtype=numbers.dtype, device=numbers.device))


def topk_linear(
    x: Float[Tensor, "tokens d_in"],
    weight: Float[Tensor, "units d_in"],
    bias: Float[Tensor, " units"],
    k: int,
    candidates: CandidateDtype = "float32",
    selection: Selection | None = None,
) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
    """Return the ``k`` largest of ``relu(x weight^T + bias)`` of each row, with their indices, in no fixed order.

    Only a tile of pre-activations exists at any time, and the backward pass touches the chosen units alone.

    Args:
        x: inputs.
        weight: one row per unit.
        bias: one number per unit.
        k: how many units to keep, ``1 <= k <= units``.
        candidates: ``float32`` computes all pre-activations in ``x``'s dtype. ``bfloat16`` computes them all in
            bfloat16, where that pays, and the largest of them (``candidate_count``) again in ``x``'s dtype, of which
            the ``k`` largest are returned; rows where some other unit might be larger are searched again in full. So
            values and units are those of float32 (or float64) up to the rounding of its sums, also where TF32 is
            allowed: ``_from_candidates`` says what is proven, and what is assumed of the device. A 16-bit ``x`` needs
            no candidates and has none.
        selection: a new one, to be passed on to the ``sparse_decode`` of what is returned.
    """
    if not runs_sparse(x):
        return reference.topk_linear(x, weight, bias, k)
    return _TopKLinear.apply(x, weight, bias, k, candidates, selection or Selection())


def linear_at(
    x: Float[Tensor, "tokens d_in"],
    indices: Int[Tensor, "tokens k"],
    weight: Float[Tensor, "units d_in"],
    selection: Selection | None = None,
) -> Float[Tensor, "tokens k"]:
    """Return ``x[t] . weight[indices[t, k]]`` for every token t and slot k: some entries of ``x weight^T``.

    Args:
        x: inputs.
        indices: the numbers of the units of each token.
        weight: one row per unit.
        selection: one shared with the ``sparse_decode`` of the same indices; by default they are sorted again.
    """
    if not runs_sparse(x):
        return reference.linear_at(x, indices, weight)
    return _LinearAt.apply(x, indices, weight, selection or Selection())


def sparse_decode(
    values: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    weight: Float[Tensor, "units d_out"],
    selection: Selection | None = None,
) -> Float[Tensor, "tokens d_out"]:
    """Return ``sum_k values[:, k] * weight[indices[:, k]]``, that is ``a @ weight`` for the sparse code ``a``.

    Args:
        values: activations of the units that each token uses.
        indices: the numbers of these units.
        weight: one row per unit.
        selection: the one given to the ``topk_linear`` that chose these indices; by default they are sorted again.
    """
    if not runs_sparse(values):
        return reference.sparse_decode(values, indices, weight)
    return _SparseDecode.apply(values, indices, weight, selection or Selection())


def _gather_sum(
    values: Float[Tensor, "tokens k"], indices: Int[Tensor, "tokens k"], weight: Float[Tensor, "units d"]
) -> Float[Tensor, "tokens d"]:
    """Sum ``values[:, k] * weight[indices[:, k]]`` over k."""
    if runs_triton(weight):
        from mxd.ops import kernels

        return kernels.gather_sum(values, indices, weight)
    if indices.numel() == 0:
        return weight.new_zeros(len(indices), weight.shape[1])
    return F.embedding_bag(indices, weight, per_sample_weights=values, mode="sum")


def _gather_dot(
    grad: Float[Tensor, "tokens d"],
    indices: Int[Tensor, "tokens k"],
    weight: Float[Tensor, "units d"],
    selection: Selection | None = None,
) -> Float[Tensor, "tokens k"]:
    """Return ``grad[t] . weight[indices[t, k]]`` for every token t and slot k: the gradient of the values.

    Unit by unit, so that each row of the large weight is read once and those of ``grad`` stay in cache; but on a GPU
    token by token where nothing else needs the indices sorted.
    """
    if runs_triton(weight):
        from mxd.ops import kernels

        return kernels.gather_dot(grad, indices, weight)
    if indices.numel() == 0:
        return weight.new_zeros(indices.shape)
    dots_of = torch.ops.aten._embedding_bag_per_sample_weights_backward
    if selection is None and device_type(weight) != "cpu":
        starts = torch.arange(0, indices.numel(), indices.shape[1], device=indices.device)
        tokens = torch.arange(len(indices), device=indices.device).unsqueeze(1).expand_as(indices).reshape(-1)
        return dots_of(grad.contiguous(), weight, indices.reshape(-1), starts, tokens, _SUM).view(indices.shape)
    plan = (selection or Selection()).by_unit(indices, len(weight))
    # With each unit as a bag of its tokens' rows, these dot products are the gradient of embedding_bag's per-sample
    # weights. They come out sorted by unit and go back to their slots.
    dots = dots_of(weight, grad.contiguous(), plan.tokens, plan.starts, indices.reshape(-1)[plan.order], _SUM)
    return torch.empty_like(dots).index_copy_(0, plan.order, dots).view(indices.shape)


def _scatter_rows(
    values: Float[Tensor, "tokens k"],
    indices: Int[Tensor, "tokens k"],
    rows: Float[Tensor, "tokens d"],
    units: int,
    selection: Selection,
) -> Float[Tensor, "{units} d"]:
    """Return ``a^T @ rows`` for the sparse code ``a``: each unit is a bag that sums the rows of its tokens."""
    plan = selection.by_unit(indices, units)
    return sum_by_unit(values, rows, plan.tokens, plan)


def sum_by_unit(
    values: Float[Tensor, "tokens k"], rows: Float[Tensor, "rows d"], sources: Int[Tensor, " chosen"], plan: ByUnit
) -> Float[Tensor, "units d"]:
    """Return each unit's sum of rows, times the values of its entries.

    A GPU sums a list's rows one after the other, and a unit that is on in every token would keep it waiting: it sums
    spans of the lists first, and then the spans of each unit. The same inputs give the same bits.

    Args:
        values: of each entry.
        rows: what is summed.
        sources: the row of each entry, in the order of ``plan``.
        plan: the entries sorted by unit.
    """
    if sources.numel() == 0:
        return rows.new_zeros(len(plan.starts) - 1, rows.shape[1])
    if device_type(rows) == "cpu":
        return _sum_lists(values, rows, plan.order, plan.starts, sources)
    begins, firsts = plan.spans
    parts = _sum_lists(values, rows, plan.order, begins, sources)
    each = torch.arange(len(parts), device=parts.device)
    return _sum_lists(parts.new_ones(len(parts), 1), parts, each, firsts, each)


def _sum_lists(
    values: Float[Tensor, "tokens k"],
    rows: Float[Tensor, "rows d"],
    order: Int[Tensor, " entries"],
    starts: Int[Tensor, " lists_and_one"],
    tokens: Int[Tensor, " entries"],
) -> Float[Tensor, "lists d"]:
    """Return the sum of ``values.flatten()[order[i]] * rows[tokens[i]]`` over each list's entries i."""
    if runs_triton(rows):
        from mxd.ops import kernels

        return kernels.sum_lists(values, rows, order, starts, tokens)
    weights = values.reshape(-1)[order].to(rows.dtype)
    return F.embedding_bag(tokens, rows, starts, mode="sum", per_sample_weights=weights, include_last_offset=True)


def _topk(
    pre: Float[Tensor, "tokens columns"], k: int
) -> tuple[Float[Tensor, "tokens {k}"], Int[Tensor, "tokens {k}"]]:
    """Return the ``k`` largest of each row and their columns, exactly.

    In two stages: find the ``k`` groups with the largest maxima (recursively), then the ``k`` largest among the members
    of these groups. None is missed: an element outside of them is at most its group's maximum, and ``k`` groups have
    maxima no smaller. Group ``j`` of ``m`` is columns ``j, j + m, j + 2 m ...``, so that maxima are taken between
    contiguous vectors. Where that would not pay, or groups would differ in size, the whole row is searched.
    """
    if runs_triton(pre) and pre.element_size() <= 4:
        from mxd.ops import kernels

        return kernels.largest(pre, k)
    groups = pre.shape[1] // GROUP
    if groups <= 2 * k or pre.shape[1] % GROUP:
        return _topk_of(pre, k)
    _, best_groups = _topk(pre.unflatten(1, (GROUP, groups)).amax(1), k)
    offsets = torch.arange(0, pre.shape[1], groups, device=pre.device).view(-1, 1)
    members = (best_groups.unsqueeze(1) + offsets).flatten(1)
    values, chosen = _topk_of(pre.gather(1, members), k)
    return values, members.gather(1, chosen)


def _topk_of(
    numbers: Float[Tensor, "tokens columns"], k: int
) -> tuple[Float[Tensor, "tokens {k}"], Int[Tensor, "tokens {k}"]]:
    """Return the ``k`` largest of each row and their columns; NaN is no smaller than infinity.

    On a CPU by integers in the same order (of a negative number all bits but the sign are inverted): each comparison of
    two floats asks whether they are NaN, a fifth of the time.
    """
    if device_type(numbers) != "cpu":
        return numbers.topk(k, sorted=False)
    bits = 8 * numbers.element_size() - 1
    keys = numbers.nan_to_num(torch.inf, torch.inf, -torch.inf).view(_INTEGERS[numbers.element_size()])
    chosen = (keys ^ ((keys >> bits) & (2**bits - 1))).topk(k, sorted=False).indices
    return numbers.gather(1, chosen), chosen


def _largest(
    x: Float[Tensor, "tokens d_in"], weight: Float[Tensor, "units d_in"], bias: Float[Tensor, " units"] | None, k: int
) -> tuple[Float[Tensor, "tokens {k}"], Int[Tensor, "tokens {k}"]]:
    """Return the ``k`` largest of ``x weight^T (+ bias)`` of each row, with their indices, tile by tile."""
    units = len(weight)
    rows, size = TILES[device_type(x)]
    # The fewest tiles of equal width whose size stays below the limit; widths are whole numbers of groups of groups,
    # so that _topk can group twice.
    tiles = -(-units * rows * x.element_size() // size)
    width = -(-units // (tiles * GROUP**2)) * GROUP**2
    buffer = x.new_empty(min(rows, len(x)), width)
    values, indices = x.new_empty(len(x), k), torch.empty(len(x), k, dtype=torch.int64, device=x.device)
    for start in range(0, len(x), rows):
        part = x[start : start + rows]
        best = []
        for first in range(0, units, width):
            tile = weight[first : first + width]
            pre = buffer[: len(part), : -(-len(tile) // GROUP**2) * GROUP**2]
            pre[:, len(tile) :] = -torch.inf  # padding of the last tile
            if bias is None:
                torch.mm(part, tile.T, out=pre[:, : len(tile)])
            else:
                torch.addmm(bias[first : first + width], part, tile.T, out=pre[:, : len(tile)])
            tops, columns = _topk(pre, min(k, len(tile)))
            # Padding is chosen only where fewer than so many units are above minus infinity.
            best.append((tops, columns.add_(first).clamp_(max=units - 1)))
        tops, chosen_units = (torch.cat(pieces, 1) for pieces in zip(*best, strict=True))
        if len(best) > 1:
            tops, chosen = _topk_of(tops, k)
            chosen_units = chosen_units.gather(1, chosen)
        values[start : start + rows], indices[start : start + rows] = tops, chosen_units
    return values, indices


def _from_candidates(
    x: Float[Tensor, "tokens d_in"], weight: Float[Tensor, "units d_in"], bias: Float[Tensor, " units"], k: int
) -> tuple[Float[Tensor, "tokens {k}"], Int[Tensor, "tokens {k}"]]:
    """As ``_largest``, from a bfloat16 product and a proof, row by row, that no other unit belongs among the ``k``.

    The proof holds for every row that is not searched again in full: no unit outside the candidates has a
    pre-activation, summed in ``x``'s dtype in any order, above the k-th value returned (or above zero, where that value
    is not positive: ReLU makes all of those equal). It needs ``exact_products`` around this call.

    Rounding x to x' and w to w' changes a pre-activation by at most ``|x - x'| |w'| + |x| |w - w'| + |b - b'|`` (Cauchy
    and Schwarz). These norms are measured, and four more columns of the product add b' and that bound, so candidates
    are the units with the largest *upper bounds*: a unit with a large norm, as training makes some, loosens no other's.
    Assumed of the device: its bfloat16 product of width n errs by at most ``2^-23 (n + 2)`` times the sum of its terms'
    sizes, here ``|x'| |w'| + |b'|`` and the bound, as sums of rounded or truncated float32 additions do, and is rounded
    or truncated to bfloat16 once, at the end. A float32 sum errs by half of that; the other half more than covers the
    rounding of the norms and of the bound. So where the smallest bound of a candidate is no larger than the k-th
    largest exact value, no unit is missed.

    Numbers below 2^-126 may be flushed to zero anywhere (bfloat16 instructions do so). A square lost in this way takes
    at most 2^-126 from a squared norm, and d of them at most 2^-63 sqrt(d) from the norm: each norm is increased by
    four times that, ``LOST sqrt(d)``. Products of two such increases, 2^-122 d, of which there are two, then cover what
    is flushed in products, sums and the bias, at most 4 d + 12 such numbers. So rows as small as that, or all rows if
    the weights are that small, are searched again in full. Nothing is proven of sums that overflow.
    """
    units, d = weight.shape
    if not candidates_pay(k, units, d):
        return _largest(x, weight, bias, k)
    (low_x, x_norms, x_errors), (low_weight, norms, errors) = _lowered(x), _lowered(weight)
    low_bias, sums = bias.to(torch.bfloat16), 2**-22 * (d + 2 + BOUNDS)
    bias_errors = (bias - low_bias).abs() + sums * bias.abs()
    up, one = 1 + 2**-7 + 2**-15, torch.ones_like(x_norms)  # more than rounding both factors to bfloat16 may take
    low_x[:, d : d + 4] = torch.stack([x_errors, x_norms, one, one], 1)
    low_weight[:, d : d + 4] = torch.stack([up * norms, up * (errors + sums * norms), up * bias_errors, low_bias], 1)
    tops, candidates = _largest(low_x, low_weight, None, candidate_count(k, units, d))
    exact = _gather_dot(x, candidates, weight).add_(bias[candidates])
    values, chosen = _topk_of(exact, k)
    indices = candidates.gather(1, chosen)
    last = tops.amin(1).to(x.dtype)
    proven = last + 2**-7 * last.abs() <= values.amin(1).relu()  # rounded to bfloat16; false where one is NaN
    if not proven.all():
        rows = proven.logical_not().nonzero().squeeze(1)
        values[rows], indices[rows] = _largest(x[rows], weight, bias, k)
    return values, indices


def _lowered(
    rows: Float[Tensor, "rows d"],
) -> tuple[Float[Tensor, "rows wider"], Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Return rows in bfloat16, with zeros at their right; and bounds on their norms, and on their errors' norms."""
    (count, d), size = rows.shape, PART if device_type(rows) == "cpu" else max(1, len(rows))
    if runs_triton(rows):
        from mxd.ops import kernels

        low, norms, errors = kernels.lowered(rows, d + BOUNDS)
    else:
        low = rows.new_empty(count, d + BOUNDS, dtype=torch.bfloat16)
        low[:, d:] = 0
        norms, errors = rows.new_empty(count), rows.new_empty(count)
        for start in range(0, count, size):
            part = slice(start, start + size)
            low[part, :d] = rows[part]
            torch.linalg.vector_norm(rows[part], dim=1, out=norms[part])
            torch.linalg.vector_norm(rows[part] - low[part, :d], dim=1, out=errors[part])
    errors += LOST * d**0.5
    return low, norms + errors, errors


class _TopKLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, k: int, candidates: CandidateDtype, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        if candidates == "bfloat16" and x.dtype in (torch.float32, torch.float64):
            with exact_products(x.device):
                values, indices = _from_candidates(x, weight, bias, k)
        else:
            values, indices = _largest(x, weight, bias, k)
        values = values.relu_()
        ctx.save_for_backward(x, weight, values, indices)
        ctx.selection = selection
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, values, indices = ctx.saved_tensors
        grad = grad * (values > 0)  # through the ReLU
        grad_x = _gather_sum(grad, indices, weight) if ctx.needs_input_grad[0] else None
        grad_weight = _scatter_rows(grad, indices, x, len(weight), ctx.selection) if ctx.needs_input_grad[1] else None
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = weight.new_zeros(len(weight)).index_add_(0, indices.reshape(-1), grad.reshape(-1))
        return grad_x, grad_weight, grad_bias, None, None, None


class _LinearAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, indices: Tensor, weight: Tensor, selection: Selection) -> Tensor:
        indices = indices.contiguous()
        ctx.save_for_backward(x, indices, weight)
        ctx.selection = selection
        return _gather_dot(x, indices, weight, selection)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, indices, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _gather_sum(grad, indices, weight) if ctx.needs_input_grad[0] else None
        grad_weight = _scatter_rows(grad, indices, x, len(weight), ctx.selection) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_weight, None


class _SparseDecode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, weight: Tensor, selection: Selection) -> Tensor:
        values, indices = values.contiguous(), indices.contiguous()
        ctx.save_for_backward(values, indices, weight)
        ctx.selection = selection
        return _gather_sum(values, indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, indices, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_values = _gather_dot(grad, indices, weight, ctx.selection) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = _scatter_rows(values, indices, grad, len(weight), ctx.selection)
        return grad_values, None, grad_weight, None

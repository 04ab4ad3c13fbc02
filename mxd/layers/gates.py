"""Gates and codes: how a layer's pre-activations are made from its input, and which units are active for it.

Code outside ``layers/`` asks a gate and never expects a matrix ``[units, d_in]``: product keys have N = n^2 units and
store 2 n rows. ``ReplacementLayer.gates`` returns a new gate each time, a view of the layer's parameters.

``Code`` lists the active units. ``PairCode`` is for layers whose unit ``(i, j)`` is a pair of halves (product keys),
with more active pairs than one would list: it answers the same questions from the halves, and lists pairs on request.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.ops import CandidateDtype, Selection, linear_at, topk_linear

LISTED = 2**26
"""Elements of a dense code of pairs that are formed at a time."""
COUNTED_HEADS = 8
"""The most heads whose pairs are counted by sets of heads, of which there are 2^heads; with more, pairs are listed."""


@dataclass
class Code:
    """A sparse code: unit ``indices[..., k]`` is active with ``activations[..., k]``; zero means not active.

    A code is a set: the order of its entries does not matter, and no unit is active twice for a token.
    """

    activations: Float[Tensor, "*batch k"]
    indices: Int[Tensor, "*batch k"]
    all_units: bool = False
    """Whether the indices are 0 ... N - 1 in order, so that a dense product may be used."""
    selection: Selection | None = None
    """The indices sorted by unit, shared with the operation that chose them; ``None``: sorted again if needed."""

    def reshape(self, lead: Sequence[int]) -> "Code":
        """Return the same code with other leading dimensions."""
        shape = (*lead, self.activations.shape[-1])
        return replace(self, activations=self.activations.reshape(shape), indices=self.indices.reshape(shape))

    def at(self, tokens: Bool[Tensor, " tokens"] | Int[Tensor, " some"]) -> "Code":
        """Return the code of some tokens (a mask, or their numbers), of a code with one leading dimension."""
        return Code(self.activations[tokens], self.indices[tokens], self.all_units)

    def with_activations(self, activations: Float[Tensor, "*batch k"]) -> "Code":
        """Return the code with other activations for the units that it lists."""
        return Code(activations, self.indices, self.all_units, self.selection)

    def without(self, units: Bool[Tensor, " units"]) -> "Code":
        """Return the code with some units switched off."""
        return self.with_activations(self.activations.masked_fill(units[self.indices], 0))

    def cpu(self) -> "Code":
        """Return the code on the CPU; where all units are listed, their numbers are not copied but counted there."""
        activations = self.activations.cpu()
        if not self.all_units:
            return Code(activations, self.indices.cpu())
        return Code(activations, torch.arange(activations.shape[-1]).expand(activations.shape), all_units=True)

    def zero(self) -> Float[Tensor, ""]:
        """Return zero in the dtype of the activations, on their device."""
        return self.activations.new_zeros(())

    def active_count(self) -> Int[Tensor, ""]:
        """Return the number of active units, summed over tokens."""
        return torch.count_nonzero(self.activations > 0)

    def active_units(self, units: int) -> Bool[Tensor, " units"]:
        """Return which units are active at any token."""
        active = self.activations > 0
        if self.all_units:
            return active.reshape(-1, units).any(0)
        seen = torch.zeros(units, dtype=torch.uint8, device=active.device)
        return seen.scatter_reduce_(0, self.indices.reshape(-1), active.reshape(-1).to(seen), "amax").bool()


class PairCode(Code):
    """A code whose unit ``i * n + j`` is the pair of halves i and j: its activation is ``sum_h first_hi second_hj``."""

    def __init__(self, first: Float[Tensor, "*batch heads n"], second: Float[Tensor, "*batch heads n"]) -> None:
        """Take the activations of the halves in each head, exactly zero where a half is not chosen."""
        self.first, self.second = first, second
        self.all_units, self.selection = False, None

    @property
    def activations(self) -> Float[Tensor, "*batch k"]:  # type: ignore[override]
        """Activations of the active pairs, as a list."""
        return self._listed.activations

    @property
    def indices(self) -> Int[Tensor, "*batch k"]:  # type: ignore[override]
        """Numbers of the active pairs, as a list."""
        return self._listed.indices

    def zero(self) -> Float[Tensor, ""]:
        """Return zero in the dtype of the activations, on their device."""
        return self.first.new_zeros(())

    def reshape(self, lead: Sequence[int]) -> "PairCode":
        """Return the same code with other leading dimensions."""
        heads = self.first.shape[-2:]
        return PairCode(self.first.reshape(*lead, *heads), self.second.reshape(*lead, *heads))

    def at(self, tokens: Bool[Tensor, " tokens"] | Int[Tensor, " some"]) -> "PairCode":
        """Return the code of some tokens (a mask, or their numbers), of a code with one leading dimension."""
        return PairCode(self.first[tokens], self.second[tokens])

    def active_count(self) -> Int[Tensor, ""]:
        """Return the number of active pairs, summed over tokens: of halves that share a head which chose both."""
        heads = self.first.shape[-2]
        if heads > COUNTED_HEADS:
            return super().active_count()
        sets = torch.arange(2**heads, device=self.first.device)
        share = (sets.unsqueeze(1) & sets != 0).float()
        first, second = (_head_sets(half.flatten(0, -3)) for half in (self.first, self.second))
        return ((first @ share) * second).long().sum()

    def active_units(self, units: int) -> Bool[Tensor, " units"]:
        """Return which pairs are active at any token: both halves must be, in the same head."""
        first, second = ((half > 0).float().flatten(0, -2) for half in (self.first, self.second))
        return (first.T @ second).flatten() > 0

    @cached_property
    def _listed(self) -> Code:
        """The active pairs as a list: every token has as many entries as the one with most, padded with zeros."""
        first, one = _chosen(self.first)
        second, other = _chosen(self.second)
        activations = torch.einsum("...hi,...hj->...hij", first, second)
        units = (one * self.second.shape[-1]).unsqueeze(-1) + other.unsqueeze(-2)
        return merged(activations.flatten(-3), units.flatten(-3))


def merged(activations: Float[Tensor, "*batch k"], units: Int[Tensor, "*batch k"]) -> Code:
    """Return the code in which each unit is active once: activations of the same unit are added up.

    The list stays as long as it was: where a unit is listed again, its activation there is zero.
    """
    units, order = units.sort(dim=-1, stable=True)
    again = torch.zeros_like(units, dtype=torch.bool)
    again[..., 1:] = units[..., 1:] == units[..., :-1]
    place = torch.arange(units.shape[-1], device=units.device).expand_as(units)
    place = place.masked_fill(again, 0).cummax(-1).values  # where its unit is listed first
    activations = activations.gather(-1, order)
    return Code(torch.zeros_like(activations).scatter_add(-1, place, activations), units, selection=Selection())


def _head_sets(half: Float[Tensor, "tokens heads n"]) -> Float[Tensor, "tokens sets"]:
    """Return how many halves are chosen by each set of heads; set s has head h where bit h of s is 1."""
    bits = 2 ** torch.arange(half.shape[1], device=half.device)
    members = ((half > 0) * bits.unsqueeze(-1)).sum(1)
    ones = torch.ones(members.shape, device=half.device)
    return torch.zeros(len(half), 2 ** half.shape[1], device=half.device).scatter_add(1, members, ones)


def _chosen(
    half: Float[Tensor, "*batch heads n"],
) -> tuple[Float[Tensor, "*batch heads k"], Int[Tensor, "*batch heads k"]]:
    """Return the activations and numbers of the halves that are chosen, padded with others, which are zero."""
    most = int((half > 0).sum(-1).amax()) if half.numel() else 0
    values, numbers = half.topk(max(most, 1))
    return values, numbers


MOST_SCORES = 2**30
"""The most pre-activations that are formed at a time: 4 GiB in float32."""


class Gate(ABC):
    """Pre-activations of ``units`` units, in each of ``heads`` heads."""

    units: int
    heads: int = 1

    def scores(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens heads units"]:
        """Return all pre-activations, dense.

        Raises:
            MxdError: there are more than ``MOST_SCORES``.
        """
        if len(x) * self.heads * self.units > MOST_SCORES:
            raise MxdError(
                f"{len(x):,} tokens have {len(x) * self.heads * self.units:,} pre-activations, more than fit "
                f"({MOST_SCORES:,}); give fewer tokens at a time (in training: a larger training.accumulation)."
            )
        return self._scores(x)

    @abstractmethod
    def top(
        self, x: Float[Tensor, "tokens d_in"], k: int, candidates: CandidateDtype, selection: Selection
    ) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """Return the ``k`` largest of ``relu(scores)`` of each token with the numbers of their units.

        Args:
            x: what the layer reads.
            k: how many.
            candidates: the dtype in which all pre-activations may be computed to find candidates, whose
                pre-activations are then computed in float32.
            selection: a new one, to be passed on to the decoder of the same indices.
        """

    def at(
        self, x: Float[Tensor, "tokens d_in"], indices: Int[Tensor, "tokens k"], selection: Selection
    ) -> Float[Tensor, "tokens k"]:
        """Return ``relu(scores)`` of the units given for each token, of a gate with one head.

        Args:
            x: what the layer reads.
            indices: the numbers of the units.
            selection: a new one, to be passed on to the decoder of the same indices.
        """
        return self.scores(x).squeeze(1).relu().gather(1, indices)

    @abstractmethod
    def rows(self, ids: Int[Tensor, " k"], head: int = 0) -> tuple[Float[Tensor, "k d_in"], Float[Tensor, " k"]]:
        """Return weight and bias of some units: ``scores(x)[:, head, ids] = x @ weight.T + bias``."""

    @abstractmethod
    def project(self, v: Float[Tensor, " d_in"], head: int = 0) -> Float[Tensor, " units"]:
        """Return ``weight @ v`` for all units, without the biases and without forming ``weight``."""

    @abstractmethod
    def centre(self, mean_in: Float[Tensor, " d_in"]) -> None:
        """Set the biases so that the pre-activations of the mean input are zero."""

    @abstractmethod
    def _scores(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens heads units"]:
        """Return all pre-activations."""


class LinearGate(Gate):
    """``x @ weight.T + bias``: one row for each unit."""

    def __init__(self, weight: Float[Tensor, "units d_in"], bias: Float[Tensor, " units"]) -> None:
        self.weight, self.bias = weight, bias
        self.units = len(bias)

    def top(
        self, x: Float[Tensor, "tokens d_in"], k: int, candidates: CandidateDtype, selection: Selection
    ) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """As ``Gate.top``, tile by tile: the dense pre-activations never exist."""
        return topk_linear(x, self.weight, self.bias, k, candidates, selection)

    def at(
        self, x: Float[Tensor, "tokens d_in"], indices: Int[Tensor, "tokens k"], selection: Selection
    ) -> Float[Tensor, "tokens k"]:
        """As ``Gate.at``, without the pre-activations of other units."""
        bias = self.bias.index_select(0, indices.reshape(-1)).view_as(indices)
        return (linear_at(x, indices, self.weight, selection) + bias).relu()

    def rows(self, ids: Int[Tensor, " k"], head: int = 0) -> tuple[Float[Tensor, "k d_in"], Float[Tensor, " k"]]:
        """Return the units' rows and biases."""
        return self.weight[ids], self.bias[ids]

    def project(self, v: Float[Tensor, " d_in"], head: int = 0) -> Float[Tensor, " units"]:
        """Return ``weight @ v``."""
        return self.weight @ v

    @torch.no_grad()
    def centre(self, mean_in: Float[Tensor, " d_in"]) -> None:
        """Set the biases to ``-weight @ mean_in``."""
        self.bias.copy_(-self.project(mean_in))

    def _scores(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens 1 units"]:
        return F.linear(x, self.weight, self.bias).unsqueeze(1)


class ConstantGate(Gate):
    """1 for every unit and every input: units that are always on."""

    def __init__(self, units: int, d_in: int, like: Tensor) -> None:
        """Take the number of units.

        Args:
            units: how many.
            d_in: width of the input.
            like: a tensor with the layer's dtype and device.
        """
        self.units, self.d_in, self.like = units, d_in, like

    def top(
        self, x: Float[Tensor, "tokens d_in"], k: int, candidates: CandidateDtype, selection: Selection
    ) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """As ``Gate.top``: of equal units, the first."""
        units = torch.arange(k, device=x.device).expand(len(x), -1)
        return x.new_ones(units.shape), units

    def rows(self, ids: Int[Tensor, " k"], head: int = 0) -> tuple[Float[Tensor, "k d_in"], Float[Tensor, " k"]]:
        """Return weights of zero and biases of one."""
        return self.like.new_zeros(len(ids), self.d_in), self.like.new_ones(len(ids))

    def project(self, v: Float[Tensor, " d_in"], head: int = 0) -> Float[Tensor, " units"]:
        """Return zeros."""
        return v.new_zeros(self.units)

    def centre(self, mean_in: Float[Tensor, " d_in"]) -> None:
        """Do nothing: there are no biases to set."""

    def _scores(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens 1 units"]:
        return x.new_ones(len(x), 1, self.units)

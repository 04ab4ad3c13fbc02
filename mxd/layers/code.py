"""Codes: which units are active at each token, and how strongly.

``Code`` lists them. ``PairCode`` is for layers whose unit ``(i, j)`` is a pair of halves (product keys), with more
active pairs than one would list: it answers the same questions from the halves, and is listed only when somebody asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.ops import Selection

LISTED = 2**26
"""Numbers of a dense code that are formed at a time to list the active pairs."""


@dataclass
class Code:
    """A sparse code: unit ``indices[..., k]`` is active with ``activations[..., k]``; zero means not active.

    A code is a set: the order of its entries does not matter, and no unit is listed twice for a token.
    """

    activations: Float[Tensor, "*batch k"]
    indices: Int[Tensor, "*batch k"]
    all_units: bool = False
    """The indices are 0 ... N - 1 in order, so that a dense product may be used."""
    selection: Selection | None = None
    """The same indices as the operation that chose them sorted them, for the backward pass; ``None``: sort anew."""

    def reshape(self, lead: Sequence[int]) -> "Code":
        """Return the same code with these leading dimensions in place of its own."""
        shape = (*lead, self.activations.shape[-1])
        return replace(self, activations=self.activations.reshape(shape), indices=self.indices.reshape(shape))

    def at(self, tokens: Bool[Tensor, " tokens"]) -> "Code":
        """Return the code of some tokens, of a code with one leading dimension."""
        return Code(self.activations[tokens], self.indices[tokens], self.all_units)

    def with_activations(self, activations: Float[Tensor, "*batch k"]) -> "Code":
        """Return the code with other activations of the units that it lists."""
        return Code(activations, self.indices, self.all_units, self.selection)

    def without(self, units: Bool[Tensor, " units"]) -> "Code":
        """Return the code with some units switched off."""
        return self.with_activations(self.activations.masked_fill(units[self.indices], 0))

    def zero(self) -> Float[Tensor, ""]:
        """Return zero in the dtype of the activations, on their device."""
        return self.activations.new_zeros(())

    def active_count(self) -> Int[Tensor, ""]:
        """Return the number of active units, summed over tokens."""
        return (self.activations > 0).sum()

    def active_units(self, units: int) -> Bool[Tensor, " units"]:
        """Return which of all units are active at any token."""
        active = self.activations > 0
        if self.all_units:
            return active.reshape(-1, units).any(0)
        found = torch.zeros(units, dtype=torch.bool, device=active.device)
        found[self.indices[active]] = True
        return found


class PairCode(Code):
    """A code whose unit ``i * n + j`` is the pair of halves i and j: its activation is ``sum_h first_hi second_hj``."""

    def __init__(self, first: Float[Tensor, "*batch heads n"], second: Float[Tensor, "*batch heads n"]) -> None:
        """Take the activations of the halves for each head, with exact zeros where they are not chosen."""
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
        """Return the same code with these leading dimensions in place of its own."""
        heads = self.first.shape[-2:]
        return PairCode(self.first.reshape(*lead, *heads), self.second.reshape(*lead, *heads))

    def at(self, tokens: Bool[Tensor, " tokens"]) -> "PairCode":
        """Return the code of some tokens, of a code with one leading dimension."""
        return PairCode(self.first[tokens], self.second[tokens])

    def active_count(self) -> Int[Tensor, ""]:
        """Return the number of active pairs, summed over tokens."""
        return torch.stack([(dense > 0).sum() for dense in self._dense()]).sum()

    def active_units(self, units: int) -> Bool[Tensor, " units"]:
        """Return which of all pairs are active at any token: those whose halves are, in one head, at one token."""
        first, second = ((half > 0).float().flatten(0, -2) for half in (self.first, self.second))
        return (first.T @ second).flatten() > 0

    @cached_property
    def _listed(self) -> Code:
        """The list: as many entries a token as the token with most active pairs has; others end in zeros."""
        longest = max((int((dense > 0).sum(-1).amax()) for dense in self._dense() if len(dense)), default=1)
        lists = [dense.topk(max(longest, 1)) for dense in self._dense()]
        listed = Code(torch.cat([each.values for each in lists]), torch.cat([each.indices for each in lists]))
        return listed.reshape(self.first.shape[:-2])

    def _dense(self) -> list[Float[Tensor, "_ units"]]:
        """Return the activations of all pairs, for so many tokens at a time that memory stays bounded."""
        first, second = (half.reshape(-1, *half.shape[-2:]) for half in (self.first, self.second))
        step = max(1, LISTED // (first.shape[-1] * second.shape[-1]))
        pairs = zip(first.split(step), second.split(step), strict=True)
        return [torch.einsum("thi,thj->tij", a, b).flatten(1) for a, b in pairs]

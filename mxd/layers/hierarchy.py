"""Gates and codes of hierarchies: unit ``(n_1, ..., n_E)``, numbered row-major, takes one expert of each level.

Its activation is the product of its experts', and for probes its pre-activation is the sum of theirs.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.layers.gates import Code, Gate
from mxd.ops import CandidateDtype, Selection


class LevelCode(Code):
    """The code of a hierarchy: unit ``i * size + j`` is active with ``first_i * later_j``.

    Both sides stay lists: there may be many experts in the first level, and nothing as wide is formed for a token.
    """

    def __init__(self, first: Code, later: Code, size: int) -> None:
        """Take the parts that make up the code.

        Args:
            first: the code of the first level.
            later: that of the later ones together.
            size: the number of units that the later levels make together.
        """
        self.first, self.later, self.size = first, later, size
        self.all_units, self.selection = first.all_units and later.all_units, None

    @property
    def activations(self) -> Float[Tensor, "*batch k"]:  # type: ignore[override]
        """Activations of the units, as a list."""
        return self.listed.activations

    @property
    def indices(self) -> Int[Tensor, "*batch k"]:  # type: ignore[override]
        """Numbers of the units, as a list."""
        return self.listed.indices

    @cached_property
    def listed(self) -> Code:
        """The code as a list of units: all pairs of what both sides list."""
        values = self.first.activations.unsqueeze(-1) * self.later.activations.unsqueeze(-2)
        units = self.first.indices.unsqueeze(-1) * self.size + self.later.indices.unsqueeze(-2)
        return Code(values.flatten(-2), units.flatten(-2), self.all_units)

    def zero(self) -> Float[Tensor, ""]:
        """Return zero in the dtype of the activations, on their device."""
        return self.first.zero()

    def reshape(self, lead: Sequence[int]) -> "LevelCode":
        """Return the same code with other leading dimensions."""
        return LevelCode(self.first.reshape(lead), self.later.reshape(lead), self.size)

    def at(self, tokens: Bool[Tensor, " tokens"] | Int[Tensor, " some"]) -> "LevelCode":
        """Return the code of some tokens, of a code with one leading dimension."""
        return LevelCode(self.first.at(tokens), self.later.at(tokens), self.size)

    def active_count(self) -> Int[Tensor, ""]:
        """Return the number of active units, summed over tokens."""
        first, later = ((side.activations > 0).sum(-1) for side in (self.first, self.later))
        return (first * later).sum()

    def active_units(self, units: int) -> Bool[Tensor, " units"]:
        """Return which units are active at any token: their experts must be, at the same one."""
        later = self.later.activations
        on = later.new_zeros(*later.shape[:-1], self.size)
        on = on.scatter_reduce_(-1, self.later.indices, later, "amax") > 0
        seen = [  # for each unit of the later levels, the experts of the first that are active together with it
            self.first.with_activations(self.first.activations * active.unsqueeze(-1)).active_units(units // self.size)
            for active in on.unbind(-1)
        ]
        return torch.stack(seen, -1).flatten()


def level_code(codes: Sequence[Code], sizes: Sequence[int]) -> LevelCode:
    """Return the code of a hierarchy of two or more levels, given each level's code and number of experts."""
    later, size = codes[-1], sizes[-1]
    for code, more in zip(codes[-2:0:-1], sizes[-2:0:-1], strict=True):
        later, size = LevelCode(code, later, size).listed, size * more
    return LevelCode(codes[0], later, size)


class LevelGate(Gate):
    """The gates of all levels, each with one head; a unit's pre-activation is the sum of its experts'."""

    def __init__(self, levels: Sequence[Gate]) -> None:
        self.levels = tuple(levels)
        self.sizes = tuple(gate.units for gate in levels)
        self.units = math.prod(self.sizes)

    def top(
        self, x: Float[Tensor, "tokens d_in"], k: int, candidates: CandidateDtype, selection: Selection
    ) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """As ``Gate.top``, from all pre-activations: the levels' sparsity, which chooses level by level, needs none."""
        top = self.scores(x).squeeze(1).relu().topk(k)
        return top.values, top.indices

    def rows(self, ids: Int[Tensor, " k"], head: int = 0) -> tuple[Float[Tensor, "k d_in"], Float[Tensor, " k"]]:
        """Return the sums of the experts' rows, and of their biases."""
        pairs = [gate.rows(part, head) for gate, part in zip(self.levels, split(ids, self.sizes), strict=True)]
        weights, biases = zip(*pairs, strict=True)
        return torch.stack(weights).sum(0), torch.stack(biases).sum(0)

    def project(self, v: Float[Tensor, " d_in"], head: int = 0) -> Float[Tensor, " units"]:
        """Return ``weight @ v`` from the levels' projections."""
        return _sums([gate.project(v, head) for gate in self.levels])

    def centre(self, mean_in: Float[Tensor, " d_in"]) -> None:
        """Centre each level's pre-activations."""
        for gate in self.levels:
            gate.centre(mean_in)

    def _scores(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens 1 units"]:
        return _sums([gate.scores(x) for gate in self.levels])


def split(ids: Int[Tensor, "*batch"], sizes: Sequence[int]) -> list[Int[Tensor, "*batch"]]:
    """Return for each level which of its experts the units take."""
    parts = []
    for size in reversed(sizes):
        parts.append(ids % size)
        ids = ids // size
    return parts[::-1]


def _sums(levels: Sequence[Float[Tensor, "..."]]) -> Float[Tensor, "..."]:
    """Return for all units in order the sum of what their experts have, one in each level's last dimension."""
    total = levels[0]
    for level in levels[1:]:
        total = (total.unsqueeze(-1) + level.unsqueeze(-2)).flatten(-2)
    return total

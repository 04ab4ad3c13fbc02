"""The K largest of each token."""

import random
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity.base import Sparsity, SparsityConfig


class TopKConfig(SparsityConfig):
    """Keep the K largest."""

    kind: Literal["topk"] = "topk"
    """Selects this kind."""
    k: PositiveInt = 32
    """The most units active for a token."""

    @property
    def max_k(self) -> int:
        """K."""
        return self.k

    @property
    def slug(self) -> str:
        """For example ``k32``."""
        return f"k{self.k}"

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return TopK(self.k)


class RandomKConfig(SparsityConfig):
    """Train with K drawn uniformly from ``K - K // spread ... K + K // spread`` at every step; evaluate with K.

    Breaks the dependence on one dominating shared expert (MxD, appendix C.2; the paper's spread is 2).
    """

    kind: Literal["random_k"] = "random_k"
    """Selects this kind."""
    k: PositiveInt = 32
    """The most units active for a token at evaluation, and on average in training."""
    spread: PositiveInt = 2
    """The drawn K differs from ``k`` by at most ``k // spread``."""

    @property
    def max_k(self) -> int:
        """The largest K that can be drawn."""
        return self.k + self.k // self.spread

    @property
    def shown_k(self) -> int:
        """The K of evaluation."""
        return self.k

    @property
    def costliest(self) -> TopKConfig:
        """The largest K at every step."""
        return TopKConfig(k=self.max_k)

    @property
    def slug(self) -> str:
        """For example ``randomk32``."""
        return f"randomk{self.k}"

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return RandomK(self.k, self.spread)


class TopK(Sparsity):
    """``a = TopK(relu(x G + b_G), K)``."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep the K largest."""
        return self.top(x, gate, self.k)


class RandomK(Sparsity):
    """``TopK`` with another K drawn for every training step.

    ``draws`` is the position in the sequence of all draws: the seed says where it begins, and each draw moves it on by
    one, so that a resumed run draws the same.
    """

    draws: Tensor

    def __init__(self, k: int, spread: int) -> None:
        super().__init__()
        self.k = k
        self.reach = k // spread
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RandomK":
        """Move nothing: K is needed on the CPU, which at every step would wait for another device."""
        return self

    def seed(self, seed: int) -> None:
        """Begin at a position that depends on the seed; neighbouring seeds are 2^32 draws apart."""
        self.draws.fill_(seed % 2**31 << 32)

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep the K^ largest, K^ drawn in training mode and equal to K in evaluation mode."""
        k = self.k
        if self.training:
            k = random.Random(int(self.draws)).randint(max(1, k - self.reach), k + self.reach)
            self.draws += 1
        return self.top(x, gate, k)

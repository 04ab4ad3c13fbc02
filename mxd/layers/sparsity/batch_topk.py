"""BatchTopK (Bussmann et al., arXiv 2412.06410): the K largest of each token on average, over a whole batch."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import PositiveInt
from torch import Tensor

from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity.base import Sparsity, SparsityConfig
from mxd.ops import Selection, kth_largest

WIDTH = 4
"""The list of a token begins with this many times K candidates, and is made longer where that may be too short."""

RATE = 0.1
"""Weight of the newest step in the running mean of the cutoffs: a longer memory (0.01) lags behind in short runs."""


class BatchTopKConfig(SparsityConfig):
    """Keep the ``K`` times as many largest as a training step has tokens; evaluate with one threshold for all units.

    Tokens use as many units as they need. The batch is a whole step: all its parts and processes.
    """

    kind: Literal["batch_topk"] = "batch_topk"
    """Selects this kind."""
    k: PositiveInt = 32
    """The number of units active for a token, on average."""

    @property
    def max_k(self) -> None:
        """Not bounded."""
        return None

    @property
    def slug(self) -> str:
        """For example ``batchk32``."""
        return f"batchk{self.k}"

    def check_units(self, units: int) -> None:
        """As ``SparsityConfig.check_units``: K of them are needed.

        Raises:
            ValueError: there are fewer.
        """
        if self.k > units:
            raise ValueError(f"k = {self.k} is more than num_units = {units}; lower k or raise num_units")

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return BatchTopK(self.k)


class _Chosen(NamedTuple):
    """The units of some tokens: as many entries for each token as the one with most has.

    Entries that are not kept may name a unit again.
    """

    indices: Int[Tensor, "tokens width"]
    kept: Bool[Tensor, "tokens width"]


class BatchTopK(Sparsity):
    """``a = p (p >= c)`` in training, ``a = p (p > threshold)`` in evaluation, with ``p = relu(x G + b_G)``.

    The cutoff ``c`` of a step is the ``K B``-th largest of all ``p`` of its ``B`` tokens (0 where fewer are positive),
    so that ``K B`` are kept. ``threshold`` is the running mean of the cutoffs, each new one weighing ``RATE``, with
    the bias of a mean that begins at zero corrected. A step's tokens are new to the layer when its cutoff is taken, so
    this is the threshold at which tokens that are not trained on use K units on average.
    """

    threshold: Tensor
    steps: Tensor

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.register_buffer("threshold", torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.waiting: list[_Chosen] = []

    def begin_step(self, parts: Sequence[Float[Tensor, "_ d_in"]], gate: Gate) -> None:
        """Choose the units of all parts; ``forward`` then takes them one after the other."""
        self.waiting = self._of_step(parts, gate)

    def end_step(self) -> None:
        """Forget what was chosen."""
        self.waiting = []

    def forward(self, x: Float[Tensor, "tokens d_in"], gate: Gate) -> Code:
        """Keep what is above the cutoff of the step, or in evaluation above the threshold."""
        if not self.training:
            chosen = self._above(x, gate, self.threshold)
        else:
            chosen = self.waiting.pop(0) if self.waiting else self._of_step([x], gate)[0]
        selection = Selection()
        activations = gate.at(x, chosen.indices, selection)
        return Code(activations * chosen.kept, chosen.indices, selection=selection)

    @torch.no_grad()
    def _of_step(self, parts: Sequence[Float[Tensor, "_ d_in"]], gate: Gate) -> list[_Chosen]:
        """Choose the units of one training step's tokens, and move the threshold."""
        tokens = self.processes.world * sum(map(len, parts))
        rank = tokens * self.widened(self.k, gate.units)
        lists = [self._list(part, gate, WIDTH * self.k) for part in parts]
        while True:
            cutoff = kth_largest([values for values, _ in lists], rank, self.processes.add)
            full = [_full(values, cutoff, gate) for values, _ in lists]
            if not self.processes.any(any(full)):
                break
            lists = [
                self._list(part, gate, 2 * values.shape[1]) if short else (values, indices)
                for part, (values, indices), short in zip(parts, lists, full, strict=True)
            ]
        self.steps += 1
        self.threshold += (cutoff - self.threshold) * RATE / (1 - (1 - RATE) ** self.steps.double())
        return [_shortened(values, indices, (values >= cutoff) & (values > 0)) for values, indices in lists]

    @torch.no_grad()
    def _above(self, x: Float[Tensor, "tokens d_in"], gate: Gate, threshold: Float[Tensor, ""]) -> _Chosen:
        """Choose the units above a threshold."""
        values, indices = self._list(x, gate, WIDTH * self.k)
        while _full(values, threshold, gate):
            values, indices = self._list(x, gate, 2 * values.shape[1])
        return _shortened(values, indices, values > threshold)

    def _list(
        self, x: Float[Tensor, "tokens d_in"], gate: Gate, width: int
    ) -> tuple[Float[Tensor, "tokens width"], Int[Tensor, "tokens width"]]:
        """Return the ``width`` largest of each token with their units, or all where there are fewer."""
        candidates = self.candidates if self.training else "float32"
        return gate.top(x, min(width, gate.units), candidates, Selection())


def _full(values: Float[Tensor, "tokens width"], cutoff: Float[Tensor, ""], gate: Gate) -> bool:
    """Whether a token whose whole list is above the cutoff may have more units above it."""
    if values.shape[1] == gate.units or values.is_meta:
        return False
    least = values.amin(1)
    return bool(((least >= cutoff) & (least > 0)).any())


def _shortened(
    values: Float[Tensor, "tokens width"], indices: Int[Tensor, "tokens width"], kept: Bool[Tensor, "tokens width"]
) -> _Chosen:
    """Drop from lists what no token needs; what is left over names the token's first unit again, already in cache."""
    if values.is_meta or not len(values):
        return _Chosen(indices, kept)
    longest = max(1, int(kept.sum(1).amax()))
    kept, places = kept.to(torch.uint8).topk(longest, dim=1)
    indices = indices.gather(1, places)
    return _Chosen(torch.where(kept.bool(), indices, indices[:, :1]), kept.bool())

"""Texts with one unit, or some coefficients, dropped from one layer: only what that can change runs again.

Only one layer is spliced in, so what it reads does not depend on what is dropped: its code is taken once for each
batch, and its output with some coefficients at zero, or another one, stands in the MLP's place while the blocks above
it run.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained
from mxd.evaluation.targets import Target
from mxd.evaluation.walk import PaddedTexts
from mxd.layers import Code
from mxd.model.frozen import FrozenModel
from mxd.splice import Splice

OF_UNITS, OF_CONTROLS = 0, 1
"""Kinds of drops: a unit's own coefficients, and as many random ones."""

Drops = tuple[Int[np.ndarray, " pairs"], Int[np.ndarray, " pairs"], Int[np.ndarray, " pairs"], Bool[Tensor, "_ seq k"]]
"""Rows of a batch, the kind of each, the place of its unit, and the coefficients that are dropped."""


class _Given(nn.Module):
    """Returns what it was given, whatever it reads."""

    out: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.out


@dataclass(frozen=True)
class Activity:
    """In which texts units are active, and how many coefficients are dropped there for the controls."""

    units: list[int]
    coefficients: Int[np.ndarray, "texts units"]
    """Coefficients of each unit, by the number of the text."""
    active: Int[np.ndarray, " texts"]
    """Active coefficients of all units of the layer, by the number of the text."""
    controls: Int[np.ndarray, "texts units"]
    """Coefficients that are dropped for each unit's control; over all texts as many as the unit has."""

    @property
    def again(self) -> int:
        """How many texts run again."""
        return int((self.coefficients > 0).sum() + (self.controls > 0).sum())


class Dropping:
    """A layer in its place in the model, with what is dropped from it."""

    def __init__(self, model: FrozenModel, trained: Trained, units: Sequence[int] = (), seed: int = 0) -> None:
        """Take the layer and what is dropped.

        Args:
            model: the frozen base model.
            trained: the layer.
            units: the units that are dropped, one by one.
            seed: draws the coefficients of the controls.
        """
        self.model, self.layer, self.block = model, trained.layer, trained.provenance.block
        self.units, self.seed = list(units), seed
        self.given = _Given()
        self.splice = Splice(model, {self.block: self.given}, check=False)

    def at(self, batch: PaddedTexts) -> "Site":
        """Run the base model on some texts up to the layer."""
        ids = torch.from_numpy(batch.ids)
        with self.model.block_outputs([self.block]) as below:
            x, y = self.model.record(ids, [self.block])[self.block]
        read = self.layer.read(x, y)
        code = self.layer.encode(read)
        listed = Code(code.activations, code.indices, code.all_units)  # a plain list, whatever kind of code it is
        # Elsewhere the layer answers with its stored constant, or no text is left.
        there = torch.from_numpy(batch.real).to(read.device) & ~self.layer.at_bos(read)
        return Site(self, batch, below.get(self.block), read, listed, there)

    def spliced(self, batches: Iterable[PaddedTexts]) -> Iterator[PaddedTexts]:
        """Yield batches while the whole layer is in the model, for that batch."""
        for batch in batches:
            site = self.at(batch)
            with site.entered(np.arange(len(batch.numbers))):
                yield batch

    def activity(self, batches: Iterable[PaddedTexts]) -> Activity:
        """Count the units' coefficients in every text, and draw how many the controls drop in each.

        A unit's control is drawn from all active coefficients of the texts without replacement: first how many fall in
        each text, here, then which ones (``Site.drops``).
        """
        counts: dict[int, np.ndarray] = {}
        active: dict[int, int] = {}
        for batch in batches:
            site = self.at(batch)
            counts |= dict(zip(batch.numbers, site.coefficients(), strict=True))
            active |= dict(zip(batch.numbers, site.active.sum((1, 2)).tolist(), strict=True))
        numbers = sorted(counts)
        coefficients = np.zeros((numbers[-1] + 1, len(self.units)), dtype=np.int64)
        sizes = np.zeros(numbers[-1] + 1, dtype=np.int64)
        controls = np.zeros_like(coefficients)
        for number in numbers:
            coefficients[number], sizes[number] = counts[number], active[number]
        ends = sizes.cumsum()
        for place, unit in enumerate(self.units):
            rng = np.random.default_rng([self.seed, unit])
            drawn = rng.choice(int(ends[-1]), int(coefficients[:, place].sum()), replace=False, shuffle=False)
            controls[:, place] = np.bincount(np.searchsorted(ends, drawn, side="right"), minlength=len(ends))
        return Activity(self.units, coefficients, sizes, controls)


@dataclass(frozen=True)
class Site:
    """A batch of texts up to the layer: what it reads there, and its code."""

    dropping: Dropping
    batch: PaddedTexts
    below: Any
    """What the block below returned; ``None`` for block 0."""
    read: Float[Tensor, "batch seq d_in"]
    code: Code
    there: Bool[Tensor, "batch seq"]
    """Tokens of the texts at which the layer answers with its units."""

    @property
    def active(self) -> Bool[Tensor, "batch seq k"]:
        """Where the code's entries are active and a change of them changes the output."""
        return (self.code.activations > 0) & self.there.unsqueeze(-1)

    @property
    def out(self) -> Float[Tensor, "batch seq d_out"]:
        """The layer's output."""
        return self.dropping.layer.decode(self.read, self.code)

    def coefficients(self) -> Int[np.ndarray, "batch units"]:
        """Return how many coefficients each unit has in each text."""
        units = torch.tensor(self.dropping.units, dtype=torch.int64, device=self.read.device)
        if self.code.all_units:
            return self.active[..., units].sum(1).cpu().numpy()
        places = torch.full((self.dropping.layer.num_units,), -1, device=units.device)
        places[units] = torch.arange(len(units), device=units.device)
        at = places[self.code.indices]
        counted = self.active & (at >= 0)
        counts = torch.zeros(len(self.there), len(units), dtype=torch.int64, device=units.device)
        ones = counts.new_ones(int(counted.sum()))
        return counts.index_put_((counted.nonzero()[:, 0], at[counted]), ones, accumulate=True).cpu().numpy()

    def drops(self, activity: Activity, size: int) -> Iterator[Drops]:
        """Yield what is dropped from this batch, ``size`` pairs of a text and a unit, or its control, at a time.

        Args:
            activity: of all texts.
            size: pairs in one forward.
        """
        numbers = self.batch.numbers
        pairs = np.concatenate(
            [
                np.insert(np.argwhere(counts[numbers] > 0), 1, kind, axis=1)
                for kind, counts in ((OF_UNITS, activity.coefficients), (OF_CONTROLS, activity.controls))
            ]
        )
        for start in range(0, len(pairs), size):
            rows, kinds, places = pairs[start : start + size].T
            dropped = [
                self._of_unit(row, place) if kind == OF_UNITS else self._of_control(row, place, activity)
                for row, kind, place in pairs[start : start + size].tolist()
            ]
            yield rows, kinds, places, torch.stack(dropped)

    def _of_unit(self, row: int, place: int) -> Bool[Tensor, "seq k"]:
        return self.code.indices[row] == self.dropping.units[place]

    def _of_control(self, row: int, place: int, activity: Activity) -> Bool[Tensor, "seq k"]:
        number = self.batch.numbers[row]
        rng = np.random.default_rng([self.dropping.seed, self.dropping.units[place], number])
        drawn = rng.choice(activity.active[number], activity.controls[number, place], replace=False, shuffle=False)
        there = self.active[row]
        dropped = torch.zeros_like(there)
        entries = there.flatten().nonzero().squeeze(1)
        dropped.view(-1)[entries[torch.from_numpy(drawn).to(entries.device)]] = True
        return dropped

    def run(
        self,
        target: Target,
        rows: Int[np.ndarray, " pairs"] | None = None,
        dropped: Bool[Tensor, "pairs seq k"] | None = None,
    ) -> Int[np.ndarray, " pairs"]:
        """Run the blocks from the layer's on and return what the model gets right of each text.

        Args:
            target: what is asked.
            rows: texts of the batch; by default all.
            dropped: entries of their codes that are set to zero; by default none.
        """
        rows = np.arange(len(self.batch.numbers)) if rows is None else rows
        with self.entered(rows, dropped) as texts:
            return target.right(texts)

    @contextmanager
    def entered(
        self, rows: Int[np.ndarray, " pairs"], dropped: Bool[Tensor, "pairs seq k"] | None = None
    ) -> Iterator[PaddedTexts]:
        """Let forwards of some of the texts, which are returned, run from the layer's block on, with its output there.

        Arguments as ``run``.
        """
        at = torch.from_numpy(rows).to(self.read.device)
        with self.answering(rows, self.dropping.layer.decode(self.read[at], self._code(at, dropped))) as texts:
            yield texts

    @contextmanager
    def answering(
        self, rows: Int[np.ndarray, " pairs"], out: Float[Tensor, "pairs seq d_out"]
    ) -> Iterator[PaddedTexts]:
        """As ``entered``, with any output in the MLP's place.

        Args:
            rows: texts of the batch.
            out: stands there for each of them.
        """
        at = torch.from_numpy(rows).to(self.read.device)
        given, splice = self.dropping.given, self.dropping.splice
        given.out = out
        texts = PaddedTexts(self.batch.ids[rows], self.batch.real[rows], [self.batch.numbers[row] for row in rows])
        with splice.entered(), self.dropping.model.resumed(self.dropping.block, _of_rows(self.below, at)):
            yield texts

    def _code(self, at: Int[Tensor, " pairs"], dropped: Bool[Tensor, "pairs seq k"] | None) -> Code:
        activations = self.code.activations[at]
        activations = activations if dropped is None else activations.masked_fill(dropped, 0)
        every = self.code.all_units  # the same numbers for every token: nothing to copy
        indices = self.code.indices[:1, :1].expand(activations.shape) if every else self.code.indices[at]
        return Code(activations, indices, every)


def _of_rows(hidden: Any, at: Int[Tensor, " pairs"]) -> Any:
    """Return what a block returned, for some rows of the batch."""
    if isinstance(hidden, tuple):
        return tuple(_of_rows(part, at) for part in hidden)
    return hidden[at] if isinstance(hidden, Tensor) else hidden

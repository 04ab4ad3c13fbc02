"""Which units correlate with a score of the text beyond chance? After Monet (ICLR 2025), section 5.3."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.layers import Code

PERMUTATIONS = 999
"""Times the scores are permuted over the texts."""
NUMBERS = 2**21
"""Correlations under permutation held in memory at a time."""

Entries = tuple[Int[Tensor, " _"], Int[Tensor, " _"], Float[Tensor, " _"]]
"""Unit, text and value of each entry that is not zero."""


class Correlations(NamedTuple):
    """How units correlate with a score: what ``Correlation`` finds."""

    over_tokens: Float[Tensor, " units"]
    """Pearson's correlation of the activation with the score over tokens; 0 for a unit that never changes."""
    over_texts: Float[Tensor, " units"]
    """The same over texts, between the mean activation and the mean score."""
    beyond_chance: Bool[Tensor, " units"]
    """Whether the correlation over tokens exceeds what chance gives any unit."""


class Correlation:
    """How each unit's activations correlate with a score, and whether they do so beyond chance.

    Tokens of one text are not independent: a unit active in two texts has two chances to match their scores, not
    hundreds. So chance is what remains when the scores are permuted over the texts. Unlike Fisher's z, this assumes
    nothing about the distribution of activations (nearly all zero) and scores (often skewed): under Fisher's z a unit
    active in one text alone, the one with the highest score, passes any bar. Each correlation is divided by its own
    spread over the permutations, which differs much from unit to unit, and must then exceed the largest that any unit
    reaches in any of 999 permutations: if the scores say nothing, the probability that any unit passes is 1 in 1,000.
    Where tokens have their own scores, the texts' means are permuted, and the part that correlates with the differences
    from these means is given a random sign, text by text.

    Memory grows with the texts and the units active in each, not with tokens or permutations: of each text the sums of
    the activations are kept, which suffices to permute its score.
    """

    def __init__(self, units: int) -> None:
        self.squares = torch.zeros(units, dtype=torch.float64)
        """Sums of the squared activations over all tokens."""
        self.within = 0.0
        """Sum of the squared differences of tokens' scores from their text's mean."""
        self.tokens = torch.zeros(0, dtype=torch.float64)
        """Of each text."""
        self.means = torch.zeros(0, dtype=torch.float64)
        """Of each text's scores."""
        self.sums: list[Entries] = []
        """Of each unit's activations over each text's tokens."""
        self.products: list[Entries] = []
        """The same of activations times differences from the mean score."""

    def see(self, code: Code, row: Int[Tensor, " tokens"], scores: Float[Tensor, " tokens"], texts: int) -> None:
        """Count a batch of texts.

        Args:
            code: the code of the tokens that count.
            row: the text of the batch that each of them is in.
            scores: the score of each of them.
            texts: number of texts in the batch.
        """
        units, tokens = len(self.squares), torch.bincount(row, minlength=texts).double()
        means = torch.bincount(row, scores, texts) / tokens.clamp_min(1)
        apart = scores - means[row]
        apart[apart.abs() <= 1e-12 * means.abs().max()] = 0  # equal scores, up to rounding
        code = code.cpu()
        self.squares.index_add_(0, code.indices.flatten(), code.activations.double().square().flatten())
        self.within += float(apart.square().sum())
        first, counted = len(self.tokens), tokens > 0
        self.tokens = torch.cat([self.tokens, tokens[counted]])
        self.means = torch.cat([self.means, means[counted]])
        self.sums.append(_entries(text_sums(code, row, texts, units)[counted], first))
        self.products.append(_entries(text_sums(code, row, texts, units, apart)[counted], first))

    @property
    def active(self) -> Bool[Tensor, " units"]:
        """The units that were active at all."""
        return self.squares > 0

    def report(self, seed: int = 0) -> Correlations:
        """Return the correlations, and which of them exceed chance; the seed draws the permutations."""
        rng, texts, count = np.random.default_rng(seed), len(self.tokens), self.tokens.sum()
        orders = np.stack([np.arange(texts), *(rng.permutation(texts) for _ in range(PERMUTATIONS))], 1)
        signs = torch.from_numpy(rng.choice([-1.0, 1.0], orders.shape))
        signs[:, 0] = 1  # the first column is the observed order, the others are permutations
        # All columns at once: permuted means per text, centred over tokens, and the scores' sum of squares with them.
        permuted = self.means[torch.from_numpy(orders)]
        permuted = permuted - self.tokens @ permuted / count
        spread = self.tokens @ permuted.square() + self.within
        per_chunk, largest = [], torch.zeros(PERMUTATIONS, dtype=torch.float64)
        for squares, sums, products in self._chunks():
            # Pearson's r over tokens: the activations' covariance with means and differences, over both spreads.
            varies = squares - sums.sum(1).square() / count
            over = (sums @ permuted + products @ signs) / (varies.unsqueeze(-1) * spread).clamp_min(1e-300).sqrt()
            over[varies <= 1e-12 * squares] = 0  # a unit that never changes, up to rounding
            standardised = over / over.square().mean(1, keepdim=True).sqrt().clamp_min(1e-300)
            largest = torch.maximum(largest, standardised[:, 1:].amax(0))
            per_chunk.append((over[:, 0], _pearson(sums / self.tokens, self.means), standardised[:, 0]))
        over_tokens, over_texts, observed = map(torch.cat, zip(*per_chunk, strict=True))
        return Correlations(over_tokens, over_texts, observed > (1 + 1e-9) * largest.max())

    def _chunks(
        self,
    ) -> Iterator[tuple[Float[Tensor, " units"], Float[Tensor, "units texts"], Float[Tensor, "units texts"]]]:
        """Yield squares, sums and products of a few units at a time, so that memory stays bounded."""
        sums, products = (_by_unit(entries) for entries in (self.sums, self.products))
        for start in range(0, len(self.squares), NUMBERS // PERMUTATIONS):
            squares = self.squares[start : start + NUMBERS // PERMUTATIONS]
            shape = len(squares), len(self.tokens)
            yield squares, _dense(sums, start, shape), _dense(products, start, shape)


def text_sums(
    code: Code, row: Int[Tensor, " tokens"], texts: int, units: int, weights: Float[Tensor, " tokens"] | None = None
) -> Float[Tensor, "texts units"]:
    """Return the weighted sums of all units' activations over the tokens of each text.

    Args:
        code: the code of the tokens.
        row: the text that each token is in.
        texts: number of texts.
        units: number of units.
        weights: the weight of each token; 1 by default.
    """
    code = code.cpu()
    values = code.activations.double()
    values = values if weights is None else values * weights.unsqueeze(-1)
    cells = row.unsqueeze(-1) * units + code.indices
    return values.new_zeros(texts * units).index_add_(0, cells.flatten(), values.flatten()).reshape(texts, units)


def _pearson(rows: Float[Tensor, "units texts"], score: Float[Tensor, " texts"]) -> Float[Tensor, " units"]:
    """Return Pearson's correlation of each row with the score; 0 for a constant row."""
    centred, score = rows - rows.mean(1, keepdim=True), score - score.mean()
    norms = centred.norm(dim=1)
    r = centred @ score / (norms * score.norm()).clamp_min(1e-300)
    return torch.where(norms > 1e-9 * rows.norm(dim=1), r, 0.0)


def _entries(dense: Float[Tensor, "texts units"], first: int) -> Entries:
    """Return the entries that are not zero; the rows are the texts from number ``first`` on."""
    text, unit = dense.nonzero(as_tuple=True)
    return unit, text + first, dense[text, unit]


def _by_unit(entries: Sequence[Entries]) -> Entries:
    """Return all entries sorted by unit, so that those of a range of units are one slice."""
    unit, text, value = (torch.cat(parts) for parts in zip(*entries, strict=True))
    order = unit.argsort()
    return unit[order], text[order], value[order]


def _dense(entries: Entries, start: int, shape: tuple[int, int]) -> Float[Tensor, "units texts"]:
    """Return the entries of ``shape[0]`` units from ``start`` on as a matrix."""
    unit, text, value = entries
    low, high = torch.searchsorted(unit, torch.tensor([start, start + shape[0]])).tolist()
    dense = value.new_zeros(shape)
    dense[unit[low:high] - start, text[low:high]] = value[low:high]
    return dense

"""Which of its active units does a layer keep? Those with the largest activations, or as many drawn at random.

Algorithm 1 of "Implicit bias in Soft MoE": sum each expert's coefficients over the tokens of an input, keep the k
experts with the largest sums, set the others to zero, and normalise nothing anew. Here units were active where their
sum is positive, and a share of those is kept. Sums are ``[texts, units]``, whatever the number of tokens.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.evaluation.correlation import text_sums
from mxd.layers import Code
from mxd.questions import SubsetMode


class Ranking(NamedTuple):
    """Units in an order, the active ones first."""

    places: Int[Tensor, "*lead units"]
    """The place of each unit, from 0."""
    active: Int[Tensor, "*lead"]
    """How many units are active."""

    def kept(self, share: float) -> Int[Tensor, "*lead"]:
        """Return how many units a share of the active ones is, rounded up."""
        return (share * self.active.double() - 1e-9).ceil().long()  # 1e-9: 0.07 of 100 is 7, not 8

    def first(self, share: float) -> Bool[Tensor, "*lead units"]:
        """Return which units are the first ``kept(share)``."""
        return self.places < self.kept(share).unsqueeze(-1)


def ranking(strengths: Float[Tensor, "*lead units"], scores: Float[Tensor, "*lead units"] | None = None) -> Ranking:
    """Return the order of units by their strengths.

    Args:
        strengths: how strong each unit is; it is active where this is positive.
        scores: order the active units by these numbers of at least 0 instead; draw them for a random order.
    """
    active = strengths > 0
    order = (
        (strengths if scores is None else scores).masked_fill(~active, -1).argsort(dim=-1, descending=True, stable=True)
    )
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return Ranking(torch.empty_like(order).scatter_(-1, order, place), active.sum(-1))


def strengths(
    mode: SubsetMode,
    code: Code,
    counted: Bool[Tensor, "texts seq"],
    later: Bool[Tensor, " seq"],
    corpus: Float[Tensor, " units"],
) -> Float[Tensor, "*lead _"]:
    """Return how strong units are where a mode chooses them.

    Args:
        mode: ``token``: at each token, of the units that the code lists; ``whole``: the sum over a text's tokens;
            ``prefix``: the sum over its first half; ``global``: the sum over a corpus.
        code: the code of some texts.
        counted: the tokens that count.
        later: the positions of the second half.
        corpus: the sums over the corpus.
    """
    if mode == "token":
        return code.activations
    if mode == "global":
        return corpus.unsqueeze(0).to(code.activations.device)
    seen = counted & ~later if mode == "prefix" else counted
    texts, seq = counted.shape
    row = torch.arange(texts).repeat_interleave(seq)
    sums = text_sums(code.reshape((texts * seq,)), row, texts, len(corpus), seen.flatten().double().cpu())
    return sums.to(code.activations.device)


def drawn(
    mode: SubsetMode, like: Float[Tensor, "*lead units"], texts: range, seed: int, draw: int
) -> Float[Tensor, "*lead units"]:
    """Return random scores; those of a text depend on its number, not on the texts it is read with.

    Args:
        mode: of choosing.
        like: the strengths.
        texts: the texts' numbers.
        seed: of all draws.
        draw: which draw.
    """
    if mode == "global":
        return torch.from_numpy(np.random.default_rng([seed, draw]).random(like.shape)).to(like.device)
    shape = like.shape[1:]
    rows = [np.random.default_rng([seed, draw, number]).random(shape, dtype=np.float32) for number in texts]
    return torch.from_numpy(np.stack(rows)).to(like.device)


def limited(mode: SubsetMode, code: Code, kept: Bool[Tensor, "*lead units"], at: Bool[Tensor, "texts seq"]) -> Code:
    """Return the code with all units switched off but those that are kept; other tokens stay as they are.

    Args:
        mode: of choosing.
        code: the code of some texts, ``[texts, seq, k]``.
        kept: for each token, of the units that the code lists; otherwise for each text, or for all, of all units.
        at: the tokens whose units are switched off.
    """
    if mode != "token":
        by_text = kept.expand(len(code.indices), -1)
        kept = by_text.gather(1, code.indices.flatten(1)).view(code.indices.shape)
    return Code(code.activations.masked_fill(at.unsqueeze(-1) & ~kept, 0), code.indices, code.all_units)

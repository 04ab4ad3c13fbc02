"""Product keys (Lample et al., 2019): n^2 units whose gate rows are made of two times n halves.

Unit ``(i, j)`` has number ``i n + j``. In head h its score is ``first_hi . q1 + second_hj . q2``, where ``q1`` and
``q2`` are what the halves read: both the whole input, or its two parts, or the two parts of a query ``x Q_h``.
"""

from math import isqrt

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from mxd.layers.gates import Gate
from mxd.ops import CandidateDtype, Selection


def keys_of(units: int) -> int:
    """Return n for n^2 units.

    Raises:
        ValueError: it is no square.
    """
    keys = isqrt(units)
    if keys**2 != units:
        raise ValueError(
            f"num_units = {units:,} is not a square: units are pairs of keys; give {keys**2:,} or {(keys + 1) ** 2:,}"
        )
    return keys


class ProductGate(Gate):
    """Scores of all pairs of halves in each head, without biases."""

    def __init__(
        self,
        first: Float[Tensor, "heads n first_width"],
        second: Float[Tensor, "heads n second_width"],
        query: Float[Tensor, "heads query d_in"] | None = None,
        whole: bool = False,
    ) -> None:
        """Take the keys.

        Args:
            first: keys of the first halves.
            second: keys of the second halves.
            query: the map of the input that each head reads; ``None``: the input itself.
            whole: whether both halves read all of that; otherwise ``first`` reads its first part and ``second`` the
                rest.
        """
        self.first, self.second, self.query, self.whole = first, second, query, whole
        self.heads, self.halves = first.shape[:2]
        self.units = self.halves**2

    def half_scores(
        self, x: Float[Tensor, "tokens d_in"]
    ) -> tuple[Float[Tensor, "tokens heads n"], Float[Tensor, "tokens heads n"]]:
        """Return the scores of the first and of the second halves: a pair's score is the sum of its two."""
        if self.query is None:  # all heads read the same: one product for each side
            sides = zip((self.first, self.second), (x, x) if self.whole else self._halves(x), strict=True)
            first, second = (F.linear(read, keys.flatten(0, 1)).unflatten(1, keys.shape[:2]) for keys, read in sides)
            return first, second
        one, other = self._read(x)
        return torch.einsum("thd,hnd->thn", one, self.first), torch.einsum("thd,hnd->thn", other, self.second)

    def best_pairs(
        self, x: Float[Tensor, "tokens d_in"], k: int
    ) -> tuple[Float[Tensor, "tokens heads {k}"], Int[Tensor, "tokens heads {k}"]]:
        """Return the scores and numbers of the ``k`` best pairs of each head, exactly.

        A pair of the i-th best half of one side and the j-th best of the other scores at most as much as each of the
        ``i j`` pairs of halves as good as these. So only pairs with ``i j <= k`` are compared: about ``k log k`` sums
        in place of ``n^2``.
        """
        (first, one), (second, other) = (scores.topk(min(k, self.halves)) for scores in self.half_scores(x))
        ranks = range(first.shape[-1])
        near = torch.tensor([(i, j) for i in ranks for j in ranks if (i + 1) * (j + 1) <= k], device=x.device)
        i, j = near.unbind(1)
        with torch.no_grad():
            chosen = (first[..., i] + second[..., j]).topk(k).indices
        i, j = i[chosen], j[chosen]
        scores = first.gather(-1, i) + second.gather(-1, j)
        return scores, one.gather(-1, i) * self.halves + other.gather(-1, j)

    def top(
        self, x: Float[Tensor, "tokens d_in"], k: int, candidates: CandidateDtype, selection: Selection
    ) -> tuple[Float[Tensor, "tokens k"], Int[Tensor, "tokens k"]]:
        """As ``Gate.top``, which product keys do not offer: they are chosen by head (``best_pairs``), or by halves.

        Args:
            x: what the layer reads.
            k: how many.
            candidates: as ``Gate.top``.
            selection: as ``Gate.top``.

        Raises:
            NotImplementedError: always; configs refuse the kinds of sparsity that would ask.
        """
        raise NotImplementedError("product keys are chosen by head or by halves, not by ReLU and top-k")

    def rows(self, ids: Int[Tensor, " k"], head: int = 0) -> tuple[Float[Tensor, "k d_in"], Float[Tensor, " k"]]:
        """Return the rows of some pairs, materialised, and biases of zero."""
        one, other = self.first[head, ids // self.halves], self.second[head, ids % self.halves]
        weight = one + other if self.whole else torch.cat([one, other], dim=-1)
        return (weight if self.query is None else weight @ self.query[head]), weight.new_zeros(len(ids))

    def project(self, v: Float[Tensor, " d_in"], head: int = 0) -> Float[Tensor, " units"]:
        """Return the scores of ``v`` in a head: n^2 sums, and no row is formed."""
        one, other = (half[head] for half in self._read(v))
        return ((self.first[head] @ one).unsqueeze(1) + (self.second[head] @ other).unsqueeze(0)).flatten()

    @torch.no_grad()
    def centre(self, mean_in: Float[Tensor, " d_in"]) -> None:
        """Take out of each key what is parallel to what it reads of the mean input: there are no biases to set."""
        for keys, read in zip((self.first, self.second), self._read(mean_in), strict=True):
            along = torch.einsum("hnd,hd->hn", keys, read) / read.square().sum(-1, keepdim=True).clamp_min(1e-30)
            keys -= along.unsqueeze(-1) * read.unsqueeze(1)

    def _scores(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens heads units"]:
        first, second = self.half_scores(x)
        return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(-2)

    def _read(
        self, x: Float[Tensor, "*tokens d_in"]
    ) -> tuple[Float[Tensor, "*tokens heads first_width"], Float[Tensor, "*tokens heads second_width"]]:
        """Return what the halves read in each head."""
        if self.query is None:
            read = x.unsqueeze(-2).expand(*x.shape[:-1], self.heads, -1)
        else:
            read = torch.einsum("...d,hqd->...hq", x, self.query)
        return (read, read) if self.whole else self._halves(read)

    def _halves(self, read: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch _"], Float[Tensor, "*batch _"]]:
        """Return what the first and the second keys read, side by side in one."""
        width = self.first.shape[-1]
        return read[..., :width], read[..., width:]

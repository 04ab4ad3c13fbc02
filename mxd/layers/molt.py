"""Sparse mixture of low-rank linear transforms (MOLT; Anthropic, Transformer Circuits Thread, 2025).

    y^ = sum_t a_t (x V_t^T) U_t + b [+ x S],   a = TopK(relu(x E^T + b_E), K),   V_t [r_t, d_in],  U_t [r_t, d_out]

A transform is a linear map of rank ``r_t``, and a token uses few of them. The post's ranks are 512, 256, 128, 64 and
32, each for twice as many transforms as the rank before. With rank 1 alone the layer is a transcoder of bilinear
features, ``a_t (x . v_t) u_t``; with rank 32 alone, the transforms of EleutherAI's clt-training.
"""

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from mxd.layers.base import ReplacementLayer, code_product, linear_init, zeros
from mxd.layers.config import MLPShape, ReplacementConfig
from mxd.layers.gates import Code, LinearGate
from mxd.ops import low_rank_mixture


class MOLTConfig(ReplacementConfig):
    """MOLT: sparse linear transforms of low rank; with ``skip``, plus a linear map of the input."""

    method: Literal["molt"] = "molt"
    """Selects this method."""
    rank: PositiveInt | None = None
    """Rank of the largest transforms; by default the power of two nearest to two thirds of the input's width, which is
    the post's 512 in GPT-2."""
    halvings: NonNegativeInt = 4
    """How often the rank halves (down to 1 at most), each time for twice as many transforms; 0: one rank for all."""
    skip: bool = False
    """Add ``x S``."""

    @property
    def label(self) -> str:
        """MOLT, or SMOLT with the skip."""
        return "SMOLT" if self.skip else "MOLT"

    @property
    def slug(self) -> str:
        """For example ``molt-r512-32-k32``, or ``molt-r1-k32`` where all ranks are one."""
        ranks = [str(rank) for rank in sorted({self.ranks[0], self.ranks[-1]}, reverse=True)]
        return f"{self.label.lower()}-r{'-'.join(ranks)}-{self.sparsity.slug}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, from the largest; as many as there are groups of transforms."""
        halved = [(self.rank or 1) >> step for step in range(min(self.halvings, 64) + 1)]
        return tuple(rank for rank in halved if rank)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many transforms have each rank: in proportion to 1, 2, 4 ..., rounded so that they add up.

        More transforms in all never make fewer of a rank or higher, so that the parameters grow with them.
        """
        units, whole = self.num_units or 0, 2 ** len(self.ranks) - 1
        ends = [(2 * units * (2**group - 1) + whole) // (2 * whole) for group in range(len(self.ranks) + 1)]
        return tuple(end - start for start, end in pairwise(ends))

    @property
    def total_rank(self) -> int:
        """The sum of all transforms' ranks: rows of U and V."""
        return sum(rank * count for rank, count in zip(self.ranks, self.counts, strict=True))

    @property
    def layer_params(self) -> int:
        """Gate with biases, U, V, output bias, and the skip's matrix."""
        d, o, n = self.d_in or 0, self.d_out or 0, self.num_units or 0
        return n * (d + 1) + self.total_rank * (d + o) + o + (d * o if self.skip else 0)

    def resolve(self, mlp: MLPShape) -> "MOLTConfig":
        """Take the widths from the base MLP, and the largest rank from the input's."""
        return super().resolve(mlp).with_defaults(rank=2 ** round(math.log2(max(1, 2 * mlp.d_in / 3))))

    def _make(self) -> "MOLT":
        return MOLT(self)


class MOLT(ReplacementLayer):
    """Mixture of low-rank linear transforms. Units are transforms, those of the largest rank first."""

    config: MOLTConfig

    def __init__(self, config: MOLTConfig) -> None:
        super().__init__(config)
        d, o, n, rows = config.d_in, config.d_out, config.num_units, config.total_rank
        assert d and o and n
        self.gate = linear_init(n, d, fan_in=d)
        self.gate_bias = zeros(n)
        self.down = nn.Parameter(torch.randn(rows, d) / math.sqrt(d))  # the rows of all V, one below the other
        self.up = zeros(rows, o)  # of all U
        self.skip = zeros(d, o) if config.skip else None
        ranks = [rank for rank, count in zip(config.ranks, config.counts, strict=True) for _ in range(count)]
        self._firsts = [0, *accumulate(ranks)]

    @property
    def gates(self) -> LinearGate:
        """``x @ gate.T + gate_bias``: one row for each transform."""
        return LinearGate(self.gate, self.gate_bias)

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``(x V_n^T) U_n``."""
        own = slice(self._firsts[n], self._firsts[n + 1])
        return (x.to(self.down.dtype) @ self.down[own].T) @ self.up[own]

    def unit_weight(self, n: int) -> Float[Tensor, "d_in d_out"]:
        """Return ``V_n^T U_n``."""
        own = slice(self._firsts[n], self._firsts[n + 1])
        return self.down[own].T @ self.up[own]

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||V_n^T U_n||_F``, whose square is ``tr((V_n V_n^T) (U_n U_n^T))``: two matrices [r, r] for each."""
        squares = []
        for rank, _, rows in self._groups():
            down, up = (weight[rows].unflatten(0, (-1, rank)) for weight in (self.down, self.up))
            squares.append(((down @ down.mT) * (up @ up.mT)).sum((1, 2)))
        return torch.cat(squares).clamp_min(1e-30).sqrt()

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return ``||V_n^T U_n||_F``: nothing of a transform's weight is shared."""
        return self.unit_norms()

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``; the output is bilinear in the input, and V carries its second unit."""
        skip = {"skip": (1, -1)} if self.skip is not None else {}
        return super().scaling() | {"gate": (1, 0), "down": (1, 0), "up": (0, -1)} | skip

    def _groups(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield each rank that some transform has, the numbers of these transforms, and their rows."""
        unit = 0
        for rank, count in zip(self.config.ranks, self.config.counts, strict=True):
            if count:
                yield rank, slice(unit, unit + count), slice(self._firsts[unit], self._firsts[unit + count])
            unit += count

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens d_in"]:
        return x  # transforms are linear

    def _rest(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens d_out"]:
        return super()._rest(x) if self.skip is None else torch.addmm(self.bias, x, self.skip)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens d_in"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        rest = self._rest(x)
        if hidden is not None:
            return code_product(code, self._outputs(hidden[:1].sum(0))) + rest  # one for all tokens
        if code.all_units:
            return self._of_all_units(x, code.activations) + rest
        sparse = (code.activations, code.indices, self.down, self.up, self._firsts, code.selection)
        return low_rank_mixture(x, *sparse) + rest

    def _outputs(self, x: Float[Tensor, " d_in"]) -> Float[Tensor, "units d_out"]:
        """Return what each transform makes of one input."""
        hidden, outputs = self.down @ x, []
        for rank, _, rows in self._groups():
            state, up = (part[rows].unflatten(0, (-1, rank)) for part in (hidden, self.up))
            outputs.append(torch.einsum("nr,nro->no", state, up))
        return torch.cat(outputs)

    def _of_all_units(
        self, x: Float[Tensor, "tokens d_in"], activations: Float[Tensor, "tokens units"]
    ) -> Float[Tensor, "tokens d_out"]:
        """Return the sum over all transforms, dense: what a code without a K costs."""
        total = x.new_zeros(len(x), self.up.shape[1])
        for rank, units, rows in self._groups():
            hidden = (x @ self.down[rows].T).unflatten(1, (-1, rank)) * activations[:, units].unsqueeze(-1)
            total = torch.addmm(total, hidden.flatten(1), self.up[rows])
        return total

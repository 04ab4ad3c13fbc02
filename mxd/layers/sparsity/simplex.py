"""Codes that sum to 1 for each token: entmax and softmax of normalised pre-activations (muMoE, section 3.1)."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity.base import Sparsity, SparsityConfig, every_unit, one_head

Norm = Literal["layer", "batch", "none"]

EPSILON = 1e-5
"""Added to variances."""

AT_ONCE = 2**18
"""Numbers of a part of the scores: 1 MiB in float32."""

MOMENTUM = 0.1
"""Weight of the newest step in the running moments of ``norm: batch``."""


class SoftmaxConfig(SparsityConfig):
    """Every unit is active, with shares that sum to 1."""

    simplex: ClassVar[bool] = True

    kind: Literal["softmax"] = "softmax"
    """Selects this kind."""
    norm: Norm = "layer"
    """What the pre-activations are normalised over first, to mean 0 and variance 1. ``layer``: the units, for each
    token (the paper's choice for language). ``batch``: the tokens of a training step, for each unit, and in evaluation
    by running moments (its choice for vision). ``none``: not at all."""

    @property
    def max_k(self) -> None:
        """Not bounded."""
        return None

    @property
    def slug(self) -> str:
        """For example ``softmax``, or ``softmax-batch``."""
        return "softmax" + self._suffix

    @property
    def _suffix(self) -> str:
        return "" if self.norm == "layer" else f"-{self.norm}"

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return Softmax(units, self.norm)


class EntmaxConfig(SoftmaxConfig):
    """Shares that sum to 1, as softmax's, of which most are exactly zero (Peters et al., 2019)."""

    kind: Literal["entmax"] = "entmax"  # type: ignore[assignment]
    """Selects this kind."""
    alpha: Literal[1.5] = 1.5
    """Between softmax (1) and a projection onto the simplex (2); 1.5 has an exact algorithm."""

    @property
    def slug(self) -> str:
        """For example ``entmax1.5``, or ``entmax1.5-batch``."""
        return f"entmax{self.alpha}" + self._suffix

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return Entmax(units, self.norm)


class Softmax(Sparsity):
    """``a = softmax(norm(x G + b_G))``.

    With ``norm: batch`` the moments are those of the whole step, over all its parts and processes, and are taken as
    constants by the backward pass, so that gradients do not depend on how the step is divided.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, units: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm
        if norm == "batch":
            self.register_buffer("mean", torch.zeros(units))
            self.register_buffer("variance", torch.ones(units))
        self.of_step: tuple[Tensor, Tensor] | None = None

    def begin_step(self, parts: Sequence[Float[Tensor, "_ d_in"]], gate: Gate) -> None:
        """Take the step's moments, where they are needed."""
        if self.norm == "batch":
            self.of_step = self._moments(parts, gate)

    def end_step(self) -> None:
        """Forget the step's moments."""
        self.of_step = None

    def forward(self, x: Float[Tensor, "tokens d_in"], gate: Gate) -> Code:
        """Return every unit's share."""
        scores = one_head(gate, x)
        if self.norm == "layer":
            scores = F.layer_norm(scores, scores.shape[-1:], eps=EPSILON)
        elif self.norm == "batch":
            mean, variance = self.mean, self.variance
            if self.training and len(x):
                mean, variance = self.of_step or self._moments([x], gate)
            scores = (scores - mean) * (variance + EPSILON).rsqrt()
        return every_unit(self._shares(scores))

    @torch.no_grad()
    def _moments(self, parts: Sequence[Float[Tensor, "_ d_in"]], gate: Gate) -> tuple[Tensor, Tensor]:
        """Return mean and variance of a step's pre-activations, and move the running ones."""
        tokens = self.processes.world * sum(map(len, parts))
        mean = self.processes.add(torch.stack([one_head(gate, part).sum(0) for part in parts]).sum(0)) / tokens
        squares = torch.stack([(one_head(gate, part) - mean).square().sum(0) for part in parts]).sum(0)
        variance = self.processes.add(squares) / tokens
        self.mean.lerp_(mean, MOMENTUM)
        self.variance.lerp_(variance, MOMENTUM)
        return mean, variance

    def _shares(self, scores: Float[Tensor, "tokens units"]) -> Float[Tensor, "tokens units"]:
        return scores.softmax(-1)


class Entmax(Softmax):
    """``a = entmax_1.5(norm(x G + b_G))``."""

    def _shares(self, scores: Float[Tensor, "tokens units"]) -> Float[Tensor, "tokens units"]:
        return entmax15(scores)


def entmax15(scores: Float[Tensor, "tokens units"]) -> Float[Tensor, "tokens units"]:
    """Return ``max(s / 2 - tau, 0)^2`` with each row's ``tau`` such that it sums to 1 (Peters et al., 2019)."""
    return _Entmax.apply(scores)


class _Entmax(torch.autograd.Function):
    """On a CPU a few rows at a time: each of the many passes over them then finds them in its cache."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        shares = torch.empty_like(scores)
        for part, out in zip(_parts(scores), _parts(shares), strict=True):
            half = torch.sub(part, part.amax(-1, keepdim=True), out=out).div_(2)
            half.sub_(_threshold(half)).clamp_min_(0).square_()
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (shares,) = ctx.saved_tensors
        back = torch.empty_like(shares)
        for share, upstream, out in zip(_parts(shares), _parts(grad), _parts(back), strict=True):
            root = share.sqrt()
            torch.mul(upstream, root, out=out)
            out.sub_(root.mul_(out.sum(-1, keepdim=True) / root.sum(-1, keepdim=True)))
        return back


def _parts(rows: Float[Tensor, "tokens units"]) -> Sequence[Float[Tensor, "_ units"]]:
    return rows.split(max(1, AT_ONCE // rows.shape[1])) if rows.device.type == "cpu" else (rows,)


def _threshold(half: Float[Tensor, "_ units"]) -> Float[Tensor, "_ 1"]:
    """Return each row's ``tau``, for half the scores less the largest of them."""
    # The largest share is at most 1, so tau is at least -1: what lies below has no share and need not be sorted.
    most = half.shape[-1] if half.is_meta or not len(half) else max(1, int(_above(half, -1.0).amax()))
    ordered = half.topk(most, dim=-1).values
    count = torch.arange(1, most + 1, device=half.device, dtype=half.dtype)
    mean = ordered.cumsum(-1) / count
    spread = ordered.square().cumsum(-1) - count * mean.square()  # sum of squares about the mean of the first
    tau = mean - ((1 - spread) / count).clamp_min(0).sqrt()
    support = (tau <= ordered).sum(-1, keepdim=True)
    return tau.gather(-1, support - 1)


def _above(rows: Float[Tensor, "_ units"], bound: float) -> Float[Tensor, " _"]:
    """Return how many numbers of each row exceed a bound; counted in float32, which is faster than truth values are."""
    return torch.gt(rows, bound, out=torch.empty_like(rows)).sum(-1, dtype=torch.float32)

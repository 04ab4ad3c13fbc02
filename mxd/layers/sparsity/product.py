"""Choices among product keys: halves (Monet, ICLR 2025, section 3), or pairs (PEER, arXiv 2407.04153)."""

import math
from abc import abstractmethod
from statistics import NormalDist
from typing import ClassVar, Literal, TypeVar, cast

import torch
from jaxtyping import Float
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from mxd.layers.gates import Code, Gate, PairCode, merged
from mxd.layers.product_gate import ProductGate, keys_of
from mxd.layers.sparsity.base import Norms, Sparsity, SparsityConfig

C = TypeVar("C", bound="HalvesConfig")

EPSILON = 1e-5
"""Added to variances."""
MOMENTUM = 0.1
"""Weight of a batch in the running moments."""
SMALLEST = 1e-12
"""Mean activations of halves are clamped here before their logarithm is taken."""


class HalvesConfig(SparsityConfig):
    """Some halves of each side, in each head; a softmax over them; all pairs of these are active."""

    general: ClassVar[bool] = False
    heads: PositiveInt | None = None
    """Heads of the router; by default one for each 256 of the model's width."""
    k: PositiveInt | None = None
    """Halves kept on each side in each head; by default one in 16."""
    balance: NonNegativeFloat = 1e-5
    """Weight of uniformity and ambiguity in the loss (``uniformity``, ``ambiguity``). The paper's 1e-3 goes with a
    language model's loss of about 3 nats."""

    @property
    def max_k(self) -> None:
        """Not stated: up to heads times k^2 pairs, fewer where heads agree."""
        return None

    def resolved(self: C, d_in: int, keys: int) -> C:
        """Return a copy with the open fields set.

        Args:
            d_in: width of what the router reads.
            keys: halves on each side.
        """
        known = {"heads": max(1, d_in // 256), "k": max(1, keys // 16)}
        return self.model_copy(update={name: getattr(self, name) or value for name, value in known.items()})


class ProductTopKConfig(HalvesConfig):
    """Keep the k largest halves of each side, exactly."""

    kind: Literal["product_topk"] = "product_topk"
    """Selects this kind."""

    @property
    def slug(self) -> str:
        """For example ``h2-k8``."""
        return f"h{self.heads}-k{self.k}"

    def build(self, units: int) -> "ProductTopK":
        """Build the module."""
        return ProductTopK(self, units)


class ProductQuantileConfig(HalvesConfig):
    """Keep the halves above a quantile of the normal distribution: about k of each side (Monet, section 3).

    Cheaper than the k largest on accelerators; k is met on average, and only where scores are about normal.
    """

    kind: Literal["product_quantile"] = "product_quantile"
    """Selects this kind."""

    @property
    def slug(self) -> str:
        """For example ``h2-q8``."""
        return f"h{self.heads}-q{self.k}"

    def build(self, units: int) -> "ProductQuantile":
        """Build the module."""
        return ProductQuantile(self, units)


class PairTopKConfig(SparsityConfig):
    """Keep the k best pairs of each head, a softmax over them; heads that choose the same unit add up (PEER)."""

    general: ClassVar[bool] = False
    kind: Literal["pair_topk"] = "pair_topk"
    """Selects this kind."""
    heads: PositiveInt = 8
    """Heads, each with keys of its own."""
    k: PositiveInt = 16
    """Units that each head chooses."""

    @property
    def max_k(self) -> int:
        """Heads times k."""
        return self.heads * self.k

    @property
    def slug(self) -> str:
        """For example ``h8-k16``."""
        return f"h{self.heads}-k{self.k}"

    def build(self, units: int) -> "PairTopK":
        """Build the module."""
        return PairTopK(self.k)


class Halves(Sparsity):
    """``g = softmax`` over the kept halves of each side; pair (i, j) is active with ``sum_h g1_hi g2_hj``."""

    measured: ClassVar[tuple[str, ...]] = ("uniformity", "ambiguity")

    def __init__(self, config: HalvesConfig, units: int) -> None:
        super().__init__()
        self.k, self.keys, self.balance = config.k or 1, keys_of(units), config.balance

    def forward(self, x: Tensor, gate: Gate) -> PairCode:
        """Choose among the halves of each side."""
        first, second = cast(ProductGate, gate).half_scores(x)
        return PairCode(self.activations(first, 0), self.activations(second, 1))

    @abstractmethod
    def activations(self, scores: Float[Tensor, "tokens heads n"], side: int) -> Float[Tensor, "tokens heads n"]:
        """Return the activations of one side's halves, exactly zero where not kept; each head's add up to 1."""

    def penalty(self, code: Code, unit_norms: Norms, factor_norms: Norms) -> Tensor:
        """As ``Sparsity.penalty``: ``balance (uniformity + ambiguity)`` (equation 18)."""
        if not self.balance:
            return code.zero()
        measures = self.measures(code)
        return self.balance * (measures["uniformity"] + measures["ambiguity"])

    def measures(self, code: Code) -> dict[str, Tensor]:
        """Return uniformity and ambiguity, means over both sides; the former over the whole batch of a group."""
        halves = [half.flatten(0, -3) for half in (cast(PairCode, code).first, cast(PairCode, code).second)]
        means = [half.mean(0) for half in halves]
        if self.training and self.processes.many:
            means = [self._over_processes(mean) for mean in means]
        return {
            "uniformity": sum((uniformity(mean) for mean in means), code.zero()) / 2,
            "ambiguity": sum((ambiguity(half) for half in halves), code.zero()) / 2,
        }

    def _over_processes(self, mean: Tensor) -> Tensor:
        """Return the mean over the group. The gradient is that of this process's part: gradients are averaged later."""
        whole = mean.detach().clone()
        self.processes.average([whole])
        return mean + (whole - mean.detach())


class ProductTopK(Halves):
    """The k largest halves of each side."""

    def activations(self, scores: Float[Tensor, "tokens heads n"], side: int) -> Float[Tensor, "tokens heads n"]:
        """Softmax over the k largest."""
        values, chosen = scores.topk(self.k)
        return torch.zeros_like(scores).scatter(-1, chosen, values.softmax(-1))


class ProductQuantile(Halves):
    """The halves whose scores, normalised over tokens and halves of a head, exceed ``Phi^-1(1 - k / n)``.

    In training the moments are those of the batch, over all processes of the group; in evaluation their running means,
    which are buffers. The best half of a token is always kept.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, config: HalvesConfig, units: int) -> None:
        super().__init__(config, units)
        self.threshold = NormalDist().inv_cdf(1 - self.k / self.keys) if self.k < self.keys else -math.inf
        self.register_buffer("mean", torch.zeros(2, config.heads or 1))
        self.register_buffer("variance", torch.ones(2, config.heads or 1))

    def activations(self, scores: Float[Tensor, "tokens heads n"], side: int) -> Float[Tensor, "tokens heads n"]:
        """Softmax of the scores themselves over those kept."""
        kept = self._kept(scores.detach(), side)
        return scores.masked_fill(~kept, -torch.inf).softmax(-1)

    @torch.no_grad()
    def _kept(self, scores: Tensor, side: int) -> Tensor:
        mean, variance = self._moments(scores, side) if self.training else (self.mean[side], self.variance[side])
        deviations = (scores - mean.unsqueeze(-1)) * (variance + EPSILON).rsqrt().unsqueeze(-1)
        return deviations >= deviations.amax(-1, keepdim=True).clamp_max(self.threshold)

    def _moments(self, scores: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Return the batch's moments for each head, and move the running ones towards them."""
        mean = scores.mean((0, 2))
        self.processes.average([mean])
        variance = (scores - mean.unsqueeze(-1)).square().mean((0, 2))
        self.processes.average([variance])
        self.mean[side].lerp_(mean, MOMENTUM)
        self.variance[side].lerp_(variance, MOMENTUM)
        return mean, variance


class PairTopK(Sparsity):
    """The k best pairs of each head, found exactly without scoring all."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Softmax over the k best of each head; a unit that several heads choose is active with the sum."""
        scores, units = cast(ProductGate, gate).best_pairs(x, self.widened(self.k, gate.units))
        return merged(scores.softmax(-1).flatten(1), units.flatten(1))


def uniformity(mean: Float[Tensor, "heads n"]) -> Float[Tensor, ""]:
    """Return ``-mean log g`` of halves' mean activations: log n where all are used equally, its minimum (equation 16).

    The mean over tokens is taken first; the formula as printed takes logarithms of zeros.
    """
    return -mean.clamp_min(SMALLEST).log().mean()


def ambiguity(halves: Float[Tensor, "tokens heads n"]) -> Float[Tensor, ""]:
    """Return ``1 - max_i g_i``, averaged over tokens and heads: 0 where each chooses one half alone (equation 17)."""
    return (1 - halves.amax(-1)).mean()

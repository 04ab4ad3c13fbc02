"""JumpReLU (Rajamanoharan et al., arXiv 2407.14435): every unit above a threshold of its own, which is learned."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity.base import Sparsity, SparsityConfig, every_unit, one_head

GAIN = 0.1
"""How fast thresholds follow the target: by this share of their mean for each e-fold by which L0 is off."""

CHUNK = 4096
"""Units whose rows are formed at a time to set the first thresholds."""

PART = 2**17
"""Pre-activations that the step takes at a time on a CPU: half a MiB of each matrix."""


class JumpReLUConfig(SparsityConfig):
    """Every unit above a threshold of its own is active. The thresholds are learned."""

    kind: Literal["jumprelu"] = "jumprelu"
    """Selects this kind."""
    l0: PositiveFloat | None = None
    """The number of units active for a token, on average, that training aims at: needed to train. ``None`` for layers
    imported from other tools."""
    bandwidth: PositiveFloat = 0.1
    """Width of the window about a threshold in which pre-activations move it, in units of pre-activations."""

    @property
    def max_k(self) -> None:
        """Not bounded."""
        return None

    @property
    def slug(self) -> str:
        """``jumprelu``, or with a target for example ``jumprelu32``."""
        return "jumprelu" if self.l0 is None else f"jumprelu{self.l0:g}"

    @property
    def needs_covariance(self) -> bool:
        """Where it is trained: the first thresholds are quantiles of the pre-activations."""
        return self.l0 is not None

    def check_units(self, units: int) -> None:
        """As ``SparsityConfig.check_units``: as many as are to be active are needed.

        Raises:
            ValueError: there are fewer.
        """
        if self.l0 is not None and self.l0 > units:
            raise ValueError(f"l0 = {self.l0:g} is more than num_units = {units}; lower l0 or raise num_units")

    def check_trainable(self) -> None:
        """As ``SparsityConfig.check_trainable``.

        Raises:
            ValueError: ``l0`` is not set.
        """
        if self.l0 is None:
            raise ValueError(
                "jumprelu without l0 is for imported layers; to train one, set sparsity.l0 to the number of units that "
                "are to be active for a token, on average"
            )

    def num_params(self, units: int) -> int:
        """One threshold for each unit."""
        return units

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return JumpReLU(units, self)


class JumpReLU(Sparsity):
    """``a = p (p > threshold)`` with ``p = relu(x G + b_G)``.

    The derivative of the step is that of a window of width ``bandwidth`` about the threshold (a rectangle kernel): with
    R = 1 inside of it and 0 elsewhere, ``d a / d threshold = -threshold R / bandwidth``; and
    ``d a / d p = (p > threshold)``.

    So the loss teaches thresholds how they are to differ, and L0 says how high they are to be: after each step all move
    by ``GAIN log(L0 / l0)`` of their mean, with the L0 of that step, but not below zero. The papers have a penalty on
    L0 in its place; Adam follows one too slowly to meet a target in short runs, and goes past it. With ``l0: null``
    nothing is held.
    """

    def __init__(self, units: int, config: JumpReLUConfig) -> None:
        super().__init__()
        self.config = config
        self.threshold = nn.Parameter(torch.zeros(units))
        self.active: list[Tensor] = []

    @torch.no_grad()
    def initialise(self, gate: Gate, mean_in: Float[Tensor, " d_in"], covariance: Float[Tensor, "d_in d_in"]) -> None:
        """Set each threshold where a normal distribution of its pre-activations exceeds it for ``l0 / N`` of tokens.

        Args:
            gate: the layer's gate, initialised.
            mean_in: mean of what the layer reads.
            covariance: its covariance.
        """
        rate = min(0.5, (self.config.l0 or 0) / gate.units)
        quantile = math.sqrt(2) * torch.erfinv(torch.tensor(1 - 2 * rate, dtype=torch.float64)).item()
        for ids in torch.arange(gate.units, device=mean_in.device).split(CHUNK):
            weight, bias = (part.to(covariance) for part in gate.rows(ids))
            deviation = ((weight @ covariance) * weight).sum(-1).clamp_min(0).sqrt()
            self.threshold[ids] = (weight @ mean_in.to(weight) + bias + quantile * deviation).clamp_min(0).float()

    @torch.no_grad()
    def end_step(self) -> None:
        """Move all thresholds alike, up where more units were active than asked for, but none below zero."""
        if self.config.l0 and self.active:
            l0 = torch.stack(self.active).mean()
            self.processes.average([l0])
            off = (l0 / self.config.l0).clamp_min(0.1).log()
            self.threshold.add_(GAIN * off * self.threshold.mean())
        self.threshold.clamp_min_(0)
        self.active = []

    def forward(self, x: Float[Tensor, "tokens d_in"], gate: Gate) -> Code:
        """Keep every pre-activation above its unit's threshold."""
        code = every_unit(_Jump.apply(one_head(gate, x), self.threshold, self.config.bandwidth))
        if self.training and self.config.l0 is not None:
            self.active.append(code.active_count() / max(1, len(x)))
        return code


class _Jump(torch.autograd.Function):
    """``p (p > threshold)`` with ``p = relu(pre)``, a few rows at a time, so that what lies between stays in cache.

    A threshold below zero is as good as zero, so ``pre`` needs no pass of its own, nor does its gradient.
    """

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(pre, threshold)
        ctx.bandwidth = bandwidth
        out, least = torch.empty_like(pre), threshold.clamp_min(0)
        for own, to_own in zip(*_parts(pre, out), strict=True):
            torch.mul(own, torch.gt(own, least, out=to_own), out=to_own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        pre, threshold = ctx.saved_tensors
        out, inside, least = torch.empty_like(grad), torch.zeros_like(threshold), threshold.clamp_min(0)
        for own, upstream, to_own in zip(*_parts(pre, grad, out), strict=True):
            torch.mul(upstream, torch.gt(own, least, out=to_own), out=to_own)
            distance = torch.relu(own).sub_(threshold).abs_()
            inside += distance.lt_(ctx.bandwidth / 2).mul_(upstream).sum(0)
        return out, -inside * threshold / ctx.bandwidth, None


def _parts(*full: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield, of each matrix, the parts of its rows that are taken at a time: on a CPU as much as stays in its cache."""
    rows, units = full[0].shape
    size = max(1, PART // units) if full[0].device.type == "cpu" else max(1, rows)
    for matrix in full:
        yield matrix.split(size)

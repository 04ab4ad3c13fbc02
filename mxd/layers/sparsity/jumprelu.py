"""JumpReLU (Rajamanoharan et al., arXiv 2407.14435): every unit above a threshold of its own, which is learned."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import PositiveFloat
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity.base import Norms, Sparsity, SparsityConfig, every_unit, one_head

GAIN = 0.2
"""How fast the penalty's weight follows: a step with twice the target multiplies it by ``2^GAIN``."""

DAMPING = 2
"""How much of the weight is for one step alone: after a step with twice the target it is ``2^DAMPING`` as large."""

CHUNK = 4096
"""Units whose rows are formed at a time to set the first thresholds."""


class JumpReLUConfig(SparsityConfig):
    """Every unit above a threshold of its own is active. The thresholds are learned."""

    kind: Literal["jumprelu"] = "jumprelu"
    """Selects this kind."""
    l0: PositiveFloat | None = None
    """The number of units active for a token, on average, that training aims at: needed to train. ``None`` for layers
    imported from other tools."""
    bandwidth: PositiveFloat = 0.1
    """Width of the window about a threshold in which pre-activations move it, in units of pre-activations."""
    penalty: PositiveFloat = 1e-3
    """Weight that the penalty ``L0 / l0`` begins with; it is then adapted until L0 is ``l0``."""

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


@dataclass
class _Counted(Code):
    """A code that knows how many units it has active, with the gradient that this has for the thresholds."""

    active: Float[Tensor, ""] | None = None
    """Mean number of active units."""


class JumpReLU(Sparsity):
    """``a = p (p > threshold)`` with ``p = relu(x G + b_G)``.

    Derivatives of the step are those of a window of width ``bandwidth`` about the threshold (a rectangle kernel): with
    R = 1 inside of it and 0 elsewhere, ``d a / d threshold = -threshold R / bandwidth`` and
    ``d (a > 0) / d threshold = -R / bandwidth``; ``d a / d p = (p > threshold)``. Thresholds below zero are set to zero
    after each step.

    The penalty is ``weight excess^DAMPING L0 / l0``, where ``excess`` is ``L0 / l0`` of the last step. After each step
    ``weight`` is multiplied by ``excess^GAIN``: it grows while more units are active than asked for, and falls while
    fewer are. (Adam moves thresholds by about its rate whatever the weight, so without damping L0 would overshoot.)
    With ``l0: null`` there is no penalty.
    """

    weight: Tensor
    excess: Tensor

    def __init__(self, units: int, config: JumpReLUConfig) -> None:
        super().__init__()
        self.config = config
        self.threshold = nn.Parameter(torch.zeros(units))
        if config.l0 is not None:
            self.register_buffer("weight", torch.tensor(config.penalty))
            self.register_buffer("excess", torch.ones(()))
        self.seen: list[Tensor] = []

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

    def begin_step(self, parts: Any, gate: Gate) -> None:
        """Begin to count active units."""
        self.seen = []

    @torch.no_grad()
    def end_step(self) -> None:
        """Keep thresholds from falling below zero, and adapt the penalty's weight."""
        self.threshold.clamp_min_(0)
        if self.config.l0 is not None and self.seen:
            active = torch.stack(self.seen).mean()
            self.processes.average([active])
            self.excess.copy_((active / self.config.l0).clamp(0.1, 10))
            self.weight *= self.excess**GAIN

    def forward(self, x: Float[Tensor, "tokens d_in"], gate: Gate) -> Code:
        """Keep every pre-activation above its unit's threshold."""
        positive = torch.relu(one_head(gate, x))
        code = every_unit(_Jump.apply(positive, self.threshold, self.config.bandwidth))
        if not self.training or self.config.l0 is None or not len(x):
            return code
        active = _Count.apply(positive.detach(), self.threshold, self.config.bandwidth) / len(x)
        self.seen.append(active.detach())
        return _Counted(code.activations, code.indices, all_units=True, active=active)

    def penalty(self, code: Code, unit_norms: Norms, factor_norms: Norms) -> Float[Tensor, ""]:
        """As ``Sparsity.penalty``: ``weight L0 / l0``, whose gradient reaches the thresholds alone."""
        if not isinstance(code, _Counted) or code.active is None or self.config.l0 is None:
            return code.zero()
        weight = self.weight * self.excess**DAMPING
        return weight.to(code.active) * code.active / self.config.l0


class _Jump(torch.autograd.Function):
    """``p (p > threshold)``."""

    @staticmethod
    def forward(ctx: Any, positive: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(positive, threshold)
        ctx.bandwidth = bandwidth
        return positive * (positive > threshold)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        positive, threshold = ctx.saved_tensors
        window = (positive - threshold).abs() < ctx.bandwidth / 2
        return grad * (positive > threshold), -(grad * window).sum(0) * threshold / ctx.bandwidth, None


class _Count(torch.autograd.Function):
    """The number of ``p > threshold``, over all tokens."""

    @staticmethod
    def forward(ctx: Any, positive: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(positive, threshold)
        ctx.bandwidth = bandwidth
        return (positive > threshold.clamp_min(0)).sum(dtype=positive.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        positive, threshold = ctx.saved_tensors
        window = (positive - threshold).abs() < ctx.bandwidth / 2
        return None, -grad * window.sum(0) / ctx.bandwidth, None

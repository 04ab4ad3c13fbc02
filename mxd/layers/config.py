"""A replacement layer's frozen configuration, and what it is made from: the base MLP's shape, weights and moments."""

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import PositiveInt, model_validator
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.common.settings import Frozen
from mxd.layers.sparsity import SPARSITIES, AnySparsity, Sparsity, TopKConfig

if TYPE_CHECKING:
    from mxd.layers.base import ReplacementLayer

C = TypeVar("C", bound="ReplacementConfig")

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "silu"]
Initialisation = Literal["paper", "centred"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True)
class MLPShape:
    """What a replacement needs to know of the MLP it replaces; ``None`` where it could not be read."""

    d_in: int
    d_out: int
    hidden: int | None = None
    activation: Activation | None = None
    glu: bool | None = None


@dataclass(frozen=True)
class MLPWeights:
    """A base MLP's weights: ``y = act(x E^T + b_E) D + b``, or ``y = (act(x E_glu^T) * (x E^T + b_E)) D + b``."""

    encoder: Float[Tensor, "hidden d_in"]
    encoder_bias: Float[Tensor, " hidden"] | None
    encoder_glu: Float[Tensor, "hidden d_in"] | None
    decoder: Float[Tensor, "hidden d_out"]
    decoder_bias: Float[Tensor, " d_out"] | None


@dataclass(frozen=True)
class Covariance:
    """Second moments of the first window's tokens about their means, in float64."""

    read: Float[Tensor, "d_in d_in"]
    """Covariance of what the layer reads."""
    cross: Float[Tensor, "d_in d_out"]
    """Covariance of what the layer reads with the MLP's outputs."""
    out: Float[Tensor, "d_out d_out"]
    """Covariance of the MLP's outputs."""


def transcoder_params(d_in: int, d_out: int, width: int) -> int:
    """Return the number of parameters of a transcoder: encoder, its biases, decoder, output bias.

    Args:
        d_in: width of its input.
        d_out: width of its output.
        width: number of features.
    """
    return width * (d_in + 1) + width * d_out + d_out


class ReplacementConfig(Frozen, ABC):
    """Fields common to all methods. ``None`` means: take it from the base MLP, or size it to the budget."""

    reads: ClassVar[Literal["mlp_in", "mlp_out"]] = "mlp_in"
    """Which tensor the layer is given: the MLP's input, or (autoencoders) its output."""
    kinds: ClassVar[tuple[str, ...]] = ()
    """The kinds of sparsity the method works with; empty: all that are ``general``."""
    inherits: ClassVar[tuple[str, ...]] = ()
    """The fields that ``resolve`` takes from the base MLP, besides the widths."""
    solves: ClassVar[str] = "num_units"
    """The field that ``sized`` solves for; it is open until then."""

    d_in: PositiveInt | None = None
    """Width of the layer's input; taken from the base model."""
    d_out: PositiveInt | None = None
    """Width of the layer's output; taken from the base model."""
    num_units: PositiveInt | None = None
    """Number of units (experts or features); by default sized to the parameter budget."""
    sparsity: AnySparsity = TopKConfig()
    """How units are chosen."""
    bos_constant: bool = False
    """Store the MLP's input and output at BOS in position 0, the same in every context of a causal model, and answer
    with that output there. Set from ``data.bos_constant``."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The method's short name in tables and figures, as the papers write it."""

    @property
    def num_params(self) -> int:
        """The number of parameters; equals the sum over the built layer's parameters."""
        return self.learned_params + ((self.d_in or 0) + (self.d_out or 0) if self.bos_constant else 0)

    @property
    def learned_params(self) -> int:
        """The number of learnable parameters: all but a stored constant."""
        return self.layer_params + self.sparsity.num_params(self.num_units or 0)

    @property
    @abstractmethod
    def layer_params(self) -> int:
        """The number of learnable parameters without those of the sparsity (thresholds)."""

    @property
    def unfactorised_params(self) -> int:
        """``num_params`` if every unit's weight were stored by itself; the same where nothing is shared."""
        return self.num_params

    def active_params(self, l0: float) -> float:
        """Return the parameters that a token's output depends on: those that units share, and those of active units.

        Args:
            l0: units active for a token, on average.
        """
        shared = self.model_copy(update={"num_units": 0}).layer_params
        return shared + l0 * (self.layer_params - shared) / (self.num_units or 1)

    @property
    def needs_covariance(self) -> bool:
        """Whether ``ReplacementLayer.initialise`` asks for a ``Covariance``."""
        return self.sparsity.needs_covariance

    def resolve(self: C, mlp: MLPShape) -> C:
        """Return a copy whose open fields are taken from the base MLP (all but ``num_units``).

        Raises:
            MxdError: some of them could not be read from the base MLP and the config does not state them.
        """
        known = {name: getattr(mlp, name) for name in self.inherits}
        if missing := [name for name, value in known.items() if getattr(self, name) is None and value is None]:
            names = ", ".join(missing)
            raise MxdError(
                f"{self.label}: the base MLP's {names} could not be read from the model; set {names} of the "
                "replacement in the config (docs/models.md)."
            )
        return self.with_defaults(d_in=mlp.d_in, d_out=mlp.d_out, **known)

    def paper_units(self, width: int) -> int | None:
        """Return the number of units by the MxD paper's convention, against a transcoder of ``width`` features.

        ``None``, as here, where it states no convention.
        """
        return None

    @abstractmethod
    def _make(self) -> "ReplacementLayer":
        """Make the module; weights are drawn from torch's global generator."""

    def build(self, seed: int = 0) -> "ReplacementLayer":
        """Build the layer with the paper's initialisation, the same for the same seed, in float32 on the CPU.

        Raises:
            MxdError: a field is still open.
        """
        missing = [name for name in type(self).model_fields if getattr(self, name) is None]
        if missing:
            raise MxdError(
                f"cannot build {self.label}: {', '.join(missing)} not set; "
                "call config.resolve(mlp_shape) and mxd.layers.size(...), or give the values."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = self._make()
        layer.sparsity.seed(seed)
        return layer

    def sized(self: C, budget: int) -> C:
        """Return a copy with the number of units whose true parameter count is nearest to ``budget``.

        A stored constant is not part of the budget. This solves for ``num_units``, by bisection, since the count grows
        with it; a method whose units come in other steps (product keys, hierarchies) says what it grows by (``grown``).
        Where the sparsity takes only multiples of some number of units, it is the nearest of these.

        Args:
            budget: number of parameters.

        Raises:
            MxdError: the widths are not known yet, or the parts that all units share (encoder, decoder, skip) alone
                exceed the budget.
        """
        if self.d_in is None or self.d_out is None:
            raise MxdError(f"cannot size {self.label}: d_in and d_out not set; call config.resolve(mlp_shape) first.")

        def params(units: int) -> int:
            return self.grown(units).learned_params

        above = 1
        while params(above) < budget:
            above *= 2
        enough = bisect.bisect_left(range(above), budget, key=params)
        nearest = min((max(enough - 1, 0), enough), key=lambda units: abs(params(units) - budget))
        units = self.sparsity.nearest_units(nearest)
        if units < 1:
            raise self.unpaid(budget, params(0))
        return self.grown(units)

    def grown(self: C, units: int) -> C:
        """Return a copy with ``units`` of what ``sized`` solves for: units, keys, or experts of the first level."""
        return self.model_copy(update={"num_units": units})

    def paper_sized(self: C, width: int) -> C:
        """Return a copy sized by the MxD paper's convention, against a transcoder of ``width`` features.

        Where it states none, to the transcoder's true parameters.
        """
        units = self.paper_units(width)
        if units is None:
            return self.sized(transcoder_params(self.d_in or 0, self.d_out or 0, width))
        return self.model_copy(update={"num_units": self.sparsity.nearest_units(units)})

    def unpaid(self, budget: int, shared: int) -> MxdError:
        """Return the error of a budget that does not pay for what all units share.

        Args:
            budget: number of parameters.
            shared: those that no unit owns.
        """
        return MxdError(
            f"{self.label}: a budget of {budget:,} parameters does not pay for the part its units share "
            f"({shared:,}); raise sizing.expansion."
        )

    @property
    def slug(self) -> str:
        """A name for folders: the method and its sparsity, for example ``mxd-k32``."""
        return f"{self.label.lower()}-{self.sparsity.slug}"

    @property
    def summary(self) -> str:
        """The method, its sparsity, widths and size in one line."""
        units = "?" if self.num_units is None else f"{self.num_units:,}"
        size = "" if self.num_units is None or self.d_in is None else f", {self.num_params:,} parameters"
        return f"{self.label} {self.sparsity.slug}, N = {units}, {self.d_in or '?'} -> {self.d_out or '?'}{size}"

    @property
    def own_kinds(self) -> tuple[str, ...]:
        """The kinds of sparsity that this form of the method works with; empty: all that are ``general``."""
        return self.kinds

    def build_sparsity(self) -> Sparsity:
        """Build the module that chooses units."""
        return self.sparsity.build(self.num_units or 0)

    def with_defaults(self: C, **fields: object) -> C:
        """Return a validated copy with the fields that are still ``None`` here set to the given values."""
        open_fields = {k: v for k, v in fields.items() if getattr(self, k) is None}
        return type(self).model_validate(self.model_dump() | open_fields)

    @model_validator(mode="after")
    def _check_kind(self) -> "ReplacementConfig":
        kind, own = self.sparsity.kind, self.own_kinds
        if (kind not in own) if own else not self.sparsity.general:
            choices = own or tuple(name for name, config in SPARSITIES.items() if config.general)
            raise ValueError(f"sparsity {kind} does not work with {self.label}; choose {', '.join(choices)}")
        return self

    @model_validator(mode="after")
    def _check_units(self) -> "ReplacementConfig":
        if self.num_units is not None:
            self.sparsity.check_units(self.num_units)
        return self

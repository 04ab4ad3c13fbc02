"""The contract of a replacement layer: what every method offers, and all that the rest of mxd may use.

layer(x)                 -> y^      drop-in for the MLP: any leading shape, same dtype out
layer.encode(x)          -> Code    which units are active, and how strongly
layer.decode(x, code)    -> y^      layer(x) == layer.decode(x, layer.encode(x)), always
layer.gates              -> Gate    how pre-activations are made: scores, the largest, rows, projections
layer.hidden(x)          -> what the units' outputs depend on linearly; ``decode`` accepts another in its place
layer.unit_output(n, x)  -> [..., d_out]  the direction unit n adds, where the layer is additive
layer.unit_weight(n)     -> the unit's weight, materialised
layer.config             -> its frozen config; ``config.num_params`` equals the sum over parameters
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator
from torch import Tensor, nn

from mxd.common.errors import MxdError
from mxd.layers.gates import Code, Gate
from mxd.layers.sparsity import AnySparsity, TopKConfig
from mxd.ops import sparse_decode

C = TypeVar("C", bound="ReplacementConfig")
T = TypeVar("T")

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Initialisation = Literal["paper", "centred"]

BOS_RADIUS = 0.05
"""An input within this distance of the stored BOS input, relative to its norm, is taken for BOS. In float32 BOS itself
is less than 1e-5 away. At block 28 of SmolLM2 one token in 6,000, the first words of contexts, comes nearer than this
(0.002 to 0.05): the stored constant is used there, too, and is off by up to 20%. At block 9 the nearest other token is
0.045 away, an EOS."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
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


class ReplacementConfig(BaseModel, ABC):
    """Fields common to all methods. ``None`` means: take it from the base MLP, or size it to the budget."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    reads: ClassVar[Literal["mlp_in", "mlp_out"]] = "mlp_in"
    """Which tensor the layer is given: the MLP's input, or (autoencoders) its output."""

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
    @abstractmethod
    def learned_params(self) -> int:
        """The number of learnable parameters: all but a stored constant."""

    @abstractmethod
    def resolve(self, mlp: MLPShape) -> "ReplacementConfig":
        """Return a copy whose open fields are taken from the base MLP (all but ``num_units``)."""

    @abstractmethod
    def paper_units(self, width: int) -> int:
        """Return the number of units by the MxD paper's convention, against a transcoder of ``width`` features."""

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

        A stored constant is not part of the budget. This solves for ``num_units``: the count is affine in it, so two
        evaluations determine it. A method where it is not (product keys, hierarchies) solves for a field of its own.

        Args:
            budget: number of parameters.

        Raises:
            MxdError: the parts that all units share (encoder, decoder, skip) alone exceed the budget.
        """
        one, two = (self.model_copy(update={"num_units": n}).learned_params for n in (1, 2))
        per_unit = two - one
        units = round((budget - one) / per_unit) + 1
        if units < 1:
            raise MxdError(
                f"{self.label}: a budget of {budget:,} parameters does not pay for the part its units share "
                f"({one - per_unit:,}); raise sizing.expansion."
            )
        return self.model_copy(update={"num_units": units})

    @property
    def slug(self) -> str:
        """A name for folders: the method and its sparsity, for example ``mxd-k32``."""
        return f"{self.label.lower()}-{self.sparsity.slug}"

    def with_defaults(self: C, **fields: object) -> C:
        """Return a validated copy with the fields that are still ``None`` here set to the given values."""
        open_fields = {k: v for k, v in fields.items() if getattr(self, k) is None}
        return type(self).model_validate(self.model_dump() | open_fields)

    @model_validator(mode="after")
    def _check_k(self) -> "ReplacementConfig":
        k = self.sparsity.max_k
        if self.num_units is not None and k is not None and k > self.num_units:
            raise ValueError(f"k = {k} is more than num_units = {self.num_units}; lower k or raise num_units")
        return self


class ReplacementLayer(nn.Module, ABC):
    """Base of all layers; a subclass defines ``gates``, ``_hidden``, ``_decode`` and the unit views."""

    additive: ClassVar[bool] = True
    """Whether ``y^ = b + rest(x) + sum_n a_n unit_output(n, x)``. Where not, there is no ``unit_output`` and no
    steering; changed codes decode all the same."""

    def __init__(self, config: ReplacementConfig) -> None:
        super().__init__()
        self.config = config
        self.sparsity = config.sparsity.build(config.num_units or 0)
        self.bias = nn.Parameter(torch.zeros(config.d_out or 0))
        self.bos_in = _constant(config.d_in) if config.bos_constant else None
        self.bos_out = _constant(config.d_out) if config.bos_constant else None

    @property
    def num_units(self) -> int:
        """Number of units."""
        return self.config.num_units or 0

    def read(self, x: T, y: T) -> T:
        """Return which of the two the layer reads: what belongs to the MLP's input, or what belongs to its output.

        Both are activations, means, widths, or modules that make activations of the input.
        """
        return x if self.config.reads == "mlp_in" else y

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return the layer's prediction of the MLP's output, in the dtype of ``x``."""
        return self.decode(x, self.encode(x))

    def decode(
        self,
        x: Float[Tensor, "*batch d_in"],
        code: Code,
        hidden: Float[Tensor, " width"] | None = None,
    ) -> Float[Tensor, "*batch d_out"]:
        """Return the output for a given code (changed codes are how units are ablated and masked).

        Args:
            x: what the layer reads.
            code: which units are active, and how strongly.
            hidden: one hidden state for all tokens, in place of each token's own. With the mean over tokens every unit
                adds its mean direction, since ``unit_output`` is linear in it.
        """
        rows = self._rows(x)
        states = self._hidden(rows) if hidden is None else hidden.to(rows).expand(len(rows), -1)
        out = self._decode(rows, code.reshape(rows.shape[:1]), states)
        if self.bos_out is not None:
            out = torch.where(self._at_bos(rows).unsqueeze(-1), self.bos_out, out)
        return out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)

    def hidden(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch width"]:
        """Return what units' outputs depend on: each ``unit_output`` is a linear function of it, the same for any x.

        Its width depends on the method: 0 where units add fixed directions.
        """
        hidden = self._hidden(self._rows(x))
        return hidden.reshape(*x.shape[:-1], hidden.shape[-1])

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Code:
        """Return which units are active and how strongly."""
        code: Code = self.sparsity(self._rows(x), self.gates)
        return code.reshape(x.shape[:-1])

    def at_bos(self, x: Float[Tensor, "*batch d_in"]) -> Bool[Tensor, "*batch"]:
        """Return where the input is that of BOS, up to ``BOS_RADIUS``, so that the output is the stored constant."""
        return self._at_bos(self._rows(x)).reshape(x.shape[:-1])

    @torch.no_grad()
    def store_bos(self, read: Float[Tensor, " d_in"], out: Float[Tensor, " d_out"]) -> None:
        """Store what the layer reads, and what the MLP returns, at BOS in position 0.

        Raises:
            MxdError: the config has no ``bos_constant``.
        """
        if self.bos_in is None or self.bos_out is None:
            raise MxdError(f"this {self.config.label} layer stores no constant; set bos_constant in its config.")
        self.bos_in.copy_(read)
        self.bos_out.copy_(out)

    def pre_activations(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch units"]:
        """Return the dense pre-activations of all units, before ReLU and top-k; with several heads, their maximum.

        Raises:
            MxdError: as ``Gate.scores``.
        """
        return self.gates.scores(self._rows(x)).amax(1).reshape(*x.shape[:-1], self.num_units)

    def unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return the direction that unit ``n`` adds to the output, per unit of activation.

        Raises:
            MxdError: the layer is not additive.
        """
        self.check_additive()
        return self._unit_output(n, x).to(x.dtype)

    def check_additive(self) -> None:
        """Check that the layer has unit outputs, which steering needs.

        Raises:
            MxdError: the layer is not additive.
        """
        if not self.additive:
            raise MxdError(
                f"a unit of {self.config.label} adds no direction of its own to the output, since its parts interact; "
                "mask it instead (mxd mask, or the mask of mxd.spliced)."
            )

    def penalty(self, code: Code) -> Float[Tensor, ""]:
        """Return what the sparsity adds to the training loss: zero for top-k, the L1 term for ReLU + L1."""
        return self.sparsity.penalty(code, self.unit_norms, self.factor_norms)

    @torch.no_grad()
    def initialise(
        self, mean_in: Float[Tensor, " d_in"], mean_out: Float[Tensor, " d_out"], start: Initialisation = "paper"
    ) -> None:
        """Set the parameters that are initialised from data.

        Args:
            mean_in: mean of what the layer reads.
            mean_out: mean of the MLP's outputs; the output bias begins there (MxD, section 3.1).
            start: ``paper`` leaves the rest as drawn. ``centred`` also centres the pre-activations, so that all units
                are active equally often at first and few die (not in the paper: docs/recipes.md).
        """
        self.bias.copy_(mean_out)
        if start == "centred":
            self.gates.centre(mean_in)

    @property
    @abstractmethod
    def gates(self) -> Gate:
        """How the units' pre-activations are made."""

    @abstractmethod
    def unit_weight(self, n: int) -> Float[Tensor, "rows d_out"]:
        """Return unit ``n``'s weight, materialised: a matrix for experts, one row for features."""

    @abstractmethod
    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return the Frobenius norm of each unit's weight, without materialising the weights."""

    @abstractmethod
    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return the norm of the part of each unit's weight that is not shared: a row of ``C``, or of the decoder."""

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return the direction of an additive layer's unit, in any dtype."""
        raise NotImplementedError

    @abstractmethod
    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens width"]:
        """Return the hidden state of each row."""

    @abstractmethod
    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens width"]
    ) -> Float[Tensor, "tokens d_out"]:
        """Decode rows, given their hidden states."""

    def _at_bos(self, rows: Float[Tensor, "tokens d_in"]) -> Bool[Tensor, " tokens"]:
        if self.bos_in is None:
            return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        rows, stored = rows.float(), self.bos_in.float()  # squares of float16 overflow
        size = stored.square().sum()  # 0 until something is stored: then no row is near enough
        # |r - s|^2 = |r|^2 - 2 r.s + |s|^2, which needs no [tokens, d_in] temporary
        distance = torch.linalg.vecdot(rows, rows) - 2 * (rows @ stored) + size
        return distance < BOS_RADIUS**2 * size

    def _rows(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "tokens width"]:
        """Return inputs as rows in the layer's dtype; refuse another width."""
        if x.shape[-1] != self.config.d_in:
            raise MxdError(
                f"{self.config.label} layer expects inputs of width {self.config.d_in}, got {tuple(x.shape)}"
            )
        return x.reshape(-1, x.shape[-1]).to(self.bias.dtype)


def code_product(code: Code, weight: Float[Tensor, "units columns"]) -> Float[Tensor, "tokens columns"]:
    """Return ``a @ weight`` for the code ``a``: a dense product where all units are listed, else a sparse one."""
    if code.all_units and len(code.activations) > 1 and code.activations.stride(0) == 0:
        return (code.activations[:1] @ weight).expand(len(code.activations), -1)  # one code for every token
    if code.all_units:
        return code.activations @ weight
    return sparse_decode(code.activations, code.indices, weight, code.selection)


def linear_init(rows: int, columns: int, fan_in: int) -> nn.Parameter:
    """Return a parameter drawn as ``nn.Linear`` draws its weight: uniform in +-1/sqrt(fan_in).

    Args:
        rows: its first dimension.
        columns: its second dimension.
        fan_in: inputs of the linear map, whichever dimension that is.
    """
    bound = 1 / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(rows, columns).uniform_(-bound, bound))


def _constant(width: int | None) -> nn.Parameter:
    return nn.Parameter(torch.zeros(width or 0), requires_grad=False)


def zeros(*shape: int) -> nn.Parameter:
    """Return a parameter of zeros."""
    return nn.Parameter(torch.zeros(*shape))

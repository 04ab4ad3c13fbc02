"""The contract of a replacement layer: what every method offers, and all that the rest of mxd may use.

layer(x)                 -> y^      drop-in for the MLP: any leading shape, same dtype out
layer.encode(x)          -> Code    which units, how strongly
layer.decode(x, code)    -> y^      layer(x) == layer.decode(x, layer.encode(x)), always
layer.unit_output(n, x)  -> [..., d_out]  the direction unit n adds
layer.unit_weight(n)     -> the unit's weight, materialised
layer.config             -> its frozen config; ``config.num_params`` equals the sum over parameters
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator
from torch import Tensor, nn

from mxd.errors import MxdError
from mxd.layers.sparsity import AnySparsity, TopKConfig
from mxd.ops import sparse_decode

C = TypeVar("C", bound="ReplacementConfig")

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Start = Literal["paper", "transcoder"]

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


class Code(NamedTuple):
    """A sparse code: unit ``indices[..., k]`` is active with strength ``values[..., k]``; zero means not active.

    ``all_units`` says that the indices are 0 ... N - 1 in order, so that a dense product may be used.
    """

    values: Float[Tensor, "*batch k"]
    indices: Int[Tensor, "*batch k"]
    all_units: bool = False


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

    @property
    @abstractmethod
    def label(self) -> str:
        """The method's short name in tables and figures, as the papers write it."""

    @property
    @abstractmethod
    def num_params(self) -> int:
        """The number of learnable parameters; equals the sum over the built layer's parameters."""

    @abstractmethod
    def inherit(self, mlp: MLPShape) -> "ReplacementConfig":
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
                "call config.inherit(mlp_shape) and mxd.layers.size(...), or give the values."
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = self._make()
        layer.sparsity.begin(seed)
        return layer

    @property
    def slug(self) -> str:
        """A name for folders: the method and its sparsity, for example ``mxd-k32``."""
        return f"{self.label.lower()}-{self.sparsity.slug}"

    def given(self: C, **fields: object) -> C:
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
    """Base of all layers; a subclass defines ``pre_activations``, ``encode``, ``_decode`` and the unit views."""

    def __init__(self, config: ReplacementConfig) -> None:
        super().__init__()
        self.config = config
        self.sparsity = config.sparsity.build(config.num_units or 0)
        self.bias = nn.Parameter(torch.zeros(config.d_out or 0))

    @property
    def num_units(self) -> int:
        """Number of units."""
        return self.config.num_units or 0

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return the layer's prediction of the MLP's output, in the dtype of ``x``."""
        return self.decode(x, self.encode(x))

    def decode(self, x: Float[Tensor, "*batch d_in"], code: Code) -> Float[Tensor, "*batch d_out"]:
        """Return the output for a given code (changed codes are how units are ablated and masked)."""
        rows = Code(
            code.values.reshape(-1, code.values.shape[-1]),
            code.indices.reshape(-1, code.indices.shape[-1]),
            code.all_units,
        )
        out = self._decode(self._rows(x), rows)
        return out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Code:
        """Return which units are active and how strongly."""
        values, indices, all_units = self.sparsity(self._rows(x), *self.gate_parameters())
        shape = (*x.shape[:-1], values.shape[-1])
        return Code(values.reshape(shape), indices.reshape(shape), all_units)

    def pre_activations(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch units"]:
        """Return the dense pre-activations of all units, before ReLU and top-k (for probing)."""
        return F.linear(x.to(self.bias.dtype), *self.gate_parameters())

    def penalty(self, code: Code) -> Float[Tensor, ""]:
        """Return what the sparsity adds to the training loss: zero for top-k, the L1 term for ReLU + L1."""
        return self.sparsity.penalty(code.values, self.unit_norms, self.factor_norms)

    @torch.no_grad()
    def start(self, mean_in: Float[Tensor, " d_in"], mean_out: Float[Tensor, " d_out"], start: Start = "paper") -> None:
        """Take from the data what training begins with.

        Args:
            mean_in: mean of what the layer reads.
            mean_out: mean of the MLP's outputs; the output bias begins there (MxD, section 3.1).
            start: ``paper`` leaves the rest as drawn. ``transcoder`` also centres the pre-activations, so that all
                units are active equally often at first and few die, and makes a layer with a dense part begin as a
                transcoder (this project's, docs/recipes.md).
        """
        self.bias.copy_(mean_out)
        if start == "transcoder":
            weight, bias = self.gate_parameters()
            bias.copy_(-(weight @ mean_in))

    @abstractmethod
    def gate_parameters(self) -> tuple[Float[Tensor, "units d_in"], Float[Tensor, " units"]]:
        """Return weight and bias of the linear map whose outputs are the units' pre-activations."""

    @abstractmethod
    def unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return the direction that unit ``n`` adds to the output per unit of its strength."""

    @abstractmethod
    def unit_weight(self, n: int) -> Float[Tensor, "rows d_out"]:
        """Return unit ``n``'s weight, materialised: a matrix for experts, one row for features."""

    @abstractmethod
    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return the Frobenius norm of each unit's weight, without materialising the weights."""

    @abstractmethod
    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return the norm of what of each unit's weight is its own: a row of ``C``, or of a feature's decoder."""

    @abstractmethod
    def _decode(self, x: Tensor, code: Code) -> Tensor:
        """Decode rows ``[tokens, d_in]``."""

    def _rows(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.config.d_in:
            raise MxdError(
                f"{self.config.label} layer expects inputs of width {self.config.d_in}, got {tuple(x.shape)}"
            )
        return x.reshape(-1, x.shape[-1]).to(self.bias.dtype)


def code_product(code: Code, weight: Tensor) -> Tensor:
    """Return ``a @ weight`` for the code ``a``: dense where all units are listed, sparse elsewhere."""
    if code.all_units and len(code.values) > 1 and code.values.stride(0) == 0:
        return (code.values[:1] @ weight).expand(len(code.values), -1)  # one code for every token
    if code.all_units:
        return code.values @ weight
    return sparse_decode(code.values, code.indices, weight)


def linear_init(rows: int, columns: int, fan_in: int) -> nn.Parameter:
    """Return a parameter drawn as ``nn.Linear`` draws its weight: uniform in +-1/sqrt(fan_in)."""
    bound = 1 / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(rows, columns).uniform_(-bound, bound))


def zeros(*shape: int) -> nn.Parameter:
    """Return a parameter of zeros."""
    return nn.Parameter(torch.zeros(*shape))

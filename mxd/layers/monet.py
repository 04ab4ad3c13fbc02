"""Monet (Park et al., ICLR 2025): n^2 experts put together from two times n halves, chosen by product keys.

    y^ = b + sum_ij a_ij E_ij(x),   a_ij = sum_h g1_hi g2_hj,   unit (i, j) = i n + j

    E_ij(x) = V_j u_i + c_j                      horizontal (equation 12)        u_i  = phi(U_i x + b_i)
    E_ij(x) = [V11_i u1_i + V12_i u2_j + c1_i ;
               V21_j u1_i + V22_j u2_j + c2_j]   vertical (equation 15)          u1_i, u2_j likewise

The sum over pairs is never formed: one half's outputs are mixed in each head, and sent to the other half.
"""

from abc import abstractmethod
from dataclasses import dataclass
from math import log2
from typing import ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import PositiveInt, model_validator
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.layers.base import ReplacementLayer, linear_init, zeros
from mxd.layers.config import ACTIVATIONS, Activation, MLPShape, ReplacementConfig
from mxd.layers.gates import LISTED, Code, PairCode
from mxd.layers.product_gate import ProductGate, keys_of
from mxd.layers.sparsity import AnySparsity, ProductTopKConfig
from mxd.layers.sparsity.product import HalvesConfig


class MonetConfig(ReplacementConfig):
    """Monet: ``num_units`` = n^2 experts of hidden width ``expert_width``, made of 2 n halves."""

    kinds: ClassVar[tuple[str, ...]] = ("product_topk", "product_quantile")
    inherits: ClassVar[tuple[str, ...]] = ("activation",)
    solves: ClassVar[str] = "expert_width"

    method: Literal["monet"] = "monet"
    """Selects this method."""
    decompose: Literal["horizontal", "vertical"] = "horizontal"
    """``horizontal``: an expert is the first layer of one half and the second layer of another. ``vertical``: each half
    gives an expert half of its hidden units and half of its outputs."""
    key_input: Literal["whole", "halves"] = "whole"
    """What the keys of a side read: the whole input, as the released code, or its half of it, as the paper's text."""
    num_units: PositiveInt | None = None
    """Number of experts, a square n^2; by default n is the power of two nearest to two thirds of the model's width."""
    expert_width: PositiveInt | None = None
    """Hidden units of an expert, even where ``vertical``; by default sized to the parameter budget."""
    activation: Activation | None = None
    """Activation of the experts; the base MLP's by default, ``relu2`` in the paper."""
    sparsity: AnySparsity = ProductTopKConfig()
    """How halves are chosen."""

    @property
    def label(self) -> str:
        """Monet-HD or Monet-VD."""
        return "Monet-HD" if self.decompose == "horizontal" else "Monet-VD"

    @property
    def slug(self) -> str:
        """For example ``monet-hd-h2-k8``, or ``monet-hd-halves-h2-k8``."""
        halves = "-halves" if self.key_input == "halves" else ""
        return f"{self.label.lower()}{halves}-{self.sparsity.slug}"

    @property
    def keys(self) -> int:
        """Halves of each side, n; what it would be by default where ``num_units`` is open."""
        if self.num_units is not None:
            return keys_of(self.num_units)
        return 1 << max(0, round(log2(2 * (self.d_in or 1) / 3)))

    @property
    def heads(self) -> int:
        """Heads of the router."""
        return cast(HalvesConfig, self.sparsity).heads or 0

    @property
    def router_params(self) -> int:
        """Number of the keys' parameters."""
        return self.heads * self.keys * (self.d_in or 0) * (2 if self.key_input == "whole" else 1)

    @property
    def layer_params(self) -> int:
        """Keys, the halves' two layers with biases, and the output bias; the same for both decompositions."""
        d, o, m = self.d_in or 0, self.d_out or 0, self.expert_width or 0
        return self.router_params + self.keys * (m * (d + 1 + o) + o) + o

    @property
    def unfactorised_params(self) -> int:
        """As many experts with two layers of their own, that share the router."""
        of_all = self.layer_params - self.router_params - (self.d_out or 0)
        return self.num_params + (self.keys - 1) * of_all

    def active_params(self, l0: float) -> float:
        """As ``ReplacementConfig.active_params``: the router, and the halves that all heads choose, whatever ``l0``."""
        chosen = min(self.keys, self.heads * (cast(HalvesConfig, self.sparsity).k or 0))
        shared = self.router_params + (self.d_out or 0)
        return shared + chosen * (self.layer_params - shared) / self.keys

    @model_validator(mode="after")
    def _check_halves(self) -> "MonetConfig":
        k = cast(HalvesConfig, self.sparsity).k
        if self.num_units is not None and (k or 0) > (keys := keys_of(self.num_units)):
            raise ValueError(f"k = {k} is more than the {keys} halves of each side; lower k or raise num_units")
        if self.decompose == "vertical" and (self.expert_width or 0) % 2:
            raise ValueError(f"expert_width = {self.expert_width} is odd; a vertical Monet divides it by two")
        return self

    def resolve(self, mlp: MLPShape) -> "MonetConfig":
        """Take widths and activation from the base MLP, and heads and k from the widths."""
        config = super().resolve(mlp)
        sparsity = cast(HalvesConfig, self.sparsity).resolved(mlp.d_in, config.keys)
        return config.model_copy(update={"sparsity": sparsity})

    def sized(self, budget: int) -> "MonetConfig":
        """As ``ReplacementConfig.sized``, errors included, for ``expert_width``, unless it is stated."""
        return (
            super().sized(budget) if self.expert_width is None else self.model_copy(update={"num_units": self.keys**2})
        )

    def grown(self, units: int) -> "MonetConfig":
        """Return a copy with ``units`` hidden units of an expert, or twice as many where ``vertical``."""
        width = units * (2 if self.decompose == "vertical" else 1)
        return self.model_copy(update={"num_units": self.keys**2, "expert_width": width})

    def unpaid(self, budget: int, shared: int) -> MxdError:
        """As ``ReplacementConfig.unpaid``.

        Args:
            budget: number of parameters.
            shared: those of the router and the biases.
        """
        return MxdError(
            f"{self.label}: a budget of {budget:,} parameters does not pay for {self.keys:,} halves of each side "
            f"with a hidden unit each (without them {shared:,}); give a smaller num_units, fewer sparsity.heads, or a "
            "larger sizing.expansion."
        )

    def _make(self) -> "Monet":
        return HorizontalMonet(self) if self.decompose == "horizontal" else VerticalMonet(self)


class Mixing:
    """What a code does with a quantity of each half: ``a [tokens, n, n]`` is summed over one of its two sides."""

    first: Float[Tensor, "tokens n"]
    """``sum_j a_ij``."""
    second: Float[Tensor, "tokens n"]
    """``sum_i a_ij``."""

    @abstractmethod
    def to_second(self, of_first: Float[Tensor, "tokens n m"]) -> Float[Tensor, "tokens n m"]:
        """Return ``sum_i a_ij v_i`` for each j."""

    @abstractmethod
    def to_first(self, of_second: Float[Tensor, "tokens n m"]) -> Float[Tensor, "tokens n m"]:
        """Return ``sum_j a_ij v_j`` for each i."""


class PairMixing(Mixing):
    """Of a ``PairCode``, head by head: through ``[tokens, heads, m]``."""

    def __init__(self, code: PairCode) -> None:
        self.one, self.other = code.first, code.second
        self.first = (self.one * self.other.sum(-1, keepdim=True)).sum(1)
        self.second = (self.other * self.one.sum(-1, keepdim=True)).sum(1)

    def to_second(self, of_first: Float[Tensor, "tokens n m"]) -> Float[Tensor, "tokens n m"]:
        """As ``Mixing.to_second``."""
        return self.other.mT @ (self.one @ of_first)

    def to_first(self, of_second: Float[Tensor, "tokens n m"]) -> Float[Tensor, "tokens n m"]:
        """As ``Mixing.to_first``."""
        return self.one.mT @ (self.other @ of_second)


@dataclass
class DenseMixing(Mixing):
    """Of a listed code, as a matrix for each token, or one for all."""

    pairs: Float[Tensor, "codes n n"]

    def __post_init__(self) -> None:
        self.first, self.second = self.pairs.sum(2), self.pairs.sum(1)

    def to_second(self, of_first: Float[Tensor, "tokens n m"]) -> Float[Tensor, "tokens n m"]:
        """As ``Mixing.to_second``."""
        return torch.einsum("tij,tim->tjm", self.pairs, of_first)

    def to_first(self, of_second: Float[Tensor, "tokens n m"]) -> Float[Tensor, "tokens n m"]:
        """As ``Mixing.to_first``."""
        return torch.einsum("tij,tjm->tim", self.pairs, of_second)


class Monet(ReplacementLayer):
    """What both decompositions share: the router, the halves' first layers, and how codes are decoded.

    Units are experts. Hidden unit l of half i is row ``i m + l`` of ``encoder`` (horizontal); in a vertical Monet the
    first half of the rows belongs to the first halves, ``i m / 2 + l``, the rest to the second.
    """

    config: MonetConfig

    def __init__(self, config: MonetConfig) -> None:
        super().__init__(config)
        d, m = config.d_in, config.expert_width
        assert d and m and config.activation
        self.keys, self.width, self.activation = config.keys, m, ACTIVATIONS[config.activation]
        whole = config.key_input == "whole"
        rows, first, second = config.heads * self.keys, *((d, d) if whole else (d // 2, d - d // 2))
        self.first_keys = linear_init(rows, first, fan_in=first)
        self.second_keys = linear_init(rows, second, fan_in=second)
        self.encoder = linear_init(self.keys * m, d, fan_in=d)
        self.encoder_bias = zeros(self.keys * m)

    @property
    def gates(self) -> ProductGate:
        """Product keys with a softmax over the kept halves."""
        shape = (self.config.heads, self.keys)
        first, second = self.first_keys.unflatten(0, shape), self.second_keys.unflatten(0, shape)
        return ProductGate(first, second, whole=self.config.key_input == "whole")

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``, of the shared part."""
        return super().scaling() | {"first_keys": (1, 0), "second_keys": (1, 0), "encoder": (1, 0)}

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return ``unit_norms``: every half is shared by n experts."""
        return self.unit_norms()

    @abstractmethod
    def mixed(self, hidden: Float[Tensor, "tokens width"], code: Mixing) -> Float[Tensor, "tokens d_out"]:
        """Return ``b + sum_ij a_ij E_ij`` of hidden states."""

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens width"]:
        return self.activation(F.linear(x, self.encoder, self.encoder_bias))

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens width"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        """As ``ReplacementLayer._decode``; a listed code is a matrix of all pairs, formed for some tokens at a time."""
        hidden = self._hidden(x) if hidden is None else hidden
        if isinstance(code, PairCode):
            return self.mixed(hidden, PairMixing(code))
        if code.all_units and len(x) > 1 and code.activations.stride(0) == 0:  # one code for every token
            return self.mixed(hidden, DenseMixing(code.activations[:1].unflatten(1, (self.keys, -1))))
        step = max(1, LISTED // self.num_units)
        parts = zip(hidden.split(step), code.activations.split(step), code.indices.split(step), strict=True)
        return torch.cat([self.mixed(rows, DenseMixing(self._pairs(a, units))) for rows, a, units in parts])

    def _pairs(self, activations: Float[Tensor, "tokens k"], units: Tensor) -> Float[Tensor, "tokens n n"]:
        empty = activations.new_zeros(len(activations), self.num_units)
        return empty.scatter_add(1, units, activations).unflatten(1, (self.keys, -1))

    def _states(self, x: Float[Tensor, "*batch d_in"], rows: slice) -> Float[Tensor, "*batch m"]:
        """Return some hidden units."""
        return self.activation(F.linear(x.to(self.encoder.dtype), self.encoder[rows], self.encoder_bias[rows]))


class HorizontalMonet(Monet):
    """Monet-HD: expert (i, j) is the first layer of half i, and the second layer of half j."""

    def __init__(self, config: MonetConfig) -> None:
        super().__init__(config)
        self.decoder = zeros(self.keys * self.width, config.d_out or 0)
        self.decoder_bias = zeros(self.keys, config.d_out or 0)

    def mixed(self, hidden: Float[Tensor, "tokens width"], code: Mixing) -> Float[Tensor, "tokens d_out"]:
        """Return ``b + sum_j V_j sum_i a_ij u_i + sum_j c_j sum_i a_ij``."""
        sent = code.to_second(hidden.unflatten(1, (self.keys, self.width)))
        return torch.addmm(self.bias, sent.flatten(1), self.decoder) + code.second @ self.decoder_bias

    def unit_weight(self, n: int) -> Float[Tensor, "expert_width d_out"]:
        """Return ``V_j^T``, the last linear map of the expert: it says what outputs the expert can give."""
        return self.decoder[self._rows_of(n % self.keys)]

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||V_j||``."""
        squares = self.decoder.unflatten(0, (self.keys, -1)).square().sum((1, 2))
        return squares.clamp_min(1e-30).sqrt().repeat(self.keys)

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | {"decoder": (0, -1), "decoder_bias": (0, -1)}

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``V_j u_i + c_j``."""
        i, j = divmod(n, self.keys)
        return self._states(x, self._rows_of(i)) @ self.unit_weight(n) + self.decoder_bias[j]

    def _rows_of(self, half: int) -> slice:
        return slice(half * self.width, (half + 1) * self.width)


class VerticalMonet(Monet):
    """Monet-VD: half i gives expert (i, j) one half of its hidden units and of its outputs, half j the other."""

    def __init__(self, config: MonetConfig) -> None:
        super().__init__(config)
        o = config.d_out or 0
        self.top = zeros(self.keys * self.width, o // 2)  # V11, then V12
        self.top_bias = zeros(self.keys, o // 2)
        self.bottom = zeros(self.keys * self.width, o - o // 2)  # V21, then V22
        self.bottom_bias = zeros(self.keys, o - o // 2)

    def mixed(self, hidden: Float[Tensor, "tokens width"], code: Mixing) -> Float[Tensor, "tokens d_out"]:
        """Return ``b + [top ; bottom]``, four terms of the hidden units and two of the biases."""
        one, other = (half.unflatten(1, (self.keys, self.width // 2)) for half in hidden.chunk(2, dim=1))
        to_top = code.first.unsqueeze(-1) * one, code.to_first(other)
        to_bottom = code.to_second(one), code.second.unsqueeze(-1) * other
        outs = [
            sum((v.flatten(1) @ w for v, w in zip(sent, weight.chunk(2), strict=True)), sums @ bias)
            for sent, weight, sums, bias in (
                (to_top, self.top, code.first, self.top_bias),
                (to_bottom, self.bottom, code.second, self.bottom_bias),
            )
        ]
        return torch.cat(outs, dim=1) + self.bias

    def unit_weight(self, n: int) -> Float[Tensor, "expert_width d_out"]:
        """Return ``[V11_i V12_i ; V21_j V22_j]^T``, the last linear map of the expert."""
        i, j = divmod(n, self.keys)
        of_i, of_j = self._rows_of(i), self._rows_of(j)
        top = torch.cat([half[of_i] for half in self.top.chunk(2)])
        bottom = torch.cat([half[of_j] for half in self.bottom.chunk(2)])
        return torch.cat([top, bottom], dim=1)

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return the norms of the block matrices, from those of their blocks."""
        first, second = (
            weight.unflatten(0, (2, self.keys, -1)).square().sum((0, 2, 3)) for weight in (self.top, self.bottom)
        )
        return (first.unsqueeze(1) + second).flatten().clamp_min(1e-30).sqrt()

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | dict.fromkeys(("top", "top_bias", "bottom", "bottom_bias"), (0, -1))

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``[V11_i u1_i + V12_i u2_j + c1_i ; V21_j u1_i + V22_j u2_j + c2_j]``."""
        i, j = divmod(n, self.keys)
        second = self.keys * self.width // 2
        of_j = self._rows_of(j)
        states = [self._states(x, self._rows_of(i)), self._states(x, slice(second + of_j.start, second + of_j.stop))]
        return torch.cat(states, -1) @ self.unit_weight(n) + torch.cat([self.top_bias[i], self.bottom_bias[j]])

    def _rows_of(self, half: int) -> slice:
        return slice(half * self.width // 2, (half + 1) * self.width // 2)

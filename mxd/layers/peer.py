"""PEER (He, arXiv 2407.04153): n^2 experts of one neuron each, retrieved by product keys.

    y^ = b + sum_h sum_(n kept by h) g_hn phi(u_n . x) v_n,   g_h = softmax over the k best scores of head h

A unit that several heads choose is active with the sum of its gates. Only the chosen experts are computed.
"""

from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Float
from pydantic import PositiveInt, model_validator
from torch import Tensor

from mxd.layers.base import ReplacementLayer, linear_init, zeros
from mxd.layers.config import ACTIVATIONS, Activation, ReplacementConfig
from mxd.layers.gates import LISTED, Code
from mxd.layers.product_gate import ProductGate, keys_of
from mxd.layers.sparsity import AnySparsity, PairTopKConfig
from mxd.ops import linear_at, sparse_decode


class PEERConfig(ReplacementConfig):
    """PEER: ``num_units`` = n^2 experts of one neuron."""

    kinds: ClassVar[tuple[str, ...]] = ("pair_topk",)
    inherits: ClassVar[tuple[str, ...]] = ("activation",)

    method: Literal["peer"] = "peer"
    """Selects this method."""
    num_units: PositiveInt | None = None
    """Number of experts, a square n^2; by default sized to the parameter budget."""
    query: Literal["none", "linear"] = "none"
    """What the two halves of a key are compared with: the two halves of the input, or of a linear map of it, one for
    each head and as wide as the input (the paper's)."""
    activation: Activation | None = None
    """Activation of the experts; the base MLP's by default."""
    sparsity: AnySparsity = PairTopKConfig()
    """How experts are chosen."""

    @property
    def label(self) -> str:
        """PEER."""
        return "PEER"

    @property
    def slug(self) -> str:
        """For example ``peer-h8-k16``, or ``peer-query-h8-k16``."""
        return f"peer{'-query' if self.query == 'linear' else ''}-{self.sparsity.slug}"

    @property
    def heads(self) -> int:
        """Heads of the router."""
        return cast(PairTopKConfig, self.sparsity).heads

    @property
    def layer_params(self) -> int:
        """Keys, queries, the experts' two vectors, and the output bias."""
        d, o, n = self.d_in or 0, self.d_out or 0, keys_of(self.num_units or 0)
        return n**2 * (d + o) + self.heads * n * d + (self.heads * d * d if self.query == "linear" else 0) + o

    @model_validator(mode="after")
    def _check_square(self) -> "PEERConfig":
        keys_of(self.num_units or 0)
        return self

    def grown(self, units: int) -> "PEERConfig":
        """Return a copy with ``units`` keys on each side, and so their square of experts."""
        return self.model_copy(update={"num_units": units**2})

    def _make(self) -> "PEER":
        return PEER(self)


class PEER(ReplacementLayer):
    """Single-neuron experts. Units are experts."""

    config: PEERConfig

    def __init__(self, config: PEERConfig) -> None:
        super().__init__(config)
        d, o, units = config.d_in, config.d_out, config.num_units
        assert d and o and units and config.activation
        self.keys, self.activation = keys_of(units), ACTIVATIONS[config.activation]
        rows = config.heads * self.keys
        self.first_keys = linear_init(rows, d // 2, fan_in=max(1, d // 2))
        self.second_keys = linear_init(rows, d - d // 2, fan_in=d - d // 2)
        self.query = linear_init(config.heads * d, d, fan_in=d) if config.query == "linear" else None
        self.encoder = linear_init(units, d, fan_in=d)
        self.decoder = zeros(units, o)

    @property
    def gates(self) -> ProductGate:
        """Product keys, of the input or of each head's query."""
        first, second = (keys.unflatten(0, (-1, self.keys)) for keys in (self.first_keys, self.second_keys))
        return ProductGate(first, second, None if self.query is None else self.query.unflatten(0, (len(first), -1)))

    def unit_weight(self, n: int) -> Float[Tensor, "1 d_out"]:
        """Return ``v_n`` as one row."""
        return self.decoder[n : n + 1]

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||v_n||``."""
        return self.decoder.square().sum(-1).clamp_min(1e-30).sqrt()

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return ``||v_n||``: nothing of an expert is shared."""
        return self.unit_norms()

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``; with queries these alone read the input."""
        reading = ("first_keys", "second_keys") if self.query is None else ("query",)
        return super().scaling() | dict.fromkeys((*reading, "encoder"), (1, 0)) | {"decoder": (0, -1)}

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``phi(u_n . x) v_n``."""
        return self.activation(x.to(self.encoder.dtype) @ self.encoder[n]).unsqueeze(-1) * self.decoder[n]

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens units"]:
        return self.activation(x @ self.encoder.T)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens units"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        """As ``ReplacementLayer._decode``; of a code that lists all units, some tokens at a time."""
        if code.all_units:
            step = max(1, LISTED // self.num_units)
            states = (self._hidden(part) for part in x.split(step)) if hidden is None else hidden.split(step)
            parts = zip(code.activations.split(step), states, strict=True)
            return torch.cat([(a * state) @ self.decoder for a, state in parts]) + self.bias
        if hidden is None:
            state = self.activation(linear_at(x, code.indices, self.encoder, code.selection))
        else:
            state = hidden.gather(1, code.indices)
        return sparse_decode(code.activations * state, code.indices, self.decoder, code.selection) + self.bias

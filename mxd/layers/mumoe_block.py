"""The muMoE block: two factorised mixtures in place of a whole MLP (Oldfield et al., muMoE, NeurIPS 2024, section 3).

    h = phi(((a C1) * ([x, 1] A1)) W1),   y^ = ((a C2) * ([h, 1] A2)) W2 + b,   a = TopK(relu(x G^T + b_G), K)

Unlike the other methods there is no dense encoder: the same activations mix the experts of both layers, and expert n
of each is ``diag(c_n)`` between two shared factors (CP). A last element 1 gives every expert a bias. The activation
function stands between the layers, so experts interact there: outputs are not a sum over units.
"""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from mxd.layers.base import ReplacementLayer, code_product, linear_init, zeros
from mxd.layers.config import ACTIVATIONS, Activation, MLPShape, ReplacementConfig
from mxd.layers.gates import Code, LinearGate


class MuMoEBlockConfig(ReplacementConfig):
    """muMoE block: N two-layer experts, each layer a CP-factorised mixture."""

    inherits: ClassVar[tuple[str, ...]] = ("hidden", "activation")

    method: Literal["mumoe_block"] = "mumoe_block"
    """Selects this method."""
    hidden: PositiveInt | None = None
    """Width between the two layers; the base MLP's width by default."""
    activation: Activation | None = None
    """Activation between the two layers; the base MLP's by default, of a gated MLP that of its gate."""
    rank_share: PositiveFloat = 0.5
    """The CP rank of both layers as a share of the output width, R / d_out; used where ``rank`` is not given."""
    rank: PositiveInt | None = None
    """The CP rank R of both layers; by default ``rank_share * d_out``."""
    layer_norm: bool = False
    """Normalise what the first layer reads, as the paper's blocks do. An MLP's input in a pre-norm model is already
    normalised. There is no scale or offset to learn: the first layer's factor and its bias hold both."""
    start: Literal["paper", "replicate"] = "paper"
    """How the experts' factors are drawn: ``paper`` as ``nn.Linear`` (MxD, appendix B.4); ``replicate`` from N(1, 1)
    (muMoE), so that all experts begin alike, up to noise. Either way the last factor begins at zero."""

    @property
    def label(self) -> str:
        """muMoE-block."""
        return "muMoE-block"

    @property
    def slug(self) -> str:
        """For example ``mumoe-block-r64-ln-replicate-k32``."""
        form = [f"r{self.rank}"] + ["ln"] * self.layer_norm + ["replicate"] * (self.start == "replicate")
        return "-".join([self.label.lower(), *form, self.sparsity.slug])

    @property
    def layer_params(self) -> int:
        """Gate with biases, the three factors of each layer and the output bias."""
        d, o, n, h, r = (v or 0 for v in (self.d_in, self.d_out, self.num_units, self.hidden, self.rank))
        return n * (d + 1) + r * (n + d + 1 + h) + r * (n + h + 1 + o) + o

    @property
    def unfactorised_params(self) -> int:
        """Parameters of as many experts with matrices ``[d_in + 1, hidden]`` and ``[hidden + 1, d_out]`` each."""
        d, o, n, h = (v or 0 for v in (self.d_in, self.d_out, self.num_units, self.hidden))
        return n * (d + 1) + n * ((d + 1) * h + (h + 1) * o) + o

    def resolve(self, mlp: MLPShape) -> "MuMoEBlockConfig":
        """Take widths and activation from the base MLP, and the rank from ``rank_share``."""
        return super().resolve(mlp).with_defaults(rank=max(1, round(self.rank_share * mlp.d_out)))

    def _make(self) -> "MuMoEBlock":
        return MuMoEBlock(self)


class MuMoEBlock(ReplacementLayer):
    """Two CP-factorised mixtures with the same activations. Units are experts, of both layers together.

    A unit that is switched off is missing from both layers. Its weight, and the norm of it, is its matrix of the second
    layer, which writes the output; and the hidden state is what the first layer's experts modulate, ``[x, 1] A1``.
    """

    additive = False
    config: MuMoEBlockConfig

    def __init__(self, config: MuMoEBlockConfig) -> None:
        super().__init__(config)
        d, o, n, h, r = config.d_in, config.d_out, config.num_units, config.hidden, config.rank
        assert d and o and n and h and r and config.activation
        self.activation = ACTIVATIONS[config.activation]
        self.gate = linear_init(n, d, fan_in=d)
        self.gate_bias = zeros(n)
        self.first_experts = linear_init(n, r, fan_in=n)  # C1
        self.first_in = linear_init(d, r, fan_in=d)  # A1, whose last row is the next
        self.first_bias = zeros(r)
        self.first_out = linear_init(r, h, fan_in=r)  # W1
        self.second_experts = linear_init(n, r, fan_in=n)  # C2
        self.second_in = linear_init(h, r, fan_in=h)  # A2, whose last row is the next
        self.second_bias = zeros(r)
        self.second_out = zeros(r, o)  # W2
        if config.start == "replicate":
            for factor in (self.first_experts, self.second_experts):
                torch.nn.init.normal_(factor, 1.0, 1.0)

    @property
    def gates(self) -> LinearGate:
        """``x @ gate.T + gate_bias``: one row for each expert."""
        return LinearGate(self.gate, self.gate_bias)

    def unit_weight(self, n: int) -> Float[Tensor, "inputs d_out"]:
        """Return expert ``n``'s matrix of the second layer, ``A2 diag(c2_n) W2``; its last row is the bias."""
        rows = torch.cat([self.second_in, self.second_bias.unsqueeze(0)])
        return (rows * self.second_experts[n]) @ self.second_out

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return the norm of each ``unit_weight``, whose square is ``c2_n ((A2^T A2) * (W2 W2^T)) c2_n^T``."""
        inner = self.second_in.T @ self.second_in + torch.outer(self.second_bias, self.second_bias)
        gram = inner * (self.second_out @ self.second_out.T)
        return ((self.second_experts @ gram) * self.second_experts).sum(-1).clamp_min(1e-30).sqrt()

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return ``||c2_n||``."""
        return self.second_experts.square().sum(-1).clamp_min(1e-30).sqrt()

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``; a normalised input has no unit, and the hidden layer has none."""
        first = {} if self.config.layer_norm else {"first_in": (1, 0)}
        return super().scaling() | {"gate": (1, 0), **first, "second_out": (0, -1)}

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens rank"]:
        read = F.layer_norm(x, x.shape[-1:]) if self.config.layer_norm else x
        return torch.addmm(self.first_bias, read, self.first_in)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens rank"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        projected = self._hidden(x) if hidden is None else hidden
        between = self.activation((code_product(code, self.first_experts) * projected) @ self.first_out)
        second = torch.addmm(self.second_bias, between, self.second_in)
        return torch.addmm(self.bias, code_product(code, self.second_experts) * second, self.second_out)

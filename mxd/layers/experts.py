"""Mixtures of linear experts that share a dense encoder: what MxD, the muMoE family and the unfactorised MoE share.

    y^ = sum_n a_n (z W_n) + b,   z = phi(x E^T + b_E)

The methods differ in how the experts' weights ``W [N, H, O]`` are stored. With ``expert_bias`` every hidden state gets
a last element 1 (muMoE, section 3), so that each ``W_n`` has one more row: the expert's own bias.
"""

from abc import abstractmethod

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mxd.layers.base import ReplacementLayer, linear_init, zeros
from mxd.layers.encoder import DenseEncoder, EncodedConfig
from mxd.layers.gates import Gate, LinearGate
from mxd.ops import product


class ExpertConfig(EncodedConfig):
    """Fields of the mixtures of linear experts."""

    expert_bias: bool = False
    """Give each expert a bias of its own: its weight gets a row for a hidden unit that is always 1."""

    @property
    def inputs(self) -> int:
        """Rows of an expert's weight: the hidden width, and one more with ``expert_bias``."""
        return (self.hidden or 0) + self.expert_bias

    @property
    @abstractmethod
    def expert_params(self) -> int:
        """Number of the parameters that all experts' weights are made of."""

    @property
    def experts(self) -> int:
        """The number of experts that are stored."""
        return self.num_units or 0

    @property
    def gate_params(self) -> int:
        """Number of the gate's parameters, biases included."""
        return self.experts * ((self.d_in or 0) + 1)

    @property
    def layer_params(self) -> int:
        """Encoder, gate with biases, the experts and the output bias."""
        return self.encoder_params + self.gate_params + self.expert_params + (self.d_out or 0)

    @property
    def unfactorised_params(self) -> int:
        """``num_params`` if every expert had a matrix ``[inputs, d_out]`` of its own, as in ``moe``."""
        return self.num_params - self.expert_params + (self.num_units or 0) * self.inputs * (self.d_out or 0)

    @property
    def form(self) -> tuple[str, ...]:
        """The parts of the slug between the method's name and its sparsity."""
        return ("bias",) if self.expert_bias else ()

    @property
    def slug(self) -> str:
        """For example ``cp-mumoe-r64-bias-k32``."""
        return "-".join((self.label.lower(), *self.form, self.sparsity.slug))


class ExpertLayer(ReplacementLayer):
    """A dense encoder and a linear gate. Units are experts."""

    config: ExpertConfig

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__(config)
        d, n = config.d_in, config.experts
        assert d and n
        self.encoder = DenseEncoder(config)
        self.gate = linear_init(n, d, fan_in=d)
        self.gate_bias = zeros(n)

    @property
    def gates(self) -> Gate:
        """``x @ gate.T + gate_bias``: one row for each expert."""
        return LinearGate(self.gate, self.gate_bias)

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | self.encoder.scaling() | {"gate": (1, 0)}

    def encoded(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch inputs"]:
        """Return what the experts multiply: ``z``, followed by 1 with ``expert_bias``."""
        z = self.encoder(x)
        return F.pad(z, (0, 1), value=1.0) if self.config.expert_bias else z

    def project(
        self, x: Float[Tensor, "*batch d_in"], factor: Float[Tensor, "inputs columns"]
    ) -> Float[Tensor, "*batch columns"]:
        """Return ``encoded(x) @ factor``, without a copy of ``z``."""
        z = self.encoder(x)
        return product(z, factor[:-1]) + factor[-1] if self.config.expert_bias else product(z, factor)

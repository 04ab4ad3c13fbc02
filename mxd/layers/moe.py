"""The unfactorised mixture of linear experts: the rival with few experts, of which all factorised ones are cases.

    y^ = sum_n a_n (z W_n) + b,   W [N, H, O] free

An expert costs as much as the base MLP's decoder, so that the budget pays for few (15 in GPT-2, where MxD has 21,504).
"""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from mxd.layers.base import zeros
from mxd.layers.experts import ExpertConfig, ExpertLayer
from mxd.layers.gates import Code
from mxd.layers.sparsity import AnySparsity, TopKConfig
from mxd.ops import grouped_linear


class MoEConfig(ExpertConfig):
    """MoE: N experts with a matrix of their own each, which share an encoder."""

    method: Literal["moe"] = "moe"
    """Selects this method."""
    sparsity: AnySparsity = TopKConfig(k=2)
    """How experts are chosen; there are few, so that k is small."""

    @property
    def label(self) -> str:
        """MoE."""
        return "MoE"

    @property
    def expert_params(self) -> int:
        """A matrix for each expert."""
        return (self.num_units or 0) * self.inputs * (self.d_out or 0)

    def _make(self) -> "MoE":
        return MoE(self)


class MoE(ExpertLayer):
    """Unfactorised mixture of experts; starts with their weights at zero."""

    config: MoEConfig

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        n, o = config.num_units, config.d_out
        assert n and o
        self.experts = zeros(n, config.inputs, o)

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``z W_n``."""
        return self.project(x, self.experts[n])

    def unit_weight(self, n: int) -> Float[Tensor, "inputs d_out"]:
        """Return ``W_n``."""
        return self.experts[n]

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||W_n||_F``."""
        return self.experts.square().sum((1, 2)).clamp_min(1e-30).sqrt()

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return ``||W_n||_F``: nothing of an expert's weight is shared."""
        return self.unit_norms()

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | {"experts": (0, -1)}

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens inputs"]:
        return self.encoded(x)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens inputs"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        hidden = self._hidden(x) if hidden is None else hidden
        if code.all_units and len(code.activations) > 1 and code.activations.stride(0) == 0:  # one code for every token
            return hidden @ (code.activations[0] @ self.experts.flatten(1)).view_as(self.experts[0]) + self.bias
        return grouped_linear(code.activations, code.indices, hidden, self.experts, code.selection) + self.bias

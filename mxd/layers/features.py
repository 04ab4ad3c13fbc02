"""What transcoders and sparse autoencoders share: units that are features, each adding one fixed direction."""

from jaxtyping import Float
from torch import Tensor

from mxd.layers.base import ReplacementConfig, ReplacementLayer, code_product, linear_init, zeros
from mxd.layers.code import Code
from mxd.layers.gates import LinearGate


class FeatureLayer(ReplacementLayer):
    """``z D + b`` with ``z`` sparse; starts with the decoder at zero. Units are features."""

    def __init__(self, config: ReplacementConfig) -> None:
        super().__init__(config)
        d, o, n = config.d_in, config.d_out, config.num_units
        assert d and o and n
        self.encoder = linear_init(n, d, fan_in=d)
        self.encoder_bias = zeros(n)
        self.decoder = zeros(n, o)

    @property
    def gates(self) -> LinearGate:
        """``x @ encoder.T + encoder_bias``: one row for each feature."""
        return LinearGate(self.encoder, self.encoder_bias)

    def _unit_output(self, n: int, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return ``d_n``, the same for every input."""
        return self.decoder[n].expand(*x.shape[:-1], -1)

    def unit_weight(self, n: int) -> Float[Tensor, "1 d_out"]:
        """Return ``d_n`` as one row."""
        return self.decoder[n : n + 1]

    def unit_norms(self) -> Float[Tensor, " units"]:
        """Return ``||d_n||``."""
        return self.decoder.square().sum(-1).clamp_min(1e-30).sqrt()

    def factor_norms(self) -> Float[Tensor, " units"]:
        """Return ``||d_n||``: nothing of a feature's weight is shared."""
        return self.unit_norms()

    def _hidden(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens 0"]:
        return x.new_empty(len(x), 0)

    def features_out(self, code: Code) -> Float[Tensor, "tokens d_out"]:
        """Return ``z D + b``."""
        return code_product(code, self.decoder) + self.bias

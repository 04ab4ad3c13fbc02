"""Transcoder (Dunefsky et al., 2024) and skip transcoder (Paulo et al., 2025): a wide sparse MLP.

y^ = z D + b [+ x S],   z = TopK(relu(x E^T + b_E), K)                                   MxD paper, equation 2

Matryoshka (Bussmann et al., arXiv 2503.17547): with ``groups``, the first m features alone are to predict the output,
too, for each m where a group ends. Training minimises the mean over these prefixes of ``z[:, :m] D[:m] + b [+ x S]``.
"""

from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, PlainSerializer, model_validator
from torch import Tensor

from mxd.layers.base import ReplacementLayer, code_product, linear_init, zeros
from mxd.layers.config import ReplacementConfig, transcoder_params
from mxd.layers.gates import Code, LinearGate
from mxd.layers.losses import normalize, squared_error
from mxd.ops import add_product, nested_decode


def _shares(value: Any) -> Any:
    """Read shares that are written as text, ``1/4 3/4``."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(float(Fraction(share)) for share in value.split())
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{value!r} are not shares; write numbers or fractions, such as 1/4 3/4") from error


Shares = Annotated[
    tuple[float, ...], BeforeValidator(_shares), PlainSerializer(lambda shares: " ".join(map(repr, shares)))
]
"""Written as text, since a list in a run's YAML stands for several replacements."""


class FeatureConfig(ReplacementConfig):
    """Fields of the layers whose units are features."""

    groups: Shares = ()
    """Matryoshka: the groups' shares of the features, which add up to 1, as text: ``1/32 1/16 1/8 1/4 17/32``. Empty:
    one group, the plain loss."""

    @property
    def nested_widths(self) -> tuple[int, ...]:
        """How many features there are up to the end of each group; the last is all of them."""
        units = self.num_units or 0
        return (*(round(units * share) for share in accumulate(self.groups[:-1])), units)

    @property
    def slug(self) -> str:
        """For example ``tc-k32``, or ``m-tc-0.25-0.75-k32``."""
        shares = [f"{share:g}" for share in self.groups]
        return "-".join([self.label.lower(), *shares, self.sparsity.slug])

    def nested_label(self, label: str) -> str:
        """Return a label, marked where the features are in groups."""
        return f"M-{label}" if len(self.groups) > 1 else label

    @model_validator(mode="after")
    def _check_groups(self) -> "FeatureConfig":
        if self.groups and (min(self.groups) <= 0 or abs(sum(self.groups) - 1) > 1e-6):
            raise ValueError(
                f"groups {list(self.groups)} add up to {sum(self.groups):g}; give positive shares that add up to 1, as "
                "text: 1/4 3/4 (a list makes a replacement of each item)"
            )
        if self.num_units is not None and len(self.groups) > 1:
            widths = self.nested_widths
            if any(end <= start for start, end in pairwise((0, *widths))):
                raise ValueError(
                    f"groups {list(self.groups)} of {self.num_units} units end at {list(widths)}: one is empty; "
                    "give fewer groups or more units"
                )
        return self


class FeatureLayer(ReplacementLayer):
    """``z D + b`` with ``z`` sparse; starts with the decoder at zero. Units are features."""

    config: FeatureConfig

    def __init__(self, config: FeatureConfig) -> None:
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

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | {"encoder": (1, 0), "decoder": (0, -1)}

    def features_out(self, code: Code) -> Float[Tensor, "tokens d_out"]:
        """Return ``z D + b``."""
        return code_product(code, self.decoder) + self.bias

    def loss(
        self, x: Float[Tensor, "*batch d_in"], code: Code, y: Float[Tensor, "*batch d_out"]
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, ""]]:
        """As ``ReplacementLayer.loss``; with groups, the mean over prefixes, and the error of all features.

        Args:
            x: what the layer reads.
            code: the code of ``x``.
            y: the MLP's outputs.
        """
        if len(self.config.groups) < 2:
            return super().loss(x, code, y)
        rows, target = self._rows(x), y.reshape(-1, y.shape[-1])
        out, losses = self._rest(rows), []
        for added in self._by_group(code.reshape(rows.shape[:1])):
            out = out + added
            error = squared_error(self._or_constant(rows, out), target)
            losses.append(normalize(error, target))
        return error.reshape(y.shape[:-1]), torch.stack(losses).mean()

    def _by_group(self, code: Code) -> tuple[Float[Tensor, "tokens d_out"], ...]:
        """Return what the features of each group add to the output."""
        widths = self.config.nested_widths
        if code.all_units:
            ranges = pairwise((0, *widths))
            return tuple(code.activations[:, start:end] @ self.decoder[start:end] for start, end in ranges)
        levels = torch.zeros_like(code.indices)
        for end in widths[:-1]:
            levels += code.indices >= end
        parts = nested_decode(code.activations, code.indices, levels, self.decoder, len(widths), code.selection)
        return parts.unbind(1)


class TranscoderConfig(FeatureConfig):
    """Transcoder: sparse features, each adding one direction; with ``skip``, plus a linear map of the input."""

    method: Literal["transcoder"] = "transcoder"
    """Selects this method."""
    skip: bool = False
    """Add ``x S``: a skip transcoder."""

    @property
    def label(self) -> str:
        """TC, or STC with the skip; M-TC and M-STC with groups."""
        return self.nested_label("STC" if self.skip else "TC")

    @property
    def layer_params(self) -> int:
        """Encoder with biases, decoder, output bias, and the skip's matrix."""
        d, o = self.d_in or 0, self.d_out or 0
        return transcoder_params(d, o, self.num_units or 0) + (d * o if self.skip else 0)

    def paper_units(self, width: int) -> int:
        """Return ``width``: the paper does not count the skip."""
        return width

    def _make(self) -> "Transcoder":
        return Transcoder(self)


class Transcoder(FeatureLayer):
    """Transcoder, with or without skip."""

    config: TranscoderConfig

    def __init__(self, config: TranscoderConfig) -> None:
        super().__init__(config)
        self.skip = zeros(config.d_in or 0, config.d_out or 0) if config.skip else None

    def scaling(self) -> dict[str, tuple[int, int]]:
        """As ``ReplacementLayer.scaling``."""
        return super().scaling() | ({"skip": (1, -1)} if self.skip is not None else {})

    def _rest(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens d_out"]:
        return super()._rest(x) if self.skip is None else torch.addmm(self.bias, x, self.skip)

    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens 0"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        out = self.features_out(code)
        return out if self.skip is None else add_product(out, x, self.skip)

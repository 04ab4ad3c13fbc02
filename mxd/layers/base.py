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
from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mxd.common.errors import MxdError
from mxd.layers.config import Covariance, Initialisation, ReplacementConfig
from mxd.layers.gates import Code, Gate
from mxd.layers.losses import normalize, squared_error
from mxd.ops import exact_products, sparse_decode, topk_linear

T = TypeVar("T")

BOS_RADIUS = 0.05
"""An input within this distance of the stored BOS input, relative to its norm, is taken for BOS. In float32 BOS itself
is less than 1e-5 away. At block 28 of SmolLM2 one token in 6,000, the first words of contexts, comes nearer than this
(0.002 to 0.05): the stored constant is used there, too, and is off by up to 20%. At block 9 the nearest other token is
0.045 away, an EOS."""


class ReplacementLayer(nn.Module, ABC):
    """Base of all layers; a subclass defines ``gates``, ``_hidden``, ``_decode`` and the unit views."""

    additive: ClassVar[bool] = True
    """Whether ``y^ = b + rest(x) + sum_n a_n unit_output(n, x)``. Where not, there is no ``unit_output`` and no
    steering; changed codes decode all the same."""

    def __init__(self, config: ReplacementConfig) -> None:
        super().__init__()
        self.config = config
        self.sparsity = config.build_sparsity()
        self.bias = nn.Parameter(torch.zeros(config.d_out or 0))
        self.bos_in = _constant(config.d_in) if config.bos_constant else None
        self.bos_out = _constant(config.d_out) if config.bos_constant else None

    @property
    def num_units(self) -> int:
        """Number of units."""
        return self.config.num_units or 0

    def __repr__(self) -> str:
        return self.config.summary

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
        states = None if hidden is None else hidden.to(rows).expand(len(rows), -1)
        out = self._or_constant(rows, self._decode(rows, code.reshape(rows.shape[:1]), states))
        return out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)

    def hidden(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch width"]:
        """Return what units' outputs depend on: each ``unit_output`` is a linear function of it, the same for any x.

        Its width depends on the method: 0 where units add fixed directions.
        """
        hidden = self._hidden(self._rows(x))
        return hidden.reshape(*x.shape[:-1], hidden.shape[-1])

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Code:
        """Return which units are active and how strongly; the choice is float32's, also where TF32 is allowed."""
        with exact_products(x.device):
            code: Code = self.sparsity(self._rows(x), self.gates)
        return code.reshape(x.shape[:-1])

    def dead_code(self, x: Float[Tensor, "*batch d_in"], dead: Bool[Tensor, " units"], k: int) -> Code:
        """Return the code of the ``k`` largest positive pre-activations among dead units.

        Args:
            x: what the layer reads.
            dead: which units.
            k: how many.
        """
        units = dead.nonzero().squeeze(1)
        activations, chosen = topk_linear(self._rows(x), *self.gates.rows(units), min(k, len(units)))
        return Code(activations, units[chosen]).reshape(x.shape[:-1])

    def rest(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return what the output is without any unit: the output bias, and a skip where there is one."""
        return self._rest(self._rows(x)).reshape(*x.shape[:-1], -1).to(x.dtype)

    @torch.no_grad()
    def begin_step(self, parts: Sequence[Float[Tensor, "*batch d_in"]]) -> None:
        """Let the sparsity see what the layer is about to read in one training step, part by part."""
        with exact_products(self.bias.device):
            self.sparsity.begin_step([self._rows(part) for part in parts], self.gates)

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
            MxdError: the layer is not additive, or has no such unit.
        """
        self.check_additive()
        if not 0 <= n < self.num_units:
            raise MxdError(f"units are numbered 0 ... {self.num_units - 1:,}, got {n}.")
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

    def loss(
        self, x: Float[Tensor, "*batch d_in"], code: Code, y: Float[Tensor, "*batch d_out"]
    ) -> tuple[Float[Tensor, "*batch"], Float[Tensor, ""]]:
        """Return each token's squared error, and what training minimises: their normalized MSE (MxD, section 3.1).

        Args:
            x: what the layer reads.
            code: the code of ``x``.
            y: the MLP's outputs.
        """
        error = squared_error(self.decode(x, code), y)
        return error, normalize(error, y)

    def scaling(self) -> dict[str, tuple[int, int]]:
        """Return name -> (i, o) for each parameter that grows with the units of input and output.

        A layer that read ``s x`` and predicted ``t y`` computes the same function of ``x`` and ``y`` once each such
        parameter is multiplied by ``s^i t^o``; pre-activations stay as they are. Each method adds its own parameters
        to the output bias, which is (0, -1).
        """
        return {"bias": (0, -1)}

    @torch.no_grad()
    def initialise(
        self,
        mean_in: Float[Tensor, " d_in"],
        mean_out: Float[Tensor, " d_out"],
        start: Initialisation = "paper",
        covariance: Covariance | None = None,
    ) -> None:
        """Set the parameters that are initialised from data.

        Args:
            mean_in: mean of what the layer reads.
            mean_out: mean of the MLP's outputs; the output bias begins there (MxD, section 3.1).
            start: ``paper`` leaves the rest as drawn. ``centred`` also centres the pre-activations, so that all units
                are active equally often at first and few die (not in the paper: docs/recipes.md).
            covariance: second moments of the first tokens, given where ``config.needs_covariance``.
        """
        self.bias.copy_(mean_out)
        if start == "centred":
            self.gates.centre(mean_in)
        if covariance is not None and self.config.sparsity.needs_covariance:
            self.sparsity.initialise(self.gates, mean_in, covariance.read)

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

    def _rest(self, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens d_out"]:
        """Return the output without any unit."""
        return self.bias.expand(len(x), -1)

    @abstractmethod
    def _decode(
        self, x: Float[Tensor, "tokens d_in"], code: Code, hidden: Float[Tensor, "tokens width"] | None
    ) -> Float[Tensor, "tokens d_out"]:
        """Decode rows, given their hidden states; ``None``: those of ``x``, as far as the code needs them."""

    def _or_constant(
        self, rows: Float[Tensor, "tokens d_in"], out: Float[Tensor, "tokens d_out"]
    ) -> Float[Tensor, "tokens d_out"]:
        """Return outputs with the stored constant at BOS."""
        if self.bos_out is None:
            return out
        return torch.where(self._at_bos(rows).unsqueeze(-1), self.bos_out, out)

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

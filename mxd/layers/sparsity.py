"""How units are chosen. Each kind is a frozen config and a small module whose state lives in the state dict.

All apply ReLU to the pre-activations first, so activations are non-negative (MxD, section 2.4; Gao et al., TopK).
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from mxd.common.processes import ALONE, Processes
from mxd.layers.gates import Code, Gate
from mxd.ops import CandidateDtype, Selection

Norms = Callable[[], Float[Tensor, " units"]]
Weighting = Literal["none", "factor", "norm"]


class Sparsity(nn.Module, ABC):
    """Chooses units from their pre-activations.

    State that a kind updates in training (running statistics, thresholds, draws) lives in buffers, which are saved with
    the layer, and changes in training mode only.
    """

    candidates: CandidateDtype = "float32"
    """Set to ``bfloat16`` in training, where that is faster: see ``topk_linear``. Not used in evaluation mode."""
    processes: Processes = ALONE
    """Those that take each training step together: statistics of a batch are taken over all of them."""
    widening: float = 1.0
    """In training, K is multiplied by this: set before each step where K falls during a run (``training.k_start``)."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "tokens d_in"], gate: Gate) -> Code:
        """Return the code of some tokens."""

    def seed(self, seed: int) -> None:
        """Set the seed of what is drawn in training; most kinds draw nothing."""

    def penalty(self, code: Code, unit_norms: Norms, factor_norms: Norms) -> Float[Tensor, ""]:
        """Return the term added to the training loss: zero for most kinds.

        Args:
            code: the code of some tokens.
            unit_norms: the layer's function of this name.
            factor_norms: the layer's function of this name.
        """
        return code.zero()

    def top(self, x: Float[Tensor, "tokens d_in"], gate: Gate, k: int) -> Code:
        """Return the code of the ``k`` largest positive pre-activations of each token.

        Args:
            x: what the layer reads.
            gate: the layer's gate.
            k: how many.
        """
        if self.training:
            k = min(round(k * self.widening), gate.units)
        selection = Selection()
        activations, indices = gate.top(x, k, self.candidates if self.training else "float32", selection)
        return Code(activations, indices, selection=selection)


class SparsityConfig(BaseModel, ABC):
    """Fields common to all kinds: none."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    general: ClassVar[bool] = True
    """Whether it works with every method whose gate gives one score for each unit (one head)."""
    kind: str
    """The kind's name."""

    @property
    @abstractmethod
    def max_k(self) -> int | None:
        """The largest number of units a token can use; ``None`` where it is not bounded."""

    @property
    @abstractmethod
    def slug(self) -> str:
        """A short name for folders and figures."""

    def num_params(self, units: int) -> int:
        """Return the number of parameters that the kind learns for a layer of ``units`` units."""
        return 0

    @abstractmethod
    def build(self, units: int) -> Sparsity:
        """Build the module for a layer of ``units`` units."""


class TopKConfig(SparsityConfig):
    """Keep the K largest."""

    kind: Literal["topk"] = "topk"
    """Selects this kind."""
    k: PositiveInt = 32
    """The most units active for a token."""

    @property
    def max_k(self) -> int:
        """K."""
        return self.k

    @property
    def slug(self) -> str:
        """For example ``k32``."""
        return f"k{self.k}"

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return TopK(self.k)


class RandomKConfig(SparsityConfig):
    """Train with K drawn uniformly from ``K - K // spread ... K + K // spread`` at every step; evaluate with K.

    Breaks the dependence on one dominating shared expert (MxD, appendix C.2; the paper's spread is 2).
    """

    kind: Literal["random_k"] = "random_k"
    """Selects this kind."""
    k: PositiveInt = 32
    """The most units active for a token at evaluation, and on average in training."""
    spread: PositiveInt = 2
    """The drawn K differs from ``k`` by at most ``k // spread``."""

    @property
    def max_k(self) -> int:
        """The largest K that can be drawn."""
        return self.k + self.k // self.spread

    @property
    def slug(self) -> str:
        """For example ``randomk32``."""
        return f"randomk{self.k}"

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return RandomK(self.k, self.spread)


class ReLUL1Config(SparsityConfig):
    """No top-k: every unit with a positive pre-activation is active, and an L1 term keeps them few (appendix B.6.1)."""

    kind: Literal["relu_l1"] = "relu_l1"
    """Selects this kind."""
    l1: NonNegativeFloat = 1e-3
    """Weight of ``sum_n |a_n| w_n`` in the loss, averaged over tokens."""
    weighting: Weighting = "norm"
    """What ``w_n`` is. ``norm``: ``||W_n||``, of the unit's whole weight. ``factor``: the norm of its own row alone,
    ``||c_n||`` in an MxD, ``||d_n||`` in a transcoder (where both are the same): the plain penalty of a layer with rows
    of unit norm. ``none``: 1, as the paper prints it; weak units with long rows then escape it."""

    @property
    def max_k(self) -> None:
        """Not bounded."""
        return None

    @property
    def slug(self) -> str:
        """For example ``l1-0.001``, or ``l1-0.001-factor``."""
        return f"l1-{self.l1:g}" + ("" if self.weighting == "norm" else f"-{self.weighting}")

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return ReLUL1(self.l1, self.weighting)


class JumpReLUConfig(SparsityConfig):
    """Every unit above a threshold of its own is active: for layers imported from tools that train such thresholds."""

    kind: Literal["jumprelu"] = "jumprelu"
    """Selects this kind."""

    @property
    def max_k(self) -> None:
        """Not bounded."""
        return None

    @property
    def slug(self) -> str:
        """``jumprelu``."""
        return "jumprelu"

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return JumpReLU(units)


class AlwaysConfig(SparsityConfig):
    """Every unit is active at every token: for layers without a choice, as linear maps."""

    general: ClassVar[bool] = False
    kind: Literal["always"] = "always"
    """Selects this kind."""

    @property
    def max_k(self) -> None:
        """Not bounded."""
        return None

    @property
    def slug(self) -> str:
        """``always``."""
        return "always"

    def build(self, units: int) -> Sparsity:
        """Build the module."""
        return Always()


AnySparsity = Annotated[
    TopKConfig | RandomKConfig | ReLUL1Config | JumpReLUConfig | AlwaysConfig, Field(discriminator="kind")
]


class TopK(Sparsity):
    """``a = TopK(relu(x G + b_G), K)``."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep the K largest."""
        return self.top(x, gate, self.k)


class RandomK(Sparsity):
    """``TopK`` with another K drawn for every training step.

    ``draws`` is the position in the sequence of all draws: the seed says where it begins, and each draw moves it on by
    one, so that a resumed run draws the same.
    """

    draws: Tensor

    def __init__(self, k: int, spread: int) -> None:
        super().__init__()
        self.k = k
        self.reach = k // spread
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))

    def seed(self, seed: int) -> None:
        """Begin at a position that depends on the seed; neighbouring seeds are 2^32 draws apart."""
        self.draws.fill_(seed % 2**31 << 32)

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep the K^ largest, K^ drawn in training mode and equal to K in evaluation mode."""
        k = self.k
        if self.training:
            k = random.Random(int(self.draws)).randint(max(1, k - self.reach), k + self.reach)
            self.draws += 1
        return self.top(x, gate, k)


class ReLUL1(Sparsity):
    """``a = relu(x G + b_G)`` with ``l1 * mean_tokens sum_n |a_n| w_n`` in the loss.

    The MxD paper prints ``lambda ||.||_1`` on the activations and does not say whether rows are kept at a fixed norm.
    Where they are not, half the activation and twice the row are the same function at half the penalty; weighted by
    ``norm`` or ``factor`` they cost the same. Normalising rows would add nothing to ``factor``, since ``a_n ||c_n||``
    is the activation that such a layer has.
    """

    def __init__(self, l1: float, weighting: Weighting) -> None:
        super().__init__()
        self.l1, self.weighting = l1, weighting

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep every positive pre-activation."""
        return _every_unit(torch.relu(_one_head(gate, x)))

    def penalty(self, code: Code, unit_norms: Norms, factor_norms: Norms) -> Tensor:
        """As ``Sparsity.penalty``: the weighted L1 norm of the activations, averaged over tokens."""
        norms = {"none": None, "factor": factor_norms, "norm": unit_norms}[self.weighting]
        rows = code.activations.reshape(-1, code.activations.shape[-1])
        return self.l1 * (rows.sum(-1) if norms is None else rows @ norms()).mean()


class JumpReLU(Sparsity):
    """``a = pre * (pre > threshold)`` with ``pre = relu(x G + b_G)`` (Rajamanoharan et al., 2024).

    The thresholds are state, not parameters: nothing here learns them, and with zeros this is a ReLU.
    """

    threshold: Tensor

    def __init__(self, units: int) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(units))

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep every pre-activation above its unit's threshold."""
        positive = torch.relu(_one_head(gate, x))
        return _every_unit(positive * (positive > self.threshold))


class Always(Sparsity):
    """``a_n = 1``: the scores of a ``ConstantGate``."""

    def forward(self, x: Tensor, gate: Gate) -> Code:
        """Keep every unit."""
        return _every_unit(_one_head(gate, x))


def _one_head(gate: Gate, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens units"]:
    """Return the pre-activations of a gate with a single head, all units in order."""
    return gate.scores(x).squeeze(1)


def _every_unit(activations: Float[Tensor, "tokens units"]) -> Code:
    """Return the code that lists all units in order."""
    units = torch.arange(activations.shape[-1], device=activations.device)
    return Code(activations, units.expand(activations.shape), all_units=True)

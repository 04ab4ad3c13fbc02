"""What every kind of sparsity offers: a frozen config, and a small module whose state lives in the state dict."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mxd.common.processes import ALONE, Processes
from mxd.common.settings import Frozen
from mxd.layers.gates import Code, Gate
from mxd.ops import CandidateDtype, Selection

Norms = Callable[[], Float[Tensor, " units"]]


class Sparsity(nn.Module, ABC):
    """Chooses units from their pre-activations.

    State that a kind updates in training (running statistics, thresholds, draws) lives in buffers, which are saved with
    the layer, and changes in training mode only.
    """

    candidates: CandidateDtype = "float32"
    """Set to ``bfloat16`` in training, where that is faster: see ``topk_linear``. Not used in evaluation mode."""
    measured: ClassVar[tuple[str, ...]] = ()
    """What ``measures`` says of a code, averaged over batches into metrics.jsonl."""
    processes: Processes = ALONE
    """Those that take each training step together: statistics of a batch are taken over all of them."""
    widening: float = 1.0
    """In training, K is multiplied by this: set before each step where K falls during a run (``training.k_start``)."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "tokens d_in"], gate: Gate) -> Code:
        """Return the code of some tokens."""

    def initialise(self, gate: Gate, mean_in: Float[Tensor, " d_in"], covariance: Float[Tensor, "d_in d_in"]) -> None:
        """Set what is initialised from data, where ``SparsityConfig.needs_covariance``.

        Args:
            gate: the layer's gate, initialised.
            mean_in: mean of what the layer reads.
            covariance: its covariance.
        """

    def begin_step(self, parts: Sequence[Float[Tensor, "_ d_in"]], gate: Gate) -> None:
        """See what the layer is about to read in one training step, for kinds that choose units for all of it at once.

        The trainer calls this before the step; code that does not takes each batch for a step of its own.

        Args:
            parts: the step's tokens in this process, as they will be given to ``forward``, in the same order.
            gate: the layer's gate.
        """

    def end_step(self) -> None:
        """Do what is to be done after the optimiser's update; most kinds do nothing."""

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

    def widened(self, k: int, most: int) -> int:
        """Return ``k`` multiplied by ``widening`` in training, but no more than ``most``."""
        return min(round(k * self.widening), most) if self.training else k

    def measures(self, code: Code) -> dict[str, Float[Tensor, ""]]:
        """Return the numbers named in ``measured``, for the code of some tokens."""
        return {}

    def top(self, x: Float[Tensor, "tokens d_in"], gate: Gate, k: int) -> Code:
        """Return the code of the ``k`` largest positive pre-activations of each token.

        Args:
            x: what the layer reads.
            gate: the layer's gate.
            k: how many.
        """
        k = self.widened(k, gate.units)
        selection = Selection()
        activations, indices = gate.top(x, k, self.candidates if self.training else "float32", selection)
        return Code(activations, indices, selection=selection)


class SparsityConfig(Frozen, ABC):
    """Fields common to all kinds: none."""

    general: ClassVar[bool] = True
    """Whether it works with every method whose gate gives one score for each unit (one head)."""
    simplex: ClassVar[bool] = False
    """Whether the activations of every token sum to 1."""
    kind: str
    """The kind's name."""

    @property
    @abstractmethod
    def max_k(self) -> int | None:
        """The largest number of units a token can use; ``None`` where it is not bounded."""

    @property
    def shown_k(self) -> int | None:
        """The number of units that tables and figures call K: ``max_k``, but for a kind that draws K in training."""
        return self.max_k

    @property
    @abstractmethod
    def slug(self) -> str:
        """A short name for folders and figures."""

    def nearest_units(self, units: int) -> int:
        """Return the number of units that the kind can choose from and that is nearest to ``units``."""
        return units

    @property
    def needs_covariance(self) -> bool:
        """Whether ``Sparsity.initialise`` is called with the covariance of what the layer reads."""
        return False

    def check_units(self, units: int) -> None:
        """Check that the kind can choose from so many units.

        Raises:
            ValueError: it cannot.
        """
        if self.max_k is not None and self.max_k > units:
            raise ValueError(f"k = {self.max_k} is more than num_units = {units}; lower k or raise num_units")

    def check_trainable(self) -> None:
        """Check that a run can train it.

        Raises:
            ValueError: it is for imported layers only.
        """

    @property
    def costliest(self) -> "SparsityConfig":
        """The kind that does what this one does in its costliest step, at every step; for plans."""
        return self

    def num_params(self, units: int) -> int:
        """Return the number of parameters that the kind learns for a layer of ``units`` units."""
        return 0

    @abstractmethod
    def build(self, units: int) -> Sparsity:
        """Build the module for a layer of ``units`` units."""


def one_head(gate: Gate, x: Float[Tensor, "tokens d_in"]) -> Float[Tensor, "tokens units"]:
    """Return the pre-activations of a gate with a single head, all units in order."""
    return gate.scores(x).squeeze(1)


def every_unit(activations: Float[Tensor, "tokens units"]) -> Code:
    """Return the code that lists all units in order."""
    units = torch.arange(activations.shape[-1], device=activations.device)
    return Code(activations, units.expand(activations.shape), all_units=True)

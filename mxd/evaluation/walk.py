"""The one way through held-out text: contexts or padded texts, the codes of layers on them, and what a splice predicts.

The base model runs once for all layers, and the blocks below a splice once for all splices.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.hardware import in_double
from mxd.data.contexts import Contexts, counted_positions
from mxd.layers import Code, ReplacementLayer
from mxd.model.frozen import FrozenModel
from mxd.splice import Replacement, Splice, check_provenance

K = TypeVar("K")

Sets = Mapping[str, Mapping[int, Replacement]]
"""Name -> what is spliced in together: block number -> replacement."""
TrainedSets = Mapping[str, Mapping[int, Trained]]
"""Name -> what is spliced in together: block number -> layer."""
Mask = Mapping[int, Sequence[int]]
"""Block number -> units that are switched off."""


def streamed(
    contexts: Contexts, tokens: int, forward_contexts: int | None = None
) -> Iterator[Int[np.ndarray, "batch seq"]]:
    """Yield batches of contexts until ``tokens`` positions are read or the text ends; nothing is kept.

    Args:
        contexts: the text.
        tokens: positions to read, rounded up to whole contexts.
        forward_contexts: contexts in a batch; by default about 1,024 tokens.

    Raises:
        MxdError: the text holds no complete context, or ``tokens`` is below 1.
    """
    if tokens < 1:
        raise MxdError(f"tokens is {tokens}; expected at least 1.")
    stream = contexts(0)
    first = next(stream, None)
    if first is None:
        raise MxdError("the evaluation text holds no complete context; give more text or a shorter context.")
    rows = islice(chain([first], stream), -(-tokens // len(first)))
    while piece := list(islice(rows, forward_contexts or max(1, 1024 // len(first)))):
        yield np.stack(piece)


@dataclass(frozen=True)
class PaddedTexts:
    """Texts padded on the right, where a causal model does not look."""

    ids: Int[np.ndarray, "batch seq"]
    real: Bool[np.ndarray, "batch seq"]
    """True at tokens of a text, False at padding."""
    numbers: list[int]
    """The texts' numbers."""

    def row(self, at: Int[np.ndarray, " tokens"]) -> Int[Tensor, " tokens"]:
        """Return which of the texts each token is in, given its position in the flattened batch."""
        return torch.from_numpy(at // self.ids.shape[1])


def padded(rows: Sequence[Sequence[int]], numbers: Sequence[int]) -> PaddedTexts:
    """Return some of the texts ``rows``, token ids, as one batch."""
    lengths = np.array([len(rows[number]) for number in numbers])
    real = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(real.shape, dtype=np.int64)
    ids[real] = np.concatenate([rows[number] for number in numbers])
    return PaddedTexts(ids, real, list(numbers))


def padded_batches(rows: Sequence[Sequence[int]], numbers: Sequence[int], size: int) -> Iterator[PaddedTexts]:
    """Yield some texts in batches of similar length.

    Args:
        rows: all texts, as token ids.
        numbers: the numbers of the texts to yield.
        size: texts in a batch.
    """
    ordered = sorted(numbers, key=lambda number: len(rows[number]))
    for start in range(0, len(ordered), size):
        yield padded(rows, ordered[start : start + size])


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Keep modules on a device and in evaluation mode while the context is open."""
    modes = {module.to(device): module.training for module in modules}
    for module in modes:
        module.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.train(training)


@contextmanager
def evaluating(model: FrozenModel, layers: Mapping[Any, Trained]) -> Iterator[None]:
    """Keep layers on the model's device and in evaluation mode while the context is open.

    Raises:
        MxdError: there are none, or they were trained for another model.
    """
    if not layers:
        raise MxdError("nothing to evaluate: give at least one trained layer.")
    for trained in layers.values():
        model.check_block(trained.provenance.block)
        check_provenance(model, trained.provenance.block, trained.provenance)
    with evaluation_mode((trained.layer for trained in layers.values()), model.device):
        yield


def check_units(layers: Mapping[str, Trained], units: Sequence[int] | None) -> None:
    """Check that every layer has some units.

    Args:
        layers: name -> a layer with its provenance.
        units: their numbers; ``None``: none are named.

    Raises:
        MxdError: a layer lacks one.
    """
    for name, trained in layers.items():
        count = trained.layer.num_units
        wrong = [unit for unit in units or () if not 0 <= unit < count]
        if wrong:
            raise MxdError(f"{name} has units 0 ... {count - 1}, got {wrong[0]}.")


def reads(
    model: FrozenModel,
    layers: Mapping[K, Trained],
    batch: Int[np.ndarray, "batch seq"],
    only: Bool[np.ndarray, "batch seq"] | None = None,
) -> Iterator[tuple[K, Float[Tensor, "tokens d_in"], Int[np.ndarray, " tokens"]]]:
    """Yield each layer's name, what it reads at the tokens that count, and their positions in the flattened batch.

    The base model runs once, up to the last of the layers. Tokens excluded from a layer's training do not count, nor
    those that it answers with its stored constant.

    Args:
        model: the frozen base model.
        layers: name -> a layer with its provenance.
        batch: token ids.
        only: where tokens may count at all; everywhere by default.
    """
    sites = model.record(torch.from_numpy(batch).long(), [trained.provenance.block for trained in layers.values()])
    for name, trained in layers.items():
        x, y = sites[trained.provenance.block]
        read = trained.layer.read(x, y)
        counted = counted_positions(batch, trained.provenance.excluded_ids) & (True if only is None else only)
        counted &= ~trained.layer.at_bos(read).cpu().numpy()
        yield name, read[torch.from_numpy(counted).to(read.device)].float(), np.flatnonzero(counted)


def codes(
    model: FrozenModel,
    layers: Mapping[K, Trained],
    batch: Int[np.ndarray, "batch seq"],
    only: Bool[np.ndarray, "batch seq"] | None = None,
) -> Iterator[tuple[K, Code, Int[np.ndarray, " tokens"]]]:
    """Yield each layer's name, its code at the tokens that count, and their positions; arguments as ``reads``."""
    for name, x, position in reads(model, layers, batch, only):
        yield name, layers[name].layer.encode(x), position


def next_token_logits(
    splice: Splice, ids: Int[Tensor, "batch seq"], below: Mapping[int, Any], start: int | None = None
) -> Float[Tensor, "batch targets vocab"]:
    """Return a spliced model's logits at all positions but the last, running only what a splice can change.

    Args:
        splice: the replacements in the MLPs' places.
        ids: the batch.
        below: what the block below ``start`` returned for this batch (``FrozenModel.block_outputs``).
        start: the first block that runs; by default the lowest spliced one, for ``below`` of the base model.
    """
    start = min(splice.layers) if start is None else start
    with splice.entered(), splice.model.resumed(start, below.get(start)):
        return splice.model.logits(ids)[:, :-1]


def cross_entropy(
    logp: Float[Tensor, "batch targets vocab"], targets: Int[Tensor, "batch targets"]
) -> Float[Tensor, "batch targets"]:
    """Return the negative log-probability of each target."""
    return -logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@runtime_checkable
class Estimate(Protocol):
    """A number with its standard error."""

    @property
    def value(self) -> float:
        """The number."""

    @property
    def standard_error(self) -> float:
        """Its standard error."""


class Mean:
    """A mean over tokens with a standard error that treats contexts, not tokens, as independent."""

    def __init__(self, totals: Sequence[float] = (), counts: Sequence[int] = ()) -> None:
        """Begin with what some contexts sum up to.

        Args:
            totals: the sum of each context's values.
            counts: how many tokens count in each.
        """
        self._totals, self._counts = list(totals), list(counts)
        self._unread: list[Tensor] = []

    @property
    def totals(self) -> list[float]:
        """The sum of the values of each context."""
        self._read()
        return self._totals

    @property
    def counts(self) -> list[int]:
        """How many tokens count in each context."""
        self._read()
        return self._counts

    def _read(self) -> None:
        """Take sums from the device that they were counted on, all at once: each reading waits for it."""
        if self._unread:
            totals, counts = torch.cat(self._unread, 1).tolist()
            self._totals += totals
            self._counts += map(int, counts)
            self._unread = []

    @classmethod
    def of(cls, means: Sequence[float], counts: Sequence[int]) -> "Mean":
        """Return the mean over tokens of what has these means in contexts with so many tokens."""
        return cls([mean * count for mean, count in zip(means, counts, strict=True)], list(counts))

    @classmethod
    def sum(cls, means: Sequence["Mean"]) -> "Mean":
        """Return the mean of the sum of several values that were taken over the same tokens."""
        return cls([sum(totals) for totals in zip(*(mean.totals for mean in means), strict=True)], means[0].counts)

    def less(self, other: "Mean") -> "Mean":
        """Return the mean of how much larger a value is than another that was taken over the same tokens."""
        return Mean([a - b for a, b in zip(self.totals, other.totals, strict=True)], self.counts)

    def see(self, values: Float[Tensor, "batch seq"], counted: Bool[Tensor, "batch seq"]) -> None:
        """Count one value per position."""
        self._unread.append(torch.stack([in_double(part).sum(-1) for part in (values * counted, counted)]))
        if values.device.type == "cpu":
            # There is nothing to wait for, and a small tensor that is kept lies where logits lay and keeps glibc from
            # putting the next ones there: memory would grow by a batch's logits with every batch and splice.
            self._read()

    @property
    def value(self) -> float:
        """The mean."""
        return sum(self.totals) / max(sum(self.counts), 1)

    @property
    def by_context(self) -> list[float]:
        """The mean in each context, to a millionth; 0 in one without tokens that count."""
        return [round(total / max(count, 1), 6) for total, count in zip(self.totals, self.counts, strict=True)]

    @property
    def standard_error(self) -> float:
        """Standard error of the ratio estimator over contexts (linearised); infinite for a single context."""
        n = len(self.counts)
        if n < 2:
            return math.inf
        # The mean is a ratio, sum(totals) / sum(counts): to first order its error is the sum of these residuals over
        # sum(counts), and n / (n - 1) corrects their variance for the estimated mean.
        residuals = np.array(self.totals) - self.value * np.array(self.counts)
        return float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / max(sum(self.counts), 1))


class Totals:
    """Named totals in float64: numbers on a CPU, elsewhere summed on the device, so that only reading one waits."""

    def __init__(self, *names: str) -> None:
        self._totals: dict[str, Tensor | float] = dict.fromkeys(names, 0.0)

    def add(self, name: str, part: Float[Tensor, ""] | Int[Tensor, ""] | float, times: int = 1) -> None:
        """Add a number.

        Args:
            name: of the total.
            part: the number.
            times: how often it is added.
        """
        if isinstance(part, Tensor):
            part = float(part) if part.device.type == "cpu" else in_double(part)  # on a CPU as in Mean.see
        self._totals[name] = self._totals[name] + part * times

    def __getitem__(self, name: str) -> float:
        """Return a total."""
        return float(self._totals[name])


class CodeMoments:
    """The mean code over tokens, how often each unit is active, and its largest activation."""

    def __init__(self, layer: ReplacementLayer) -> None:
        self.layer = layer
        self.sums = torch.zeros(layer.num_units, dtype=torch.float64)
        self.counts = torch.zeros(layer.num_units, dtype=torch.int64)
        self.maxima = torch.zeros(layer.num_units)
        self.tokens = 0

    def count(self, code: Code) -> None:
        """Count the code of a batch of tokens."""
        self.tokens += len(code.activations)
        code = code.cpu()
        values, indices = code.activations.reshape(-1), code.indices.reshape(-1)
        self.sums.index_add_(0, indices, values.double())
        self.counts.index_add_(0, indices, (values > 0).long())
        self.maxima.scatter_reduce_(0, indices, values.float(), "amax")

    def mean_code(self, like: Tensor) -> Code:
        """Return the mean activations of all units as a code for every row of ``like``."""
        mean = (self.sums / max(self.tokens, 1)).to(like)
        indices = torch.arange(len(mean), device=like.device)
        return Code(mean.expand(len(like), -1), indices.expand(len(like), -1), all_units=True)

    @property
    def rates(self) -> Float[Tensor, " units"]:
        """The share of tokens at which each unit is active."""
        return self.counts.double() / max(self.tokens, 1)

    @property
    def leading_unit(self) -> int:
        """The unit that is active most often."""
        return int(self.counts.argmax())

    @property
    def dead_share(self) -> float:
        """The share of units that were never active."""
        return float((self.counts == 0).float().mean())

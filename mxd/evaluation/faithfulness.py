"""Is it faithful? Reconstruction on held-out text, and what splicing does to the model's next-token predictions.

The headline is the full splice: the replacement answers at every position. Beside it, over the same targets, stands the
splice *around special tokens*, at whose positions the base MLP answers: in some blocks those are attention sinks with
enormous norms, on which the whole model leans, and leaving them to the base MLP hides what a replacement does to them.

Cross-entropies are in nats. A position counts in them if its *target* token is not excluded; in reconstruction if its
own token is not. The blocks below the lowest spliced one run once for all replacements.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained, load_layer
from mxd.common.errors import MxdError
from mxd.common.progress import progress
from mxd.data.contexts import Blocks, mask_of, special_ids
from mxd.evaluation.account import Account
from mxd.evaluation.structure import streamed
from mxd.layers import ReplacementLayer
from mxd.model.frozen import FrozenModel
from mxd.ops.losses import normalized_mse
from mxd.questions import DEFAULTS
from mxd.splice import Replacement, Where, spliced

Sets = Mapping[str, Mapping[int, Replacement]]
"""Name -> what is spliced in together: block number -> replacement."""


@dataclass
class Mean:
    """A mean over tokens with a standard error that treats contexts, not tokens, as independent."""

    totals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def see(self, values: Float[Tensor, "batch seq"], counted: Bool[Tensor, "batch seq"]) -> None:
        """Count one value per position."""
        self.totals += (values.double() * counted).sum(-1).tolist()
        self.counts += counted.sum(-1).tolist()

    @property
    def value(self) -> float:
        """The mean."""
        return sum(self.totals) / max(sum(self.counts), 1)

    @property
    def standard_error(self) -> float:
        """Standard error of the ratio estimator over contexts (linearised); infinite for a single context."""
        n = len(self.counts)
        if n < 2:
            return math.inf
        residuals = np.array(self.totals) - self.value * np.array(self.counts)
        return float(np.sqrt(n / (n - 1) * (residuals**2).sum()) / max(sum(self.counts), 1))


@dataclass(frozen=True)
class BasePrediction:
    """What the base model predicts on a batch: computed once, compared with every splice."""

    targets: Int[Tensor, "batch seq"]
    counted: Bool[Tensor, "batch seq"]
    logp: Float[Tensor, "batch seq vocab"]
    p: Float[Tensor, "batch seq vocab"]
    top: Int[Tensor, "batch seq"]
    ce: Float[Tensor, "batch seq"]

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, counted: Tensor) -> "BasePrediction":
        """Compute everything from the logits of the positions before the targets."""
        logp = logits.log_softmax(-1)
        return cls(targets, counted, logp, logp.exp(), logp.argmax(-1), cross_entropy(logp, targets))


def cross_entropy(
    logp: Float[Tensor, "batch seq vocab"], targets: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch seq"]:
    """Return the negative log-probability of each target."""
    return -logp.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


class Prediction:
    """How one way of running the model predicts the next token, beside the base model."""

    def __init__(self) -> None:
        self.ce, self.increase, self.kl, self.agreement = Mean(), Mean(), Mean(), Mean()

    def see(self, base: BasePrediction, logits: Float[Tensor, "batch seq vocab"]) -> None:
        """Count a batch, given this way's logits of the positions before the targets."""
        logp = logits.log_softmax(-1)
        ce = cross_entropy(logp, base.targets)
        self.ce.see(ce, base.counted)
        self.increase.see(ce - base.ce, base.counted)
        self.agreement.see((base.top == logp.argmax(-1)).float(), base.counted)
        self.kl.see((base.p * (base.logp - logp)).sum(-1), base.counted)

    def report(self) -> dict[str, float]:
        """Return the metrics."""
        return {
            "ce_spliced": self.ce.value,
            "ce_spliced_se": self.ce.standard_error,
            "ce_increase": self.increase.value,
            "ce_increase_se": self.increase.standard_error,
            "kl": self.kl.value,
            "kl_se": self.kl.standard_error,
            "top1_agreement": self.agreement.value,
        }


@dataclass(frozen=True)
class Way:
    """One way of running the model: what is spliced in, and the tokens at whose positions the base MLP answers."""

    replacements: Mapping[int, Replacement]
    base_at: tuple[int, ...]
    prediction: Prediction = field(default_factory=Prediction)


class Measured:
    """The ways in which one set of blocks is run: everything replaced, and around excluded tokens."""

    def __init__(self, replacements: Mapping[int, Replacement], excluded: tuple[int, ...]) -> None:
        self.full = Way(replacements, ())
        self.around = Way(replacements, excluded) if excluded else self.full

    @property
    def ways(self) -> list[Way]:
        """Each of them once."""
        return [self.full] if self.around is self.full else [self.full, self.around]


class Reconstruction:
    """How well one replacement reproduces the MLP's outputs, from the base model's own activations.

    ``account`` has seen the means of the same tokens; ``None`` leaves it out.
    """

    def __init__(self, layer: nn.Module, account: Account | None) -> None:
        self.layer = layer
        self.account = account
        self.sums = dict.fromkeys(("nmse", "error", "y_squared", "tokens"), 0.0)
        self.y = torch.zeros(())

    def see(self, x: Float[Tensor, "tokens d_in"], y: Float[Tensor, "tokens d_out"]) -> None:
        """Count a batch of MLP inputs and outputs."""
        if isinstance(self.layer, ReplacementLayer):
            x = self.layer.read(x, y)
            code = self.layer.encode(x)
            prediction = self.layer.decode(x, code)
            if self.account is not None:
                self.account.see(x, y, code, prediction)
        else:
            prediction = self.layer(x)
        self.sums["tokens"] += len(x)
        self.sums["nmse"] += float(normalized_mse(prediction, y)) * len(x)
        self.sums["error"] += float((y - prediction).double().square().sum())
        self.sums["y_squared"] += float(y.double().square().sum())
        self.y = self.y + y.double().sum(0).cpu()

    def report(self) -> dict[str, float]:
        """Return the reconstruction, and what it is made of."""
        n = self.sums["tokens"]
        fvu = self.sums["error"] / (self.sums["y_squared"] - float(self.y.square().sum()) / n)
        found = {"normalized_mse": self.sums["nmse"] / n, "fvu": fvu, "explained_variance": 1 - fvu}
        return found | (self.account.report() if self.account is not None else {})


class Constant(nn.Module):
    """Answers one vector everywhere: zero- and mean-ablation."""

    def __init__(self, value: Float[Tensor, " d_out"]) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        """Return the vector at every position."""
        return self.value.to(x).expand(*x.shape[:-1], -1)


@torch.no_grad()
def evaluate(
    model: FrozenModel,
    given: Mapping[str, Mapping[int, Replacement | Where]],
    blocks: Blocks,
    tokens: int = DEFAULTS.faithfulness.tokens,
    excluded: Sequence[int] | None = None,
    forward_contexts: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure each set of replacements on held-out text.

    Args:
        model: the frozen base model.
        given: name -> what is spliced in together: layers, modules, or paths and Hub references of layers.
        blocks: the contexts, in a fixed order.
        tokens: positions to read, rounded up to whole contexts.
        excluded: tokens that count neither as targets nor in reconstruction; by default the tokenizer's special ones.
        forward_contexts: contexts in one forward, by default about 1,024 tokens; memory grows with the vocabulary.

    Returns:
        Name -> of the full splice, where the replacement answers at every position, also at excluded tokens:
        ``ce_base``, ``ce_spliced``, ``ce_increase``, ``loss_recovered``, ``kl``, ``top1_agreement``, standard errors
        ``*_se``, ``tokens``; the same over the same targets with the base MLP answering at excluded tokens, under
        ``around_special``; in both the ``ce_zero`` and ``ce_mean`` of ablations; and for each layer under ``layers``
        the reconstruction and what it is made of (``Account``).

    Raises:
        MxdError: no text, no sets, or replacements that do not fit the model.
    """
    sets: Sets = {name: {n: _loaded(r) for n, r in members.items()} for name, members in given.items()}
    ids = tuple(_special(model) if excluded is None else excluded)
    batches = list(streamed(blocks, tokens, forward_contexts))
    layers = sorted({number for members in sets.values() for number in members})
    if not layers:
        raise MxdError("nothing to evaluate: give at least one replacement.")
    for members in sets.values():
        with spliced(model, members):  # every check of a splice, once
            pass
    bare = {name: {n: _bare(r).to(model.device) for n, r in members.items()} for name, members in sets.items()}
    modes = {module: module.training for members in bare.values() for module in members.values()}
    for module in modes:
        module.eval()
    places = {tuple(sorted(members)) for members in sets.values()}
    forwards = 2 + (2 if ids else 1) * (len(sets) + 2 * len(places))
    total = forwards * sum(batch.size for batch in batches)
    try:
        with progress(f"evaluating {len(sets)} splices", total, "tokens through the model") as advance:
            means, accounts = _first_pass(model, bare, layers, batches, ids, advance)
            return _second_pass(model, bare, means, accounts, batches, ids, advance)
    finally:
        for module, training in modes.items():
            module.train(training)


def _first_pass(
    model: FrozenModel,
    sets: Mapping[str, Mapping[int, nn.Module]],
    layers: Sequence[int],
    batches: Sequence[Int[np.ndarray, "_ seq"]],
    excluded: Sequence[int],
    advance: Any,
) -> tuple[dict[int, Tensor], dict[tuple[str, int], Account]]:
    """Return the mean output of each block's MLP, and the accounts of all replacements, which have seen the means."""
    sums: dict[int, Tensor] = {}
    accounts = {
        (name, n): Account(layer)
        for name, members in sets.items()
        for n, layer in members.items()
        if isinstance(layer, ReplacementLayer)
    }
    count = 0
    for batch in batches:
        counted = torch.from_numpy(mask_of(batch, excluded))
        count += int(counted.sum())
        recorded = {n: _counted(site, counted) for n, site in model.record(_tensor(batch), layers).items()}
        for number, (_, y) in recorded.items():
            sums[number] = sums.get(number, 0) + y.double().sum(0)
        for (_, number), account in accounts.items():
            account.see_means(account.layer.read(*recorded[number]))
        advance(batch.size)
    if not count:
        raise MxdError("every token of the evaluation text is excluded; check the excluded tokens and the text.")
    return {number: (total / count).float() for number, total in sums.items()}, accounts


def _second_pass(
    model: FrozenModel,
    sets: Mapping[str, Mapping[int, nn.Module]],
    means: Mapping[int, Tensor],
    accounts: Mapping[tuple[str, int], Account],
    batches: Sequence[Int[np.ndarray, "_ seq"]],
    excluded: tuple[int, ...],
    advance: Any,
) -> dict[str, dict[str, Any]]:
    places = {name: tuple(sorted(members)) for name, members in sets.items()}
    splices = {name: Measured(members, excluded) for name, members in sets.items()}
    zero, mean = (
        {place: Measured({n: Constant(factor * means[n]) for n in place}, excluded) for place in set(places.values())}
        for factor in (0, 1)
    )
    ways = [way for measured in (splices, zero, mean) for one in measured.values() for way in one.ways]
    recons = {
        (name, n): Reconstruction(layer, accounts.get((name, n)))
        for name, members in sets.items()
        for n, layer in members.items()
    }
    base_ce = Mean()
    for batch in batches:
        ids = _tensor(batch).to(model.device)
        counted = torch.from_numpy(mask_of(batch, excluded)).to(model.device)
        with model.block_outputs(list(means)) as hidden, model.watched(list(means)) as seen:
            base = BasePrediction.of(model.logits(ids)[:, :-1], ids[:, 1:], counted[:, 1:])
        base_ce.see(base.ce, base.counted)
        for (_, n), reconstruction in recons.items():
            reconstruction.see(*_counted(seen[n], counted))
        for way in ways:
            lowest = min(way.replacements)
            with (
                spliced(model, way.replacements, base_at=way.base_at, check=False),
                model.resumed(lowest, hidden.get(lowest)),
            ):
                way.prediction.see(base, model.logits(ids)[:, :-1])
            advance(batch.size)
        advance(batch.size)
    return {
        name: _summary(base_ce, splices[name], zero[place], mean[place])
        | {"excluded": list(excluded), "layers": {str(n): recons[name, n].report() for n in place}}
        for name, place in places.items()
    }


def _summary(base: Mean, splice: Measured, zero: Measured, mean: Measured) -> dict[str, Any]:
    def of(splice: Way, zero: Way, mean: Way) -> dict[str, Any]:
        found = {"ce_zero": zero.prediction.ce.value, "ce_mean": mean.prediction.ce.value}
        return splice.prediction.report() | found | {"loss_recovered": recovered(splice.prediction, zero.prediction)}

    return {
        "tokens": sum(base.counts),
        "contexts": len(base.counts),
        "ce_base": base.value,
        "ce_base_se": base.standard_error,
        **of(splice.full, zero.full, mean.full),
        "around_special": of(splice.around, zero.around, mean.around),
    }


def recovered(splice: Prediction, zero: Prediction) -> float | None:
    """Return the share of the loss from zero-ablation that is won back.

    ``None`` where that loss is within two standard errors of nothing: a share of noise would be read as a result.
    """
    gap = zero.increase.value
    if not gap > 2 * zero.increase.standard_error:
        return None
    return 1 - splice.increase.value / gap


def _counted(
    site: tuple[Float[Tensor, "batch seq d_in"], Float[Tensor, "batch seq d_out"]], counted: Bool[Tensor, "batch seq"]
) -> tuple[Float[Tensor, "tokens d_in"], Float[Tensor, "tokens d_out"]]:
    """Return a block's activations at the positions that count, in float32."""
    x, y = site
    kept = counted.to(x.device)
    return x[kept].float(), y[kept].float()


def _special(model: FrozenModel) -> list[int]:
    return special_ids(model.tokenizer) if model.tokenizer is not None else []


def _loaded(replacement: Replacement | Where) -> Replacement:
    return load_layer(replacement) if isinstance(replacement, str | Path) else replacement


def _bare(replacement: Replacement) -> nn.Module:
    return replacement.layer if isinstance(replacement, Trained) else replacement


def _tensor(batch: Int[np.ndarray, "batch seq"]) -> Int[Tensor, "batch seq"]:
    return torch.from_numpy(batch).long()

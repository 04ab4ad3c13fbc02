"""Is it faithful? Reconstruction on held-out text, and what splicing does to the model's next-token predictions.

Cross-entropies are in nats. A position counts in them if its *target* token is not masked; in reconstruction if its
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

from mxd.checkpoint import Trained, load_layer
from mxd.data import Blocks, mask_of
from mxd.errors import MxdError
from mxd.evaluation.structure import CodeMoments, Structure, streamed
from mxd.layers import ReplacementLayer
from mxd.losses import normalized_mse
from mxd.model import FrozenModel
from mxd.progress import progress
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


class Reconstruction:
    """How well one replacement reproduces the MLP's outputs, from the base model's own activations."""

    def __init__(self, layer: nn.Module, moments: CodeMoments | None) -> None:
        self.layer = layer
        self.moments = moments
        self.structure = Structure(moments) if moments is not None else None
        self.sums = dict.fromkeys(("nmse", "error", "y_squared", "active", "tokens"), 0.0)
        self.y = torch.zeros(())

    def see(self, x: Float[Tensor, "tokens d_in"], y: Float[Tensor, "tokens d_out"]) -> None:
        """Count a batch of MLP inputs and outputs."""
        if isinstance(self.layer, ReplacementLayer):
            x = x if self.layer.config.reads == "mlp_in" else y
            code = self.layer.encode(x)
            prediction = self.layer.decode(x, code)
            self.sums["active"] += float((code.values > 0).sum())
            if self.structure is not None:
                self.structure.see(x, y, code, prediction)
        else:
            prediction = self.layer(x)
        self.sums["tokens"] += len(x)
        self.sums["nmse"] += float(normalized_mse(prediction, y)) * len(x)
        self.sums["error"] += float((y - prediction).double().square().sum())
        self.sums["y_squared"] += float(y.double().square().sum())
        self.y = self.y + y.double().sum(0).cpu()

    def report(self) -> dict[str, float]:
        """Return the reconstruction and structure metrics."""
        n = self.sums["tokens"]
        fvu = self.sums["error"] / (self.sums["y_squared"] - float(self.y.square().sum()) / n)
        found = {"normalized_mse": self.sums["nmse"] / n, "fvu": fvu, "explained_variance": 1 - fvu}
        if self.moments is not None and self.structure is not None:
            found |= {"l0": self.sums["active"] / n, "dead_share": self.moments.dead_share}
            found |= self.structure.report()
        return found


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
    masked_ids: Sequence[int] | None = None,
    forward_contexts: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure each set of replacements on held-out text.

    Args:
        model: the frozen base model.
        given: name -> what is spliced in together: layers, modules, or paths and Hub references of layers.
        blocks: the contexts, in a fixed order.
        tokens: positions to read, rounded up to whole contexts.
        masked_ids: tokens left out; by default those the replacements were trained without.
        forward_contexts: contexts in one forward, by default about 1,024 tokens; memory grows with the vocabulary.

    Returns:
        Name -> ``ce_base``, ``ce_spliced``, ``ce_zero``, ``ce_mean``, ``ce_increase``, ``loss_recovered``, ``kl``,
        ``top1_agreement``, standard errors ``*_se``, ``tokens``, and for each layer under ``layers`` the
        reconstruction and structure metrics.

    Raises:
        MxdError: no text, no sets, or replacements that do not fit the model.
    """
    sets: Sets = {name: {n: _loaded(r) for n, r in members.items()} for name, members in given.items()}
    masked = _common_mask(sets) if masked_ids is None else tuple(masked_ids)
    batches = list(streamed(blocks, tokens, forward_contexts))
    layers = sorted({number for members in sets.values() for number in members})
    if not layers:
        raise MxdError("nothing to evaluate: give at least one replacement.")
    for number in layers:
        model.check_layer(number)
    bare = {name: {n: _bare(r).to(model.device) for n, r in members.items()} for name, members in sets.items()}
    modes = {module: module.training for members in bare.values() for module in members.values()}
    for module in modes:
        module.eval()
    forwards = 2 + len(sets) + 2 * len({tuple(sorted(members)) for members in sets.values()})
    total = forwards * sum(batch.size for batch in batches)
    try:
        with progress(f"evaluating {len(sets)} splices", total, "tokens through the model") as advance:
            means, moments = _first_pass(model, bare, layers, batches, masked, advance)
            return _second_pass(model, sets, bare, means, moments, batches, masked, advance)
    finally:
        for module, training in modes.items():
            module.train(training)


def _first_pass(
    model: FrozenModel,
    sets: Mapping[str, Mapping[int, nn.Module]],
    layers: Sequence[int],
    batches: Sequence[Int[np.ndarray, "_ seq"]],
    masked: Sequence[int],
    advance: Any,
) -> tuple[dict[int, Tensor], dict[int, CodeMoments]]:
    """Return the mean output of each layer, and (by identity of the module) the moments of each replacement's code."""
    sums: dict[int, Tensor] = {}
    moments = {id(r): CodeMoments(r) for m in sets.values() for r in m.values() if isinstance(r, ReplacementLayer)}
    readers = {number: {id(m[number]): m[number] for m in sets.values() if number in m} for number in layers}
    count = 0
    for batch in batches:
        counted = torch.from_numpy(mask_of(batch, masked))
        count += int(counted.sum())
        for number, (x, y) in model.record(_tensor(batch), layers).items():
            kept = counted.to(x.device)
            x, y = x[kept].float(), y[kept].float()
            sums[number] = sums.get(number, 0) + y.double().sum(0)
            for key, layer in readers[number].items():
                if key in moments and isinstance(layer, ReplacementLayer):
                    moments[key].see(x if layer.config.reads == "mlp_in" else y)
        advance(batch.size)
    if not count:
        raise MxdError("every token of the evaluation text is masked; check masked_ids and the text.")
    return {number: (total / count).float() for number, total in sums.items()}, moments


def _second_pass(
    model: FrozenModel,
    sets: Sets,
    bare: Mapping[str, Mapping[int, nn.Module]],
    means: Mapping[int, Tensor],
    moments: Mapping[int, CodeMoments],
    batches: Sequence[Int[np.ndarray, "_ seq"]],
    masked: Sequence[int],
    advance: Any,
) -> dict[str, dict[str, Any]]:
    layers = sorted(means)
    places = {tuple(sorted(members)) for members in sets.values()}
    ablations: dict[tuple[str, tuple[int, ...]], Mapping[int, nn.Module]] = {}
    for place in places:
        ablations["zero", place] = {n: Constant(torch.zeros_like(means[n])) for n in place}
        ablations["mean", place] = {n: Constant(means[n]) for n in place}
    ways: dict[Any, Mapping[int, Replacement]] = {**sets, **ablations}
    predictions = {key: Prediction() for key in ways}
    recons = {
        (name, n): Reconstruction(layer, moments.get(id(layer)))
        for name, members in bare.items()
        for n, layer in members.items()
    }
    base_ce = Mean()
    for batch in batches:
        ids = _tensor(batch).to(model.device)
        counted = torch.from_numpy(mask_of(batch, masked)).to(model.device)
        with model.block_outputs(layers) as hidden, model.watched(layers) as seen:
            base = BasePrediction.of(model.logits(ids)[:, :-1], ids[:, 1:], counted[:, 1:])
        base_ce.see(base.ce, base.counted)
        for (_, n), reconstruction in recons.items():
            x, y = seen[n]
            reconstruction.see(x[counted].float(), y[counted].float())
        for key, replacements in ways.items():
            lowest = min(replacements)
            with spliced(model, replacements, masked), model.resumed(lowest, hidden.get(lowest)):
                predictions[key].see(base, model.logits(ids)[:, :-1])
            advance(batch.size)
        advance(batch.size)
    results = {}
    for name, members in sets.items():
        place = tuple(sorted(members))
        zero, mean = predictions["zero", place], predictions["mean", place]
        results[name] = _summary(base_ce, predictions[name], zero, mean) | {
            "layers": {str(n): recons[name, n].report() for n in place}
        }
    return results


def _summary(base: Mean, spliced_in: Prediction, zero: Prediction, mean: Prediction) -> dict[str, Any]:
    gap = zero.ce.value - base.value
    return {
        "tokens": sum(base.counts),
        "contexts": len(base.counts),
        "ce_base": base.value,
        "ce_base_se": base.standard_error,
        "ce_spliced": spliced_in.ce.value,
        "ce_spliced_se": spliced_in.ce.standard_error,
        "ce_increase": spliced_in.increase.value,
        "ce_increase_se": spliced_in.increase.standard_error,
        "ce_zero": zero.ce.value,
        "ce_mean": mean.ce.value,
        "loss_recovered": (zero.ce.value - spliced_in.ce.value) / gap if gap else math.nan,
        "kl": spliced_in.kl.value,
        "kl_se": spliced_in.kl.standard_error,
        "top1_agreement": spliced_in.agreement.value,
    }


def _common_mask(sets: Sets) -> tuple[int, ...]:
    masks = {r.provenance.masked_ids for members in sets.values() for r in members.values() if isinstance(r, Trained)}
    if len(masks) > 1:
        raise MxdError(
            f"the replacements were trained with different masks ({sorted(masks)}); evaluate them apart, or pass "
            "masked_ids."
        )
    return masks.pop() if masks else ()


def _loaded(replacement: Replacement | Where) -> Replacement:
    return load_layer(replacement) if isinstance(replacement, str | Path) else replacement


def _bare(replacement: Replacement) -> nn.Module:
    return replacement.layer if isinstance(replacement, Trained) else replacement


def _tensor(batch: Int[np.ndarray, "batch seq"]) -> Int[Tensor, "batch seq"]:
    return torch.from_numpy(batch).long()

"""Is it faithful? Reconstruction on held-out text, and what splicing does to the model's next-token predictions.

The headline is the full splice: the replacement answers at every position. Beside it, over the same targets, stands the
splice *around special tokens*, where the base MLP answers at their positions: in some blocks these are attention sinks
with enormous norms, on which the whole model leans, and a splice that leaves them to the base MLP hides what the
replacement does to them.

Cross-entropies are in nats. A position counts in them if its *target* token is not excluded; in reconstruction if its
own token is not. The blocks below the lowest spliced one run once for all replacements.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mxd.common.errors import MxdError
from mxd.common.hardware import in_double
from mxd.common.numbers import plural
from mxd.common.progress import Advance, progress
from mxd.data.contexts import Contexts, counted_positions, special_ids
from mxd.evaluation.account import Account
from mxd.evaluation.checkpoints import Subject, describe
from mxd.evaluation.conventions import Losses, Positions, Variances, losses, padding_of, recovered
from mxd.evaluation.harness import Tasks, score
from mxd.evaluation.walk import Mean, Totals, cross_entropy, evaluation_mode, next_token_logits, streamed
from mxd.layers import ReplacementConfig, ReplacementLayer
from mxd.layers.losses import normalized_mse
from mxd.model.frozen import FrozenModel
from mxd.planning.flops import token_flops
from mxd.questions import DEFAULTS, FaithfulnessConfig
from mxd.splice import Replacement, Splice, Where


@dataclass(frozen=True)
class BasePrediction:
    """What the base model predicts on a batch; computed once and compared with every splice."""

    targets: Int[Tensor, "batch seq"]
    counted: Bool[Tensor, "batch seq"]
    logp: Float[Tensor, "batch seq vocab"]
    p: Float[Tensor, "batch seq vocab"]
    top: Int[Tensor, "batch seq"]
    ce: Float[Tensor, "batch seq"]
    positions: Positions | None = None
    """What counts where other tools measure; ``None``: their losses are not taken."""

    @classmethod
    def of(
        cls, logits: Tensor, targets: Tensor, counted: Tensor, positions: Positions | None = None
    ) -> "BasePrediction":
        """Compute everything from the logits of the positions before the targets.

        Args:
            logits: [batch, seq, vocab].
            targets: the token that follows each position, [batch, seq].
            counted: which targets count, [batch, seq].
            positions: what counts where other tools measure.
        """
        logp = logits.log_softmax(-1)
        return cls(targets, counted, logp, logp.exp(), logp.argmax(-1), cross_entropy(logp, targets), positions)


class Prediction:
    """How one way of running the model predicts the next token, compared with the base model."""

    def __init__(self) -> None:
        self.ce, self.increase, self.kl, self.agreement = Mean(), Mean(), Mean(), Mean()
        self.losses = Losses()

    def see(self, base: BasePrediction, logits: Float[Tensor, "batch seq vocab"]) -> None:
        """Count a batch, given the logits of the positions before the targets."""
        logp = logits.log_softmax(-1)
        ce = cross_entropy(logp, base.targets)
        kl = (base.p * (base.logp - logp)).sum(-1)
        self.ce.see(ce, base.counted)
        self.increase.see(ce - base.ce, base.counted)
        self.agreement.see((base.top == logp.argmax(-1)).float(), base.counted)
        self.kl.see(kl, base.counted)
        if base.positions is not None:
            self.losses.see(base.positions, ce - base.ce, kl)

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
    """One way of running the model, and what it predicts."""

    splice: Splice
    prediction: Prediction


class Ways:
    """The ways in which one set of blocks is run: everything replaced, and around excluded tokens."""

    def __init__(
        self, model: FrozenModel, replacements: Mapping[int, Replacement | Where], excluded: Sequence[int]
    ) -> None:
        self.full = Way(Splice(model, replacements), Prediction())
        self.around = self.full
        if excluded:
            self.around = Way(Splice(model, self.full.splice.layers, base_at=excluded), Prediction())

    def __iter__(self) -> Iterator[Way]:
        """Yield each of them once."""
        return iter((self.full,) if self.around is self.full else (self.full, self.around))


class Reconstruction:
    """How well one replacement reproduces the MLP's outputs, from the base model's own activations.

    ``account`` has seen the means of the same tokens; ``None`` leaves it out.
    """

    def __init__(self, layer: nn.Module, account: Account | None) -> None:
        self.layer = layer
        self.account = account
        self.tokens = 0
        self.totals = Totals("nmse", "error", "y_squared", "active")
        self.y: Tensor | float = 0.0

    @classmethod
    def of(cls, layer: nn.Module) -> "Reconstruction":
        """Return a reconstruction with an account where there can be one: where the output is a sum over units."""
        return cls(layer, Account(layer) if isinstance(layer, ReplacementLayer) and layer.additive else None)

    def see_means(self, x: Float[Tensor, "tokens d_in"], y: Float[Tensor, "tokens d_out"]) -> None:
        """Show the account a batch of MLP inputs and outputs, before ``see``."""
        if self.account is not None:
            self.account.see_means(self.account.layer.read(x, y))

    def see(self, x: Float[Tensor, "tokens d_in"], y: Float[Tensor, "tokens d_out"]) -> Float[Tensor, "tokens d_out"]:
        """Count a batch of MLP inputs and outputs, and return what the replacement makes of them."""
        if isinstance(self.layer, ReplacementLayer):
            x = self.layer.read(x, y)
            code = self.layer.encode(x)
            prediction = self.layer.decode(x, code)
            self.totals.add("active", code.active_count())
            if self.account is not None:
                self.account.see(x, y, code, prediction)
        else:
            prediction = self.layer(x)
        self.tokens += len(x)
        self.totals.add("nmse", normalized_mse(prediction, y), len(x))
        self.totals.add("error", in_double(y - prediction).square().sum())
        self.totals.add("y_squared", in_double(y).square().sum())
        self.y = self.y + in_double(y).sum(0)
        return prediction

    def predict(
        self, x: Float[Tensor, "tokens d_in"], y: Float[Tensor, "tokens d_out"]
    ) -> Float[Tensor, "tokens d_out"]:
        """Return what the replacement makes of MLP inputs and outputs that do not count."""
        if not len(x):
            return y
        return self.layer(self.layer.read(x, y) if isinstance(self.layer, ReplacementLayer) else x)

    def report(self) -> dict[str, float]:
        """Return the reconstruction, and what it is made of.

        Raises:
            MxdError: the MLP's outputs do not vary, so that nothing can be said of their variance.
        """
        n = self.tokens
        variance = self.totals["y_squared"] - float(torch.as_tensor(self.y).square().sum()) / n
        if variance <= 0:
            raise MxdError(
                f"the MLP's output is the same at all positions that count ({n:,}), so no share of its variance can be "
                "explained; read more (--tokens) or longer contexts (--context)."
            )
        fvu = self.totals["error"] / variance
        metrics = {"normalized_mse": self.totals["nmse"] / n, "fvu": fvu, "explained_variance": 1 - fvu}
        if isinstance(self.layer, ReplacementLayer):
            metrics["l0"] = self.totals["active"] / n
        return metrics | (self.account.report() if self.account is not None else {})


class Constant(nn.Module):
    """Returns one vector everywhere: zero- and mean-ablation."""

    def __init__(self, value: Float[Tensor, " d_out"]) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        """Return the vector at every position."""
        return self.value.to(x).expand(*x.shape[:-1], -1).clone()  # Falcon adds to what an MLP returns, in place


class MeasuredSet:
    """What is measured of one set of replacements; constructing it runs every check of its splice."""

    def __init__(
        self, model: FrozenModel, replacements: Mapping[int, Replacement | Where], excluded: Sequence[int]
    ) -> None:
        self.ways = Ways(model, replacements, excluded)
        self.layers = self.ways.full.splice.layers
        self.reconstructions = {number: Reconstruction.of(layer) for number, layer in self.layers.items()}
        self.variances: dict[int, Variances] = {}

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks whose MLPs are replaced."""
        return tuple(sorted(self.layers))

    def report(self, base: Mean, ablations: "Ablations") -> dict[str, Any]:
        """Return the metrics of the full splice, and of the one around excluded tokens."""
        splice, zero, mean = self.ways, ablations.zero, ablations.mean
        return {
            "tokens": sum(base.counts),
            "contexts": len(base.counts),
            "ce_base": base.value,
            "ce_base_se": base.standard_error,
            **_beside_ablations(splice.full, zero.full, mean.full),
            "around_special": _beside_ablations(splice.around, zero.around, mean.around),
            "conventions": losses(
                splice.full.prediction.losses,
                splice.around.prediction.losses,
                zero.full.prediction.losses,
                splice.full.prediction.increase.value,
            ),
            "by_context": {"tokens": base.counts, "ce_increase": splice.full.prediction.increase.by_context},
        }

    def see(
        self,
        seen: Mapping[int, tuple[Tensor, Tensor]],
        at: Int[Tensor, " tokens"],
        others: Int[Tensor, " other"],
        means: Mapping[int, Tensor],
    ) -> None:
        """Show the base model's activations at a batch to the reconstructions.

        Args:
            seen: block -> its MLP's inputs and outputs.
            at: the positions at which they count, in the flattened batch.
            others: all other positions.
            means: block -> mean output of its MLP where that counts.
        """
        for number, reconstruction in self.reconstructions.items():
            variances = self.variances.setdefault(number, Variances(means[number]))
            x, y = site_at(seen[number], at)
            variances.see(y, reconstruction.see(x, y))
            x, y = site_at(seen[number], others)
            variances.see_excluded(y, reconstruction.predict(x, y))

    def report_blocks(self) -> dict[str, dict[str, Any]]:
        """Return the reconstruction of each block's MLP."""
        return {
            str(number): self.reconstructions[number].report() | {"conventions": self.variances[number].report()}
            for number in self.blocks
        }


@dataclass(frozen=True)
class Ablations:
    """The MLPs of one set of blocks replaced by zero, and by their mean output."""

    zero: Ways
    mean: Ways

    @classmethod
    def of(
        cls, model: FrozenModel, blocks: Sequence[int], means: Mapping[int, Tensor], excluded: Sequence[int]
    ) -> "Ablations":
        """Return both ablations of some blocks.

        Args:
            model: the frozen base model.
            blocks: the blocks whose MLPs are ablated together.
            means: block -> mean output of its MLP, [d_out].
            excluded: tokens at which the base MLP answers in ``Ways.around``.
        """
        return cls(*(Ways(model, {n: Constant(factor * means[n]) for n in blocks}, excluded) for factor in (0, 1)))


def answer(
    subject: Subject,
    how: FaithfulnessConfig = DEFAULTS.faithfulness,
    together: bool = False,
    tasks: Tasks | None = None,
) -> dict[str, Any]:
    """Measure the faithfulness of checkpoints on held-out text.

    Args:
        subject: the checkpoints.
        how: how much text is read.
        together: splice in sets of them, instead of each alone (``Subject.sets``).
        tasks: lm-eval tasks to score as well (``find_tasks``).

    Returns:
        The numbers with everything they depend on: ``results`` by name, and under ``lm_eval`` the scores of tasks.

    Raises:
        MxdError: as ``evaluate`` and ``score``.
    """
    sets = subject.sets(together)
    results = evaluate(subject.base, sets, subject.contexts(how.seed), how.tokens)
    for name, members in sets.items():
        results[name]["replacements"] = [describe(trained) for trained in members.values()]
        blocks = results[name]["blocks"]
        costs = [_cost(t.layer.config, blocks[str(number)]["l0"]) for number, t in members.items()]
        results[name] |= {key: sum(cost[key] for cost in costs) for key in costs[0]}
    scores = {} if tasks is None else {"lm_eval": score(subject.base, sets, tasks)}
    return subject.document(results, tokens_asked=how.tokens, seed=how.seed) | scores


@torch.no_grad()
def evaluate(
    model: FrozenModel,
    sets: Mapping[str, Mapping[int, Replacement | Where]],
    contexts: Contexts,
    tokens: int = DEFAULTS.faithfulness.tokens,
    excluded: Sequence[int] | None = None,
    forward_contexts: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure each set of replacements on held-out text.

    Args:
        model: the frozen base model.
        sets: name -> what is spliced in together: layers, modules, or paths and Hub references of layers.
        contexts: the text, in a fixed order.
        tokens: positions to read, rounded up to whole contexts.
        excluded: tokens that count neither as targets nor in reconstruction; the tokenizer's special ones by default.
        forward_contexts: contexts in one forward, by default about 1,024 tokens; memory grows with the vocabulary.

    Returns:
        Name -> of the full splice, where the replacement answers at every position, also at excluded tokens:
        ``ce_base``, ``ce_spliced``, ``ce_increase``, ``loss_recovered``, ``kl``, ``top1_agreement``, standard errors
        ``*_se``, ``tokens``; the same over the same targets with the base MLP answering at excluded tokens, under
        ``around_special``; in both the ``ce_zero`` and ``ce_mean`` of ablations; ``by_context`` the targets that count
        in each context and their mean increase, with which splices are compared on the same text (``Mean.of``); and
        for each layer under ``blocks`` the reconstruction and what it is made of (``Account``). In both under
        ``conventions`` the same by the definitions of other tools (``conventions.py``).

    Raises:
        MxdError: no text, no sets, or replacements that do not fit the model.
    """
    ids = tuple(special(model) if excluded is None else excluded)
    batches = list(streamed(contexts, tokens, forward_contexts))
    if not any(sets.values()):
        raise MxdError("nothing to evaluate: give at least one replacement.")
    measured = {name: MeasuredSet(model, replacements, ids) for name, replacements in sets.items()}
    block_groups = {member.blocks for member in measured.values()}
    forwards = 2 + (2 if ids else 1) * (len(measured) + 2 * len(block_groups))
    total = forwards * sum(batch.size for batch in batches)
    modules = [layer for member in measured.values() for layer in member.layers.values()]
    with (
        evaluation_mode(modules, model.device),
        progress(f"evaluating {plural(len(measured), 'splice')}", total, "tokens through the model") as advance,
    ):
        means = _first_pass(model, measured.values(), batches, ids, advance)
        ablations = {blocks: Ablations.of(model, blocks, means, ids) for blocks in block_groups}
        base = _second_pass(model, measured.values(), ablations.values(), means, batches, ids, advance)
        return {
            name: member.report(base, ablations[member.blocks])
            | {"excluded": list(ids), "blocks": member.report_blocks()}
            for name, member in measured.items()
        }


def _first_pass(
    model: FrozenModel,
    sets: Collection[MeasuredSet],
    batches: Sequence[Int[np.ndarray, "_ seq"]],
    excluded: Sequence[int],
    advance: Advance,
) -> dict[int, Tensor]:
    """Return the mean output of each block's MLP, and show the means to the accounts of all replacements."""
    sums: dict[int, Tensor] = {}
    layers = sorted({number for member in sets for number in member.layers})
    count = 0
    for batch in batches:
        counted = counted_positions(batch, excluded)
        count += int(counted.sum())
        at = positions(counted, model.device)
        recorded = {n: site_at(site, at) for n, site in model.record(ids_of(batch), layers).items()}
        for number, (_, y) in recorded.items():
            sums[number] = sums.get(number, 0) + in_double(y).sum(0)
        for member in sets:
            for number, reconstruction in member.reconstructions.items():
                reconstruction.see_means(*recorded[number])
        advance(batch.size)
    if not count:
        raise MxdError("every token of the evaluation text is excluded; check the excluded tokens and the text.")
    return {number: (total / count).float() for number, total in sums.items()}


def _second_pass(
    model: FrozenModel,
    sets: Collection[MeasuredSet],
    ablations: Collection[Ablations],
    means: Mapping[int, Tensor],
    batches: Sequence[Int[np.ndarray, "_ seq"]],
    excluded: Sequence[int],
    advance: Advance,
) -> Mean:
    """Run every splice and every ablation beside the base model, whose cross-entropy is returned."""
    layers = sorted({number for member in sets for number in member.layers})
    all_ways = [member.ways for member in sets] + [ways for pair in ablations for ways in (pair.zero, pair.mean)]
    base_ce, padding = Mean(), padding_of(model.tokenizer)
    for batch in batches:
        ids = ids_of(batch).to(model.device)
        mask = counted_positions(batch, excluded)
        counted = torch.from_numpy(mask).to(model.device)
        at, others = (positions(part, model.device) for part in (mask, ~mask))
        with model.block_outputs(layers) as below, model.watched(layers) as seen:
            conventions = Positions.of(ids, counted, padding)
            base = BasePrediction.of(model.logits(ids)[:, :-1], ids[:, 1:], counted[:, 1:], conventions)
        base_ce.see(base.ce, base.counted)
        for member in sets:
            member.see(seen, at, others, means)
        for way in chain.from_iterable(all_ways):
            way.prediction.see(base, next_token_logits(way.splice, ids, below))
            advance(batch.size)
        advance(batch.size)
    return base_ce


def _beside_ablations(splice: Way, zero: Way, mean: Way) -> dict[str, Any]:
    ablated = {"ce_zero": zero.prediction.ce.value, "ce_mean": mean.prediction.ce.value}
    share = recovered(splice.prediction.increase, zero.prediction.increase)
    return splice.prediction.report() | ablated | {"loss_recovered": share}


def _cost(config: ReplacementConfig, l0: float) -> dict[str, int | float]:
    """Return a layer's size and the work it does for a token."""
    return {
        "params": config.num_params,
        "active_params": config.active_params(l0),
        "flops": token_flops(config),
    }


def positions(counted: Bool[np.ndarray, "batch seq"], device: torch.device) -> Int[Tensor, " tokens"]:
    """Return the positions in the flattened batch that count; found here, since a GPU's mask makes each use wait."""
    return torch.from_numpy(np.flatnonzero(counted)).to(device)


def site_at(
    site: tuple[Float[Tensor, "batch seq d_in"], Float[Tensor, "batch seq d_out"]], at: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, "tokens d_in"], Float[Tensor, "tokens d_out"]]:
    """Return a block's activations at some positions of the flattened batch, in float32."""
    x, y = site
    return x.flatten(0, 1)[at].float(), y.flatten(0, 1)[at].float()


def special(model: FrozenModel) -> list[int]:
    """Return the special tokens of the model's tokenizer, none where it has no tokenizer."""
    return special_ids(model.tokenizer) if model.tokenizer is not None else []


def ids_of(batch: Int[np.ndarray, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """Return a batch of token ids as a tensor."""
    return torch.from_numpy(batch).long()

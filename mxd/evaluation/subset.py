"""Does a layer need all of its active units? Only a share of them is kept, and the loss and the error are measured.

After "Implicit bias in Soft MoE" (section 4): if a few units, found by summing coefficients over an input, suffice for
that input, then units are specialised. The strongest are kept in four modes (``choosing.strengths``): of each token; of
each text, which uses its future and so is an analysis; of a text's first half, used on the second, as a causal model
could; of a corpus, used on another half of it, which is pruning. Beside each stand as many random active units. Special
tokens, often attention sinks, keep all their units: what a subset does to them is another question.

A layer that is spliced in alone reads what it reads in the base model, so its code is computed once for all subsets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.hardware import in_double
from mxd.common.numbers import plural
from mxd.common.progress import Advance, progress
from mxd.data.contexts import Contexts, counted_positions
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.choosing import Ranking, drawn, limited, ranking, strengths
from mxd.evaluation.decoding import decoding_times
from mxd.evaluation.faithfulness import special
from mxd.evaluation.walk import CodeMoments, Mean, Totals, codes, cross_entropy, evaluating, next_token_logits, streamed
from mxd.layers import Code
from mxd.layers.losses import squared_error
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, SubsetConfig
from mxd.splice import Splice

ENTRIES = 2**24
"""Entries of a code that are formed at a time, but for those of one text: 64 MiB, and twice that for their order."""


def answer(subject: Subject, how: SubsetConfig = DEFAULTS.subset) -> dict[str, Any]:
    """Keep a share of the active units of checkpoints.

    Args:
        subject: the checkpoints.
        how: how much text is read, and what is kept.

    Raises:
        MxdError: as ``evaluate_subset``.
    """
    results = evaluate_subset(subject.base, subject.trained, subject.contexts(how.seed), how)
    asked = {"tokens_asked": how.tokens, "draws": how.draws, "seed": how.seed}
    return subject.document(results, replacements=subject.members, **asked)


class Given(nn.Module):
    """Returns an output that was computed before."""

    out: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        return self.out


@dataclass(frozen=True)
class Batch:
    """Some texts, and the base model on them."""

    ids: Int[Tensor, "texts seq"]
    numbers: range
    """The texts' numbers."""
    counted: Bool[Tensor, "texts seq"]
    """Tokens that are not special."""
    ce: Float[Tensor, "texts targets"]
    """The base model's cross-entropy of each token but the first."""
    below: Mapping[int, Any]
    """What ``next_token_logits`` needs."""

    @property
    def later(self) -> Bool[Tensor, " seq"]:
        """The positions of the second half."""
        seq = self.ids.shape[1]
        return torch.arange(seq, device=self.ids.device) >= seq // 2


@dataclass(frozen=True)
class Effect:
    """What a layer does with a code: at all positions of some texts."""

    increase: Float[Tensor, "texts targets"]
    error: Float[Tensor, "texts seq"]
    activations: Float[Tensor, "texts seq k"]


@dataclass
class Outcome:
    """What a share of the units does, over all texts."""

    increase: Mean = field(default_factory=Mean)
    error: Mean = field(default_factory=Mean)
    totals: Totals = field(default_factory=lambda: Totals("mass", "active"))
    tokens: int = 0

    @property
    def mass(self) -> float:
        """Sum of the activations."""
        return self.totals["mass"]

    def see(
        self, effect: Effect, counted: Bool[Tensor, "texts seq"], coded: Bool[Tensor, "texts seq"], at: Tensor
    ) -> None:
        """Count some texts.

        Args:
            effect: what the layer does there.
            counted: tokens that count as targets and in the error.
            coded: tokens whose code counts.
            at: the positions at which the share is kept, [seq].
        """
        self.increase.see(effect.increase, counted[:, 1:] & at[:-1])
        self.error.see(effect.error, counted & at)
        activations = effect.activations[coded & at]
        self.totals.add("mass", in_double(activations).sum())
        self.totals.add("active", (activations > 0).sum())
        self.tokens += len(activations)

    def report(self, mass: float) -> dict[str, float]:
        """Return the metrics; ``mass`` is the sum of all activations there."""
        return {
            "ce_increase": self.increase.value,
            "ce_increase_se": self.increase.standard_error,
            "normalized_mse": self.error.value,
            "normalized_mse_se": self.error.standard_error,
            "mass": self.mass / mass if mass else 0.0,
            "l0": self.totals["active"] / max(self.tokens, 1),
        }


class Kept:
    """One share of the active units: the strongest, and as many drawn at random."""

    def __init__(self, share: float, draws: int) -> None:
        self.share = share
        self.chosen = Outcome()
        self.random = [Outcome() for _ in range(draws if 0 < share < 1 else 0)]  # of all or none, nothing is drawn
        self.totals, self.choices = Totals("units", "active"), 0

    def count(self, found: Ranking, counted: Bool[Tensor, "*lead"] | None) -> None:
        """Count how many units are kept in each choice: in all, or where ``counted``."""
        numbers = (found.kept(self.share), found.active)
        kept, active = (number if counted is None else number[counted] for number in numbers)
        self.totals.add("units", kept.sum())
        self.totals.add("active", active.sum())
        self.choices += kept.numel()

    def report(self, mass: float) -> dict[str, Any]:
        """Return the metrics; ``mass`` is the sum of all activations where the share is kept."""
        units, active = (self.totals[name] / max(self.choices, 1) for name in ("units", "active"))
        found = {"share": self.share, "units": units, "active": active} | self.chosen.report(mass)
        if not self.random:
            return found
        reports = [outcome.report(mass) for outcome in self.random]
        random: dict[str, Any] = {}
        for key in ("ce_increase", "normalized_mse", "mass", "l0"):
            values = np.array([report[key] for report in reports])
            random |= {key: float(values.mean()), f"{key}_sd": float(values.std(ddof=1))}
        spread, gain = random["ce_increase_sd"], random["ce_increase"] - found["ce_increase"]
        random["draws"] = [report["ce_increase"] for report in reports]
        return found | {"random": random, "z": gain / spread if spread > 0 else None}


class Subsets:
    """One layer, spliced in with shares of its units."""

    def __init__(
        self, model: FrozenModel, trained: Trained, corpus: Float[Tensor, " units"], how: SubsetConfig
    ) -> None:
        self.layer, self.block, self.corpus, self.how = trained.layer, trained.provenance.block, corpus, how
        self.given = Given()
        self.splice = Splice(model, {self.block: self.given}, check=False)
        self.full = {mode: Outcome() for mode in how.modes}
        """The layer as it is, where each mode keeps a share."""
        self.kept = {mode: [Kept(share, how.draws) for share in shares(how)] for mode in how.modes}
        self.times: list[dict[str, Any]] = []

    def see(self, batch: Batch, x: Tensor, y: Tensor, advance: Advance) -> None:
        """Measure everything on some texts.

        Args:
            batch: the texts.
            x: the MLP's inputs there.
            y: its outputs.
            advance: told of each forward.
        """
        read = self.layer.read(x, y).float()
        coded = batch.counted & ~self.layer.at_bos(read)
        code = self.layer.encode(read)
        listed = Code(code.activations, code.indices, code.all_units)
        if self.how.timings and not self.times:
            self.times = decoding_times(self.layer, read[coded], shares(self.how)[:-1], self.how.timings)

        def effect(code: Code) -> Effect:
            out = self.layer.decode(read, code)
            self.given.out = out.to(x.dtype)
            logits = next_token_logits(self.splice, batch.ids, batch.below)
            increase = cross_entropy(logits.log_softmax(-1), batch.ids[:, 1:]) - batch.ce
            norm = torch.linalg.vector_norm(y.float(), dim=-1).clamp_min(1e-30)
            advance(batch.ids.numel())
            return Effect(increase, squared_error(out, y) / norm / y.shape[-1], code.activations)

        unchanged = effect(listed)
        for mode in self.how.modes:
            at = batch.later if mode == "prefix" else torch.ones_like(batch.later)
            limits = coded & at
            self.full[mode].see(unchanged, batch.counted, coded, at)
            strong = strengths(mode, listed, coded, batch.later, self.corpus)
            found = ranking(strong)
            for kept in self.kept[mode]:
                kept.count(found, coded if mode == "token" else None)
                changed = effect(limited(mode, listed, found.first(kept.share), limits))
                kept.chosen.see(changed, batch.counted, coded, at)
            for draw in range(self.how.draws):
                order = ranking(strong, drawn(mode, strong, batch.numbers, self.how.seed, draw))
                for kept in (kept for kept in self.kept[mode] if kept.random):
                    changed = effect(limited(mode, listed, order.first(kept.share), limits))
                    kept.random[draw].see(changed, batch.counted, coded, at)

    def report(self) -> dict[str, Any]:
        """Return the metrics."""
        modes = {}
        for mode, full in self.full.items():
            points = [kept.report(full.mass) for kept in self.kept[mode]]
            modes[mode] = {"full": full.report(full.mass), "points": points}
        return {"block": self.block, "modes": modes, "decoding": self.times}


def shares(how: SubsetConfig) -> list[float]:
    """Return the shares to keep, from the largest: those asked for, all and nothing."""
    return sorted({1.0, *how.keep, 0.0}, reverse=True)


@torch.no_grad()
def evaluate_subset(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    contexts: Contexts,
    how: SubsetConfig = DEFAULTS.subset,
    forward_contexts: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Keep a share of each layer's active units, and measure what the layer does then, spliced in alone.

    Args:
        model: the frozen base model.
        layers: name -> a layer with its provenance.
        contexts: the text; a context is a text here. The first half of what is read chooses the units of ``global``,
            the second is measured.
        how: what is asked.
        forward_contexts: contexts in one forward, by default about 1,024 tokens, and fewer where codes are dense and
            long.

    Returns:
        Name -> ``block``; ``texts`` and ``tokens`` that are measured; and under ``modes``, for each mode, the layer as
        it is (``full``) and ``points`` for each share, with 1 and 0 added: how many ``units`` are kept on average of
        how many ``active`` ones; the ``mass`` that they hold, the sum of their activations over that of all; ``l0``,
        units still active for a token; ``ce_increase`` and ``normalized_mse`` with standard errors over texts; the
        mean over draws (and standard deviation ``*_sd``) with as many active units at random, ``random``; and ``z``,
        how many of these standard deviations the CE increase lies below their mean, ``None`` where they do not differ.
        ``decoding`` has the milliseconds in which a batch is decoded with k units for each token.

    Raises:
        MxdError: no layers, layers that do not fit the model, or fewer than two contexts of text.
    """
    rows = np.concatenate(list(streamed(contexts, 2 * how.tokens)))
    if len(rows) < 2:
        raise MxdError("the evaluation text holds one context; expected at least 2: give more text or a shorter one.")
    choosing, measuring = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    drawing = sum(0 < share < 1 for share in shares(how))
    splices = len(layers) * (1 + len(how.modes) * (len(shares(how)) + how.draws * drawing))
    total = choosing.size + measuring.size * (1 + splices)
    blocks = sorted({trained.provenance.block for trained in layers.values()})
    title = f"subsets of the units of {plural(len(layers), 'layer')}"
    with evaluating(model, layers), progress(title, total, "tokens through the model") as advance:
        size = forward_contexts or _at_a_time(layers, rows.shape[1])
        corpora = _corpora(model, layers, choosing, size, advance)
        found = {name: Subsets(model, trained, corpora[name], how) for name, trained in layers.items()}
        base = Mean()
        for start in range(0, len(measuring), size):
            some = measuring[start : start + size]
            ids = torch.from_numpy(some).long().to(model.device)
            counted = torch.from_numpy(counted_positions(some, special(model))).to(model.device)
            with model.block_outputs(blocks) as below, model.watched(blocks) as seen:
                ce = cross_entropy(model.logits(ids)[:, :-1].log_softmax(-1), ids[:, 1:])
            base.see(ce, counted[:, 1:])
            batch = Batch(ids, range(start, start + len(some)), counted, ce, below)
            advance(some.size)
            for subsets in found.values():
                subsets.see(batch, *seen[subsets.block], advance)
    about = {"texts": len(measuring), "tokens": sum(base.counts), "ce_base": base.value}
    return {name: about | subsets.report() for name, subsets in found.items()}


def _corpora(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    rows: Int[np.ndarray, "contexts seq"],
    size: int,
    advance: Advance,
) -> dict[str, Float[Tensor, " units"]]:
    """Return the sums of each layer's activations over some texts, ``size`` of them at a time."""
    moments = {name: CodeMoments(trained.layer) for name, trained in layers.items()}
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        for name, code, _ in codes(model, layers, some):
            moments[name].count(code)
        advance(some.size)
    return {name: moment.sums for name, moment in moments.items()}


def _at_a_time(layers: Mapping[str, Trained], seq: int) -> int:
    """Return how many contexts are read at a time."""
    configs = [trained.layer.config for trained in layers.values()]
    entries = max(config.sparsity.max_k or config.num_units or 1 for config in configs)
    return max(1, min(1024, ENTRIES // entries) // seq)

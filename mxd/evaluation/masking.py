"""Can a topic be switched off? Units are chosen by the texts they fire on and masked, and the loss is measured again.

By domain (Monet, ICLR 2025, section 5.1): a unit belongs to the domain where its mean coefficient is at least twice
that in any other. By score (section 5.3): units go whose coefficients correlate with a score over tokens, if they do so
more than by chance. Units are chosen by their coefficients in the unchanged model, on one half of the texts, and losses
measured on the other; as many active units, drawn at random, are the control.
"""

import heapq
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.progress import Advance, progress
from mxd.data.contexts import head_ids, mask_of, special_ids
from mxd.evaluation.correlation import Correlation, Correlations, text_sums
from mxd.evaluation.faithfulness import Mean, cross_entropy
from mxd.evaluation.structure import codes, evaluating
from mxd.layers import Code
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, PURGING
from mxd.splice import spliced

TrainedSets = Mapping[str, Mapping[int, Trained]]
"""Name -> what is spliced in together: block number -> layer."""
Mask = Mapping[int, Sequence[int]]
"""Block number -> units that are switched off."""
Place = tuple[str, int]
"""The name of a set and a block number: one layer."""
Score = float | Sequence[float]
"""Of a text, or one for each of its tokens."""

FEWEST_TEXTS = 30
"""Texts that must choose units by a score."""


@dataclass(frozen=True)
class Texts:
    """Texts in groups, as token ids; one half chooses units, the other is measured."""

    rows: list[list[int]]
    groups: list[int]
    choosing: list[int]
    """Numbers of the texts that choose."""
    measuring: list[int]
    """Numbers of the texts that are measured."""


@dataclass(frozen=True)
class Batch:
    """Texts of similar length, padded on the right, where a causal model does not look."""

    ids: Int[np.ndarray, "batch seq"]
    real: Bool[np.ndarray, "batch seq"]
    """Where a token of the text stands."""
    numbers: list[int]
    """The texts' numbers."""

    def row(self, at: Int[np.ndarray, " tokens"]) -> Int[Tensor, " tokens"]:
        """Return which of the texts tokens stand in, given where they stand in the flattened batch."""
        return torch.from_numpy(at // self.ids.shape[1])


@dataclass(frozen=True)
class Losses:
    """Losses by group: the base model's, the splice's, and the changes by each mask."""

    base: list[Mean]
    spliced: list[Mean]
    changes: list[list[Mean]]


@torch.no_grad()
def evaluate_masking(
    model: FrozenModel,
    sets: TrainedSets,
    texts: Sequence[str],
    labels: Sequence[str],
    ratio: float = DEFAULTS.masking.ratio,
    limit: int = DEFAULTS.masking.limit,
    context: int = 128,
    bos: bool = True,
    seed: int = DEFAULTS.masking.seed,
    batch: int = 8,
) -> dict[str, dict[str, Any]]:
    """Mask each domain's units, and measure what that does to the loss on every domain.

    Args:
        model: the frozen base model.
        sets: name -> what is spliced in together.
        texts: texts of all domains.
        labels: the domain of each.
        ratio: a unit belongs to a domain if its mean coefficient there is at least so many times the next largest.
        limit: texts of each domain, at most; half of them choose units, the other half is measured.
        context: tokens of a text that are read.
        bos: begin each text with BOS where the tokenizer has one.
        seed: draws the texts and the control's units.
        batch: texts in one forward.

    Returns:
        Name -> ``domains``; how many ``units`` each has, and ``members``, which (domain -> block -> units); on each
        domain's measured ``texts``, the ``loss`` of the splice and ``loss_base`` of the base model, in nats per token;
        ``matrix[i][j]``, the change of the loss on domain j when the units of domain i are masked, with standard errors
        over texts ``matrix_se``; ``control`` and ``control_se``, the same for units drawn at random; and the means of
        the diagonals and of the rest, ``target``, ``others``, ``control_target``, ``control_others``.

    Raises:
        MxdError: fewer than two domains, a domain with fewer than two texts, no tokenizer, numbers that make no sense,
            or layers that do not fit the model.
    """
    domains = sorted(set(labels))
    _at_least("ratio", ratio, 1)
    _at_least("the number of domains", len(domains), 2)
    groups = [domains.index(label) for label in labels]
    text = halves(model.tokenizer, texts, groups, domains, limit, context, bos, seed)
    layers = _layers(sets)
    total = len(text.choosing) + len(text.measuring) * (1 + len(sets) * (1 + 2 * len(domains)))
    title = f"masking {len(domains)} domains in {len(sets)} splices"
    with evaluating(model, layers), progress(title, total, "texts") as advance:
        sums = {place: torch.zeros(len(domains), one.layer.num_units).double() for place, one in layers.items()}
        tokens = {place: torch.zeros(len(domains)).double() for place in layers}
        for place, code, at, some in _activity(model, layers, text, batch, advance):
            of, row = torch.tensor([groups[number] for number in some.numbers]), some.row(at)
            units = layers[place].layer.num_units
            sums[place].index_add_(0, of, text_sums(code, row, len(of), units))
            tokens[place] += torch.bincount(of[row], minlength=len(domains))
        scores = {place: sums[place] / tokens[place].clamp_min(1).unsqueeze(-1) for place in layers}
        own = {place: belonging(score, ratio) for place, score in scores.items()}
        masks = {
            name: [{n: _where(own[name, n] == domain) for n in members} for domain in range(len(domains))]
            for name, members in sets.items()
        }
        active = {place: score.sum(0) > 0 for place, score in scores.items()}
        ways = {name: [*masks[name], *_control(name, masks[name], active, seed)] for name in sets}
        losses = _measure(model, sets, ways, text, batch, advance)
    results = {}
    for name in sets:
        changes, control = losses[name].changes[: len(domains)], losses[name].changes[len(domains) :]
        results[name] = {
            "domains": domains,
            "ratio": ratio,
            "texts": [sum(groups[n] == domain for n in text.measuring) for domain in range(len(domains))],
            "units": {d: sum(map(len, mask.values())) for d, mask in zip(domains, masks[name], strict=True)},
            "members": {
                d: {str(n): units for n, units in mask.items()} for d, mask in zip(domains, masks[name], strict=True)
            },
            "loss_base": [mean.value for mean in losses[name].base],
            "loss": [mean.value for mean in losses[name].spliced],
            **_table("matrix", changes),
            **_table("control", control),
        }
        for key, prefix in (("matrix", ""), ("control", "control_")):
            values = np.array(results[name][key])
            diagonal = np.eye(len(domains), dtype=bool)
            results[name] |= {
                f"{prefix}target": float(values[diagonal].mean()),
                f"{prefix}others": float(values[~diagonal].mean()),
            }
    return results


@torch.no_grad()
def evaluate_purging(
    model: FrozenModel,
    sets: TrainedSets,
    texts: Sequence[str],
    scores: Sequence[Score],
    thresholds: Sequence[float] = PURGING.thresholds,
    limit: int = PURGING.limit,
    context: int = 128,
    bos: bool = True,
    seed: int = PURGING.seed,
    batch: int = 8,
) -> dict[str, dict[str, Any]]:
    """Mask the units whose coefficients correlate with a score, and measure what that does to the loss.

    The correlation is Pearson's over tokens, as in Monet: each has the score of its text, or one of its own. Of many
    units some correlate by chance, most of all on few texts, so a unit must do so more than by chance, too: see
    ``Correlation``. Losses are given for the texts with scores up to the mean score, and for those above.

    Args:
        model: the frozen base model.
        sets: name -> what is spliced in together.
        texts: the texts.
        scores: the score of each, toxicity for example: a number, or one for each token of the model's tokenizer.
        thresholds: correlations from which on a unit is masked (Monet's, for toxicity).
        limit: texts with scores up to the mean, and above it, at most; half of them choose units, the rest is measured.
        context: tokens of a text that are read.
        bos: begin each text with BOS where the tokenizer has one; it has the mean of the text's scores.
        seed: draws the texts, the permutations and the control's units.
        batch: texts in one forward.

    Returns:
        Name -> ``mean_score``; ``loss`` and ``loss_base`` of ``texts`` up to it and above; ``choosing``, the number of
        texts that chose units; for each of ``thresholds`` how many ``units`` are masked and their ``share``, and how
        many were ``removed``, which reach it but not beyond chance; the ``changes`` of the two losses, with
        ``changes_se``, and with as many units drawn at random ``control`` and ``control_se``; and the ``leading`` ten
        units by ``correlation``, with that over texts, ``correlation_texts``, and whether it is ``beyond_chance``.

    Raises:
        MxdError: scores that are all the same, fewer than 30 texts to choose by, a list of scores that is not one for
            each token, and as ``evaluate_masking``.
    """
    of_texts = [float(np.mean(score)) for score in scores]
    mean = float(np.mean(of_texts)) if of_texts else 0.0
    groups = [int(score > mean) for score in of_texts]
    names = [f"scores up to {mean:g}", f"scores above {mean:g}"]
    _at_least("the number of different scores", len(set(of_texts)), 2)
    text = halves(model.tokenizer, texts, groups, names, limit, context, bos, seed)
    if len(text.choosing) < FEWEST_TEXTS:
        raise MxdError(
            f"{len(text.choosing)} texts choose the units; expected at least {FEWEST_TEXTS}, since on fewer many units "
            f"correlate with any score by chance. Half of the texts choose: give {2 * FEWEST_TEXTS} or more, and a "
            f"--limit of {FEWEST_TEXTS} or more."
        )
    head = len(head_ids(model.tokenizer, bos))
    of_tokens = {n: _token_scores(n, scores[n], text.rows[n], head, context) for n in text.choosing}
    layers = _layers(sets)
    total = len(text.choosing) + len(text.measuring) * (1 + len(sets) * (1 + 2 * len(thresholds)))
    with evaluating(model, layers), progress(f"purging {len(sets)} splices", total, "texts") as advance:
        seen = {place: Correlation(one.layer.num_units) for place, one in layers.items()}
        for place, code, at, some in _activity(model, layers, text, batch, advance):
            score = np.zeros(some.ids.shape)
            score[some.real] = np.concatenate([of_tokens[number] for number in some.numbers])
            seen[place].see(code, some.row(at), torch.from_numpy(score.flat[at]), len(some.numbers))
        found = {place: one.report(seed) for place, one in seen.items()}
        reach = {
            name: [{n: found[name, n].over_tokens >= threshold for n in members} for threshold in thresholds]
            for name, members in sets.items()
        }
        masks = {
            name: [{n: _where(units & found[name, n].beyond_chance) for n, units in each.items()} for each in reached]
            for name, reached in reach.items()
        }
        active = {place: one.active for place, one in seen.items()}
        ways = {name: [*masks[name], *_control(name, masks[name], active, seed)] for name in sets}
        losses = _measure(model, sets, ways, text, batch, advance)
    results = {}
    for name, members in sets.items():
        sizes = [sum(map(len, mask.values())) for mask in masks[name]]
        every = sum(one.layer.num_units for one in members.values())
        reaching = [sum(int(units.sum()) for units in each.values()) for each in reach[name]]
        results[name] = {
            "mean_score": mean,
            "texts": [sum(groups[n] == group for n in text.measuring) for group in (0, 1)],
            "loss_base": [each.value for each in losses[name].base],
            "loss": [each.value for each in losses[name].spliced],
            "choosing": len(text.choosing),
            "thresholds": list(thresholds),
            "units": sizes,
            "removed": [count - size for count, size in zip(reaching, sizes, strict=True)],
            "share": [size / every for size in sizes],
            **_table("changes", losses[name].changes[: len(thresholds)]),
            **_table("control", losses[name].changes[len(thresholds) :]),
            "leading": _leading({n: found[name, n] for n in members}),
        }
    return results


def belonging(scores: Float[Tensor, "domains units"], ratio: float = DEFAULTS.masking.ratio) -> Int[Tensor, " units"]:
    """Return the domain of each unit, -1 for none: where its score is at least ``ratio`` times the next largest."""
    best, second = scores.topk(2, dim=0).values
    return torch.where((best > 0) & (best >= ratio * second), scores.argmax(0), -1)


def halves(
    tokenizer: Any,
    texts: Sequence[str],
    groups: Sequence[int],
    names: Sequence[str],
    limit: int,
    context: int,
    bos: bool = True,
    seed: int = 0,
) -> Texts:
    """Draw up to ``limit`` texts of each group; the first half of them chooses units, the other is measured.

    Raises:
        MxdError: no tokenizer, a group with fewer than two texts, or numbers that make no sense.
    """
    _at_least("limit", limit, 2)
    _at_least("context", context, 2)
    head = head_ids(tokenizer, bos)
    choosing, measuring = [], []
    for group, name in enumerate(names):
        numbers = [n for n, of in enumerate(groups) if of == group and texts[n].strip()]
        random.Random(seed).shuffle(numbers)
        numbers = numbers[:limit]
        _at_least(f"the number of texts of {name!r}", len(numbers), 2)
        choosing += numbers[: len(numbers) // 2]
        measuring += numbers[len(numbers) // 2 :]
    wanted = [text if n in {*choosing, *measuring} else "" for n, text in enumerate(texts)]
    rows = tokenizer(wanted, add_special_tokens=False, truncation=True, max_length=context - len(head), verbose=False)
    return Texts([head + ids for ids in rows["input_ids"]], list(groups), choosing, measuring)


def _layers(sets: TrainedSets) -> dict[Place, Trained]:
    return {(name, number): one for name, members in sets.items() for number, one in members.items()}


def _batches(rows: Sequence[Sequence[int]], numbers: Sequence[int], size: int) -> Iterator[Batch]:
    ordered = sorted(numbers, key=lambda number: len(rows[number]))
    for start in range(0, len(ordered), size):
        some = ordered[start : start + size]
        lengths = np.array([len(rows[number]) for number in some])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = np.zeros(real.shape, dtype=np.int64)
        ids[real] = np.concatenate([rows[number] for number in some])
        yield Batch(ids, real, some)


def _activity(
    model: FrozenModel, layers: Mapping[Place, Trained], text: Texts, size: int, advance: Advance
) -> Iterator[tuple[Place, Code, Int[np.ndarray, " tokens"], Batch]]:
    """Yield, batch by batch of the texts that choose, what ``codes`` does of each layer."""
    for batch in _batches(text.rows, text.choosing, size):
        for place, code, at in codes(model, layers, batch.ids, batch.real):
            yield place, code, at, batch
        advance(len(batch.numbers))


def _measure(
    model: FrozenModel,
    sets: TrainedSets,
    ways: Mapping[str, Sequence[Mask]],
    text: Texts,
    size: int,
    advance: Advance,
) -> dict[str, Losses]:
    """Measure the losses of each set under each of its masks; the blocks below a splice run once for all of them."""
    groups = len(set(text.groups))
    losses = {name: Losses(_means(groups), _means(groups), [_means(groups) for _ in ways[name]]) for name in sets}
    masked = special_ids(model.tokenizer)
    lowest = sorted({min(members) for members in sets.values()})
    for batch in _batches(text.rows, text.measuring, size):
        ids = torch.from_numpy(batch.ids).to(model.device)
        counted = torch.from_numpy(batch.real & mask_of(batch.ids, masked))[:, 1:]
        with model.block_outputs(lowest) as hidden:
            base = _loss(model, ids)
        at = [text.groups[number] for number in batch.numbers]
        advance(len(at))
        for name, members in sets.items():
            whole = _masked_loss(model, members, {}, ids, hidden)
            _see(losses[name].base, base, counted, at)
            _see(losses[name].spliced, whole, counted, at)
            advance(len(at))
            for mask, means in zip(ways[name], losses[name].changes, strict=True):
                off = any(map(len, mask.values()))
                change = _masked_loss(model, members, mask, ids, hidden) - whole if off else torch.zeros_like(whole)
                _see(means, change, counted, at)
                advance(len(at))
    return losses


def _loss(model: FrozenModel, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch targets"]:
    return cross_entropy(model.logits(ids)[:, :-1].log_softmax(-1), ids[:, 1:]).cpu()


def _masked_loss(
    model: FrozenModel, members: Mapping[int, Trained], mask: Mask, ids: Tensor, hidden: Mapping[int, Any]
) -> Float[Tensor, "batch targets"]:
    first = min(members)
    with spliced(model, members, check=False, mask=mask), model.resumed(first, hidden.get(first)):
        return _loss(model, ids)


def _see(means: Sequence[Mean], values: Tensor, counted: Tensor, groups: Sequence[int]) -> None:
    for row, group in enumerate(groups):
        means[group].see(values[row : row + 1], counted[row : row + 1])


def _control(
    name: str, masks: Sequence[Mask], active: Mapping[Place, Bool[Tensor, " units"]], seed: int
) -> Iterator[Mask]:
    """Yield for each mask one of the same size, of active units outside it, as far as there are any."""
    rng = np.random.default_rng(seed)
    for mask in masks:
        drawn: dict[int, list[int]] = {}
        for number, units in mask.items():
            pool = np.setdiff1d(_where(active[name, number]), units)
            drawn[number] = sorted(rng.choice(pool, min(len(units), len(pool)), replace=False).tolist())
        yield drawn


def _token_scores(number: int, score: Score, row: Sequence[int], head: int, context: int) -> Float[np.ndarray, " seq"]:
    """Return the score of each token of a text; BOS has the mean."""
    tokens = len(row) - head
    if np.ndim(score) == 0:
        return np.full(len(row), score, dtype=np.float64)
    given = np.asarray(score, dtype=np.float64)
    if len(given) < tokens or (len(given) > tokens and len(row) < context):
        raise MxdError(
            f"text {number + 1} has {len(given)} scores for {tokens} tokens; give it one number, or one for each token "
            "of the model's tokenizer."
        )
    return np.concatenate([np.full(head, given.mean()), given[:tokens]])


def _leading(found: Mapping[int, Correlations]) -> list[dict[str, Any]]:
    """Return the ten units of some layers that correlate most over tokens, with all that was found of them."""
    every = ((r, number, unit) for number, one in found.items() for unit, r in enumerate(one.over_tokens.tolist()))
    return [
        {
            "layer": number,
            "unit": unit,
            "correlation": r,
            "correlation_texts": float(found[number].over_texts[unit]),
            "beyond_chance": bool(found[number].beyond_chance[unit]),
        }
        for r, number, unit in heapq.nlargest(10, every)
    ]


def _where(chosen: Bool[Tensor, " units"]) -> list[int]:
    return chosen.nonzero().flatten().tolist()


def _means(groups: int) -> list[Mean]:
    return [Mean() for _ in range(groups)]


def _table(name: str, means: Sequence[Sequence[Mean]]) -> dict[str, Any]:
    return {
        name: [[mean.value for mean in row] for row in means],
        f"{name}_se": [[mean.standard_error for mean in row] for row in means],
    }


def _at_least(what: str, got: float | int, least: int) -> None:
    if not got >= least:
        raise MxdError(f"{what} is {got:g}; expected at least {least:g}.")

"""Can what correlates with a score of the text be switched off? Units that correlate with it beyond chance are masked.

After Monet (ICLR 2025, section 5.3); Monet's score is toxicity.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.numbers import plural
from mxd.data.contexts import head_ids
from mxd.data.labelled import scored_texts
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.correlation import Correlation, Correlations
from mxd.evaluation.masks import Ablation, Chosen, LayerKey, Texts, ablate, at_least, halves, keyed_layers, table
from mxd.evaluation.scatter import Scatter, numbered
from mxd.evaluation.under_mask import Beside, Masked, UnderMask
from mxd.evaluation.walk import PaddedTexts, TrainedSets, codes, evaluating, padded_batches
from mxd.layers import Code
from mxd.model.frozen import FrozenModel
from mxd.questions import PURGING, PurgingConfig

Score = float | Sequence[float]
"""The score of a text, or one for each of its tokens."""

FEWEST_TEXTS = 30
"""Texts on which units must be chosen, at least."""


def answer(subject: Subject, how: PurgingConfig, scores: str, together: bool = False) -> dict[str, Any]:
    """Mask the units of checkpoints that correlate with a score.

    Args:
        subject: the checkpoints.
        how: how units are chosen.
        scores: a file of texts, each with its score.
        together: splice in sets of checkpoints, instead of each alone (``Subject.sets``).

    Raises:
        MxdError: as ``scored_texts`` and ``evaluate_purging``.
    """
    subject = subject.with_neurons(how.neurons)
    scored, text = scored_texts(scores, how.text_column, how.score_column), subject.text
    beside = UnderMask.of(subject, how.under, how.seed)
    results = evaluate_purging(
        subject.base, subject.sets(together), *scored, how, text.context, text.bos, beside=beside
    )
    asked = {"texts": scores, "limit": how.limit, "seed": how.seed}
    return subject.document(results, replacements=subject.members, **asked)


class ByScore:
    """Chooses the units whose activations correlate with a score over tokens, beyond chance."""

    def __init__(
        self,
        layers: Mapping[LayerKey, Trained],
        scores: Mapping[int, Float[np.ndarray, " seq"]],
        thresholds: Sequence[float],
        seed: int,
    ) -> None:
        self.num_masks = len(thresholds)
        self.scores, self.thresholds, self.seed = scores, thresholds, seed
        self.correlation = {key: Correlation(trained.layer.num_units) for key, trained in layers.items()}
        self.found: dict[LayerKey, Correlations] = {}

    def see(self, key: LayerKey, code: Code, at: Int[np.ndarray, " tokens"], batch: PaddedTexts) -> None:
        """Correlate a layer's activations with the scores of the tokens; arguments as ``Chooser.see``."""
        scores = self.scores_at(at, batch)
        self.correlation[key].see(code, batch.row(at), torch.from_numpy(scores), len(batch.numbers))

    def scores_at(self, at: Int[np.ndarray, " tokens"], batch: PaddedTexts) -> Float[np.ndarray, " tokens"]:
        """Return the scores of some tokens of a batch; arguments as ``Chooser.see``."""
        score = np.zeros(batch.ids.shape)
        score[batch.real] = np.concatenate([self.scores[number] for number in batch.numbers])
        found: Float[np.ndarray, " tokens"] = score.flat[at]
        return found

    def chosen(self, key: LayerKey) -> Chosen:
        """Return the units that reach each threshold, beyond chance."""
        correlations = self.found[key] = self.correlation[key].report(self.seed)
        masks = [(correlations.over_tokens >= threshold) & correlations.beyond_chance for threshold in self.thresholds]
        return Chosen(masks, self.correlation[key].active)


def evaluate_purging(
    model: FrozenModel,
    sets: TrainedSets,
    texts: Sequence[str],
    scores: Sequence[Score],
    how: PurgingConfig = PURGING,
    context: int = 128,
    bos: bool = True,
    batch: int = 8,
    beside: Beside | None = None,
) -> dict[str, dict[str, Any]]:
    """Mask the units whose activations correlate with a score, and measure what that does to the loss.

    The correlation is Pearson's over tokens, as in Monet: each has the score of its text, or one of its own. Of many
    units some correlate by chance, above all on few texts, so a unit must also exceed chance: see ``Correlation``.
    Losses are given for the texts with scores up to the mean score, and for those above.

    Args:
        model: the frozen base model.
        sets: name -> what is spliced in together.
        texts: the texts.
        scores: the score of each, toxicity for example: a number, or one for each token of the model's tokenizer.
        how: what is asked; the seed also draws the permutations.
        context: tokens of a text that are read.
        bos: begin each text with BOS where the tokenizer has one; it has the mean of the text's scores.
        batch: texts in one forward.
        beside: what else is measured under each mask; nothing by default.

    Returns:
        Name -> ``mean_score``; ``loss`` and ``loss_base`` of ``texts`` up to it and above; ``choosing``, the number of
        texts that chose units; for each of ``thresholds`` how many ``units`` are masked and their ``share``, and how
        many were ``removed``, which reach it but not beyond chance; the ``changes`` of the two losses, with
        ``changes_se``, and with equally many random units ``control`` and ``control_se``; and the ``leading`` ten
        units by ``correlation``, with that over texts, ``correlation_texts``, whether it is ``beyond_chance``, and
        ``Scatter.report``;
        and what ``beside.measure`` returns.

    Raises:
        MxdError: scores that are all the same, fewer than 30 texts to choose by, a list of scores that is not one for
            each token, and as ``evaluate_masking``.
    """
    split = _split(model.tokenizer, texts, scores, how, context, bos)
    text, chooser = split.text, ByScore(keyed_layers(sets), split.of_tokens, how.thresholds, how.seed)
    begun = [] if beside is None else beside.prompts(model, text, texts, split.groups, bos)
    ablations = ablate(model, sets, text, chooser, f"purging {plural(len(sets), 'splice')}", how.seed, batch)
    extra: dict[str, dict[str, Any]] = {name: {} for name in sets}
    if beside is not None:
        masks = [f"{threshold:g}" for threshold in how.thresholds]
        extra = beside.measure(Masked(model, sets, ablations, masks, split.groups, begun))
    found = {
        name: {"mean_score": split.mean}
        | _report(text, chooser, {n: chooser.found[name, n] for n in sets[name]}, ablation)
        | extra[name]
        for name, ablation in ablations.items()
    }
    leading = {name: result["leading"] for name, result in found.items()}
    _add_points(model, sets, text, chooser, leading, how.seed, batch)
    return found


class _Split(NamedTuple):
    """Texts with scores up to the mean, and above it."""

    mean: float
    groups: list[str]
    """What the two are called."""
    text: Texts
    of_tokens: dict[int, Float[np.ndarray, " seq"]]
    """Of each text that chooses units the scores of its tokens."""


def _split(
    tokenizer: Any, texts: Sequence[str], scores: Sequence[Score], how: PurgingConfig, context: int, bos: bool
) -> _Split:
    """Draw texts of both kinds; arguments and errors as ``evaluate_purging``."""
    of_texts = [float(np.mean(score)) for score in scores]
    mean = float(np.mean(of_texts)) if of_texts else 0.0
    names = [f"scores up to {mean:g}", f"scores above {mean:g}"]
    at_least("the number of different scores", len(set(of_texts)), 2)
    text = halves(tokenizer, texts, [int(score > mean) for score in of_texts], names, how.limit, context, bos, how.seed)
    if len(text.choosing) < FEWEST_TEXTS:
        raise MxdError(
            f"{len(text.choosing)} texts choose the units; expected at least {FEWEST_TEXTS}, since on fewer many units "
            f"correlate with any score by chance. Half of the texts choose: give {2 * FEWEST_TEXTS} or more, and a "
            f"--limit of {FEWEST_TEXTS} or more."
        )
    head = len(head_ids(tokenizer, bos))
    of_tokens = {n: _token_scores(n, scores[n], text.rows[n], head, context) for n in text.choosing}
    return _Split(mean, names, text, of_tokens)


@torch.no_grad()
def _add_points(
    model: FrozenModel,
    sets: TrainedSets,
    text: Texts,
    chooser: ByScore,
    leading: Mapping[str, list[dict[str, Any]]],
    seed: int,
    batch: int,
) -> None:
    """Add to each leading unit its activations and the scores of the same tokens, from the texts that chose it."""
    units = {(name, block): of for name, those in leading.items() for block, of in numbered(those).items()}
    layers = {key: trained for key, trained in keyed_layers(sets).items() if key in units}
    scatters = {key: Scatter(of, seed) for key, of in units.items()}
    with evaluating(model, layers):
        for padded in padded_batches(text.rows, text.choosing, batch):
            for key, code, at in codes(model, layers, padded.ids, padded.real):
                scatters[key].see(code, chooser.scores_at(at, padded))
    for name, those in leading.items():
        for one in those:
            one |= scatters[name, one["block"]].report(one["unit"])


def _report(
    text: Texts, chooser: ByScore, correlations: Mapping[int, Correlations], ablation: Ablation
) -> dict[str, Any]:
    total = sum(len(correlation.over_tokens) for correlation in correlations.values())
    reaching = [
        sum(int((correlation.over_tokens >= threshold).sum()) for correlation in correlations.values())
        for threshold in chooser.thresholds
    ]
    return {
        "texts": text.measured,
        **ablation.report(),
        "choosing": len(text.choosing),
        "thresholds": list(chooser.thresholds),
        "units": ablation.sizes,
        "removed": [count - size for count, size in zip(reaching, ablation.sizes, strict=True)],
        "share": [size / total for size in ablation.sizes],
        **table("changes", ablation.changes),
        **table("control", ablation.control),
        "leading": _leading(correlations),
    }


def _token_scores(number: int, score: Score, row: Sequence[int], head: int, context: int) -> Float[np.ndarray, " seq"]:
    """Return the score of each token of a text; BOS has the mean."""
    tokens = len(row) - head
    if np.ndim(score) == 0:
        return np.full(len(row), score, dtype=np.float64)
    scores = np.asarray(score, dtype=np.float64)
    if len(scores) < tokens or (len(scores) > tokens and len(row) < context):
        raise MxdError(
            f"text {number + 1} has {len(scores)} scores for {tokens} tokens; give it one number, or one for each "
            "token of the model's tokenizer."
        )
    return np.concatenate([np.full(head, scores.mean()), scores[:tokens]])


def _leading(correlations: Mapping[int, Correlations]) -> list[dict[str, Any]]:
    """Return the ten units of some layers that correlate most over tokens, with all their correlations."""
    units = (
        (r, number, unit)
        for number, correlation in correlations.items()
        for unit, r in enumerate(correlation.over_tokens.tolist())
    )
    return [
        {
            "block": number,
            "unit": unit,
            "correlation": r,
            "correlation_texts": float(correlations[number].over_texts[unit]),
            "beyond_chance": bool(correlations[number].beyond_chance[unit]),
        }
        for r, number, unit in heapq.nlargest(10, units)
    ]

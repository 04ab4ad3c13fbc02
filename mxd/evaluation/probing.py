"""What do single units know? The best held-out F1 with which one unit tells a class of texts from all others.

The protocol is that of the MxD paper (arXiv 2505.21364, section 3.2.1 and app. B.5) and its code. Of each text 128
tokens are read, BOS among them. A unit's *pre-activation* is averaged over all of these tokens (level ``sample``) or
over those of a span that is marked in the text, such as a surname (level ``span``, which the paper calls the token
level). The texts are ordered with seed 42; on the first 80% the 100 units with the largest mean difference between the
class and the rest are chosen, and a logistic regression is fitted for each. The result is the best F1 on the other 20%.
Choosing the best unit on the held-out texts flatters every method, so the unit that is best in training stands beside
it. The level ``token``, which is not in the paper, reads the last token alone.

A TopK autoencoder of the same run is probed like any other layer, and the neurons of the base MLP are probed as well.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.numbers import plural
from mxd.common.progress import progress
from mxd.data.contexts import head_ids
from mxd.data.labelled import LabelledTexts, labelled_texts
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.probes import Units, k_sparse_accuracy, probe_class
from mxd.evaluation.walk import padded
from mxd.layers.config import ACTIVATIONS
from mxd.layers.neurons import mlp_hidden
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, ProbingConfig
from mxd.splice import check_provenance

Site = tuple[int, str, tuple[int, ...]]
"""Block, what is read there (``mlp_in``, ``mlp_out``, ``neurons``), and the tokens left out."""

TRAIN_SHARE = 0.8
"""Share of the texts on which probes are fitted."""
MIN_TOKENS = 5
"""Shorter texts are left out at the sample level, as in the paper's code."""


@dataclass(frozen=True)
class _Read:
    """The texts of one set as they are probed, in a drawn order, training texts first."""

    ids: list[list[int]]
    positions: list[range]
    """The positions in each text that may count."""
    labels: Shaped[np.ndarray, " texts"]
    level: str
    side: str
    skipped: int

    @property
    def train(self) -> Bool[np.ndarray, " texts"]:
        return np.arange(len(self.ids)) < int(TRAIN_SHARE * len(self.ids))


def answer(subject: Subject, how: ProbingConfig = DEFAULTS.probing) -> dict[str, Any]:
    """Probe the units of checkpoints, and the neurons they replace, on labelled sets.

    Raises:
        MxdError: as ``labelled_texts`` and ``evaluate_probing``.
    """
    sets = [labelled_texts(source, how.text_column, how.label_column, how.split) for source in how.sets]
    results = evaluate_probing(subject.base, subject.trained, sets, how, subject.text.bos)
    return subject.document(results, asked=how.model_dump(mode="json"), replacements=subject.members)


@torch.no_grad()
def evaluate_probing(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    sets: Sequence[LabelledTexts],
    how: ProbingConfig = DEFAULTS.probing,
    bos: bool = True,
    forward_tokens: int = 4096,
) -> dict[str, dict[str, Any]]:
    """Probe the units of every layer on every labelled set; the base model runs once per set for all layers.

    Args:
        model: the frozen base model.
        layers: name -> a layer with its provenance.
        sets: labelled texts.
        how: how texts are read and probed.
        bos: begin each text with BOS where the tokenizer has one; it never counts.
        forward_tokens: tokens in one forward, approximately.

    Returns:
        Name -> name of the set -> ``level``, ``side``, ``texts``, ``skipped``, ``n_train``, ``n_test``, ``mean_f1``,
        ``mean_f1_train_choice``, and ``classes``: for each class what ``probe_class`` returns, and under ``saebench``
        what ``k_sparse_accuracy`` does. ``MLP neurons, block L`` are names, too, where the base MLP's form is known.

    Raises:
        MxdError: no sets or two of one name, a class without texts on either side of the split, no tokenizer, or layers
            of another model.
    """
    _check(model, layers, sets)
    skipped = {name: tuple(trained.provenance.excluded_ids) for name, trained in layers.items()}
    excluded = {i for excluded_ids in skipped.values() for i in excluded_ids}
    probed_sets = [_read(texts, model.tokenizer, how, bos, excluded) for texts in sets]
    layer_sites: dict[str, Site] = {
        name: (trained.provenance.block, trained.layer.config.reads, skipped[name]) for name, trained in layers.items()
    }
    neurons = _neurons(model, sorted({number for number, _, _ in layer_sites.values()}))
    sites = dict(layer_sites)
    for number, _, excluded_ids in layer_sites.values():
        if number in neurons:
            sites.setdefault(f"MLP neurons, block {number}", (number, "neurons", excluded_ids))
    results: dict[str, dict[str, Any]] = {name: {} for name in sites}
    tokens = sum(len(row) for probed in probed_sets for row in probed.ids)
    with progress(f"reading {plural(len(sets), 'labelled set')}", tokens) as advance:
        pooled = [_pool(model, probed, set(sites.values()), neurons, forward_tokens, advance) for probed in probed_sets]
    fits = len(sites) * sum(len(texts.classes) for texts in sets)
    with progress(f"probing {plural(len(sites), 'set')} of units", fits, "classes") as advance:
        for texts, probed, vectors in zip(sets, probed_sets, pooled, strict=True):
            for name, site in sites.items():
                units = _units(layers.get(name), vectors[site])
                results[name][texts.name] = _probe_set(units, probed, texts.classes, how, advance)
    return results


def summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results of ``evaluate_probing`` as lines: for each set the means over classes, and the best class."""
    width, lines = max(map(len, results)), []
    for name in next(iter(results.values())):
        first = next(iter(results.values()))[name]
        lines.append(
            f"{name}: {plural(len(first['classes']), 'class', 'classes')}, {first['level']} level, "
            f"{first['n_train']} + {first['n_test']} texts; mean F1 of the best units (of those best in training)"
        )
        for units, by_set in results.items():
            result = by_set[name]
            label, best = max(result["classes"].items(), key=lambda item: item[1]["f1"])
            lines.append(
                f"  {units:{width}}  {result['mean_f1']:.3f} ({result['mean_f1_train_choice']:.3f})  "
                f"best: {label} {best['f1']:.3f}, unit {best['unit']}"
            )
    return "\n".join(lines)


def _probe_set(
    units: Units, probed: _Read, classes: Sequence[str], how: ProbingConfig, advance: Callable[[int], None]
) -> dict[str, Any]:
    train, by_class = probed.train, {}
    for label in classes:
        positive = probed.labels == label
        by_class[label] = probe_class(units, positive, train, how.candidates) | {
            "saebench": k_sparse_accuracy(units, positive, train, how.seed)
        }
        advance(1)
    return {
        "level": probed.level,
        "side": probed.side,
        "texts": len(probed.ids),
        "skipped": probed.skipped,
        "n_train": int(train.sum()),
        "n_test": int((~train).sum()),
        "classes": by_class,
        "mean_f1": float(np.mean([result["f1"] for result in by_class.values()])),
        "mean_f1_train_choice": float(np.mean([result["train_choice"]["f1"] for result in by_class.values()])),
    }


def _units(trained: Trained | None, pooled: Float[Tensor, "texts width"]) -> Units:
    if trained is None:
        return Units(pooled)
    return Units(pooled.to(trained.layer.bias.device), trained.layer.gates)


def _check(model: FrozenModel, layers: Mapping[str, Trained], sets: Sequence[LabelledTexts]) -> None:
    head_ids(model.tokenizer)  # refuses a model without a tokenizer before anything runs
    if not layers or not sets:
        raise MxdError("nothing to probe: give at least one checkpoint and one labelled set.")
    names = [texts.name for texts in sets]
    if len(set(names)) < len(names):
        raise MxdError(f"two labelled sets have one name ({', '.join(names)}); probe them apart.")
    for trained in layers.values():
        check_provenance(model, trained.provenance.block, trained.provenance)


def _read(texts: LabelledTexts, tokenizer: Any, how: ProbingConfig, bos: bool, excluded: set[int]) -> _Read:
    """Draw the order of the texts and cut them to length; those with too few tokens that count are left out."""
    level = how.level or texts.level
    side = how.side or texts.side or ("first" if level == "sample" else "last")
    if level == "token" and side == "first":
        raise MxdError("the token level probes the last token of a text; drop --first.")
    if level == "span" and texts.spans is None:
        raise MxdError(f"{texts.name} has no spans: give it columns start and end, or choose --level sample or token.")
    if level == "span" and not getattr(tokenizer, "is_fast", False):
        raise MxdError(
            f"probing spans needs a fast tokenizer, which says where in the text each token stands; "
            f"{type(tokenizer).__name__} does not. Choose --level token for the last token of each text."
        )
    head = head_ids(tokenizer, bos)
    room, needed = how.context - len(head), MIN_TOKENS if level == "sample" else 1
    order = np.random.RandomState(how.seed).permutation(len(texts.texts))[: how.limit]  # as the paper's code
    chosen_texts, offsets = [texts.texts[i] for i in order], {"return_offsets_mapping": True} if level == "span" else {}
    encoded = tokenizer(chosen_texts, add_special_tokens=False, verbose=False, **offsets)
    ids, counted = [], []
    for i, row in enumerate(encoded["input_ids"]):
        # ``room`` tokens from ``first`` on are kept; ``counted`` says where those that may count stand after BOS
        first = 0 if side == "first" else max(0, len(row) - room)
        ids.append(head + row[first : first + room])
        inside = range(len(row))
        if level == "span" and texts.spans is not None:
            inside = _inside(encoded["offset_mapping"][i], *texts.spans[order[i]])
        counted.append(range(max(inside.start - first, 0) + len(head), min(inside.stop - first, room) + len(head)))
    kept = [i for i, row in enumerate(ids) if sum(row[position] not in excluded for position in counted[i]) >= needed]
    labels = np.array([texts.labels[order[i]] for i in kept])
    probed = _Read([ids[i] for i in kept], [counted[i] for i in kept], labels, level, side, len(ids) - len(kept))
    for label in texts.classes:
        for part, chosen in (("training", probed.train), ("held-out", ~probed.train)):
            count = int((labels[chosen] == label).sum()) if len(labels) else 0
            if count in (0, int(chosen.sum())):
                raise MxdError(
                    f"{texts.name}: of the {int(chosen.sum())} {part} texts {count} are of class {label!r}; a probe "
                    "needs some of the class and some of the rest. Give more texts, or raise --limit."
                )
    return probed


def _inside(offsets: Sequence[tuple[int, int]], start: int, end: int) -> range:
    """Return the numbers of the tokens that share a character with the span."""
    tokens = [i for i, (first, last) in enumerate(offsets) if first < end and last > start]
    return range(tokens[0], tokens[-1] + 1) if tokens else range(0)


def _neurons(model: FrozenModel, numbers: Sequence[int]) -> dict[int, Callable[[Tensor], Tensor]]:
    """Return for each block a function from its MLP's input to the input of its down projection, where known."""
    functions = {}
    for number in numbers:
        try:
            weights = model.mlp_weights(number)
        except MxdError:  # an MLP of a form that is not in the table: its neurons cannot be named
            continue
        if name := model.mlp_shape(number).activation:
            activation = ACTIVATIONS[name]
            functions[number] = mlp_hidden(activation, weights.encoder, weights.encoder_bias, weights.encoder_glu)
    return functions


def _pool(
    model: FrozenModel,
    probed: _Read,
    sites: set[Site],
    neurons: Mapping[int, Callable[[Tensor], Tensor]],
    forward_tokens: int,
    advance: Callable[[int], None],
) -> dict[Site, Float[Tensor, "texts width"]]:
    """Return for each site one vector per text: the mean over the tokens that count, or the last of them alone.

    Texts of similar length run together, padded at the end, which no earlier position of a causal model sees.
    """
    numbers = sorted({number for number, _, _ in sites})
    order = sorted(range(len(probed.ids)), key=lambda i: len(probed.ids[i]))
    vectors_at: dict[Site, Tensor] = {}
    while order:
        size = max(1, forward_tokens // len(probed.ids[order[-1]]))
        rows, order = order[-size:], order[:-size]
        batch = padded(probed.ids, rows)
        ids = torch.from_numpy(batch.ids)
        recorded = model.record(ids, numbers)
        for site in sites:
            number, what, excluded_ids = site
            x, y = recorded[number]
            vectors = y if what == "mlp_out" else neurons[number](x) if what == "neurons" else x
            shares = _shares(ids, [probed.positions[i] for i in rows], probed.level, excluded_ids).to(x.device)
            pooled = torch.einsum("bsd,bs->bd", vectors.float(), shares)
            store = vectors_at.setdefault(site, pooled.new_empty(len(probed.ids), pooled.shape[-1]))
            store[rows] = pooled
        advance(int(batch.real.sum()))
    return vectors_at


def _shares(
    ids: Int[Tensor, "batch seq"], inside: Sequence[range], level: str, excluded_ids: Sequence[int]
) -> Float[Tensor, "batch seq"]:
    """Return the weight of each position in its text's vector: zero for BOS, padding and excluded tokens."""
    positions = torch.arange(ids.shape[1])
    first, end = torch.tensor([(r.start, r.stop) for r in inside]).T.unsqueeze(-1)
    counted = (positions >= first) & (positions < end)
    counted &= ~torch.isin(ids, torch.tensor(list(excluded_ids), dtype=ids.dtype))
    if level != "token":
        return counted / counted.sum(-1, keepdim=True)
    last = (counted * (positions + 1)).argmax(-1, keepdim=True)
    return torch.zeros(ids.shape).scatter_(1, last, 1.0)

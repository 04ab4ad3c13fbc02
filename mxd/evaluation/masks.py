"""What does masking units do to the loss? Units are chosen on one half of the texts; losses are measured on the other.

Units are chosen (``Chooser``) by their activations in the unchanged model. The control masks equally many
other active units, drawn at random. Questions differ in how they choose: by domain (``masking.py``), or by score
(``purging.py``).
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.progress import Advance, progress
from mxd.data.contexts import counted_positions, head_ids, special_ids
from mxd.evaluation.walk import (
    Estimate,
    Mask,
    Mean,
    PaddedTexts,
    TrainedSets,
    codes,
    cross_entropy,
    evaluating,
    next_token_logits,
    padded_batches,
)
from mxd.layers import Code
from mxd.model.frozen import FrozenModel
from mxd.splice import Splice

LayerKey = tuple[str, int]
"""The name of a set and a block number, which together name one layer."""


@dataclass(frozen=True)
class Texts:
    """Texts in groups, as token ids; units are chosen on one half and losses measured on the other."""

    rows: list[list[int]]
    groups: list[int]
    choosing: list[int]
    """Numbers of the texts on which units are chosen."""
    measuring: list[int]
    """Numbers of the texts on which losses are measured."""

    @property
    def measured(self) -> list[int]:
        """How many texts of each group are measured."""
        return [sum(self.groups[n] == group for n in self.measuring) for group in range(max(self.groups) + 1)]


class Chosen(NamedTuple):
    """The units of one layer that a chooser masks, and those that are active on the texts it saw."""

    masks: list[Bool[Tensor, " units"]]
    active: Bool[Tensor, " units"]


@runtime_checkable
class Chooser(Protocol):
    """Looks at the activations on the first half of the texts, then names the units to mask."""

    num_masks: int
    """How many masks it makes for each set."""

    def see(self, key: LayerKey, code: Code, at: Int[np.ndarray, " tokens"], batch: PaddedTexts) -> None:
        """Look at a layer's activations on a batch of texts.

        Args:
            key: the layer.
            code: its code at the tokens that count.
            at: where these tokens are in the flattened batch.
            batch: the texts.
        """

    def chosen(self, key: LayerKey) -> Chosen:
        """Return the units of a layer that each mask switches off."""


@dataclass(frozen=True)
class Ablation:
    """What masks do to the losses of one set of replacements, by group of texts."""

    masks: Sequence[Mask]
    random: Sequence[Mask]
    """For each mask one of as many other active units, drawn at random: the control."""
    base: list[Mean]
    """The base model's losses."""
    spliced: list[Mean]
    """The losses of the splice with no unit masked."""
    changes: list[list[Mean]]
    """What each mask adds to the losses of the splice, by group."""
    control: list[list[Mean]]
    """The same for the masks of the control."""

    def report(self) -> dict[str, list[float]]:
        """Return the losses with no unit masked."""
        return {
            "loss_base": [mean.value for mean in self.base],
            "loss": [mean.value for mean in self.spliced],
        }

    @property
    def sizes(self) -> list[int]:
        """How many units each mask switches off."""
        return [sum(map(len, mask.values())) for mask in self.masks]


def keyed_layers(sets: TrainedSets) -> dict[LayerKey, Trained]:
    """Return the layers of all sets in one mapping."""
    return {(name, number): trained for name, members in sets.items() for number, trained in members.items()}


@torch.no_grad()
def ablate(
    model: FrozenModel,
    sets: TrainedSets,
    texts: Texts,
    chooser: Chooser,
    title: str,
    seed: int,
    batch: int,
) -> dict[str, Ablation]:
    """Choose units on one half of the texts, and measure on the other what masking them does.

    Args:
        model: the frozen base model.
        sets: name -> what is spliced in together.
        texts: the texts.
        chooser: chooses the units.
        title: shown beside the progress.
        seed: draws the control's units.
        batch: texts in one forward.

    Returns:
        Name of a set -> what its masks do.

    Raises:
        MxdError: layers that do not fit the model.
    """
    layers = keyed_layers(sets)
    total = len(texts.choosing) + len(texts.measuring) * (1 + len(sets) * (1 + 2 * chooser.num_masks))
    with evaluating(model, layers), progress(title, total, "texts") as advance:
        for padded in padded_batches(texts.rows, texts.choosing, batch):
            for key, code, at in codes(model, layers, padded.ids, padded.real):
                chooser.see(key, code, at, padded)
            advance(len(padded.numbers))
        chosen = {key: chooser.chosen(key) for key in layers}
        masks = {
            name: [{n: where(chosen[name, n].masks[i]) for n in members} for i in range(chooser.num_masks)]
            for name, members in sets.items()
        }
        control = {
            name: list(control_masks(masks[name], {n: chosen[name, n].active for n in members}, seed))
            for name, members in sets.items()
        }
        return measure(model, sets, masks, control, texts, batch, advance)


def measure(
    model: FrozenModel,
    sets: TrainedSets,
    masks: Mapping[str, Sequence[Mask]],
    control: Mapping[str, Sequence[Mask]],
    texts: Texts,
    size: int,
    advance: Advance,
) -> dict[str, Ablation]:
    """Measure the losses of each set under each of its masks; the blocks below a splice run once for all of them.

    Args:
        model: the frozen base model.
        sets: name -> what is spliced in together.
        masks: name -> the masks to measure.
        control: name -> masks of the same sizes, of random units.
        texts: the texts; ``texts.measuring`` are read.
        size: texts in one forward.
        advance: told of the texts that have passed through the model.
    """
    groups = len(set(texts.groups))
    ablations = {
        name: Ablation(
            masks[name],
            control[name],
            _means(groups),
            _means(groups),
            [_means(groups) for _ in masks[name]],
            [_means(groups) for _ in control[name]],
        )
        for name in sets
    }
    splices = {name: Splice(model, members, check=False) for name, members in sets.items()}
    masked = {name: [masked_splice(splices[name], mask) for mask in (*masks[name], *control[name])] for name in sets}
    special = special_ids(model.tokenizer)
    for batch in padded_batches(texts.rows, texts.measuring, size):
        ids = torch.from_numpy(batch.ids).to(model.device)
        counted = torch.from_numpy(batch.real & counted_positions(batch.ids, special))[:, 1:]
        groups_of = [texts.groups[number] for number in batch.numbers]
        with model.block_outputs(sorted({min(members) for members in sets.values()})) as below:
            base = _loss(model.logits(ids)[:, :-1], ids)
        advance(len(groups_of))
        for name, ablation in ablations.items():
            unmasked = _loss(next_token_logits(splices[name], ids, below), ids)
            _see(ablation.base, base, counted, groups_of)
            _see(ablation.spliced, unmasked, counted, groups_of)
            advance(len(groups_of))
            for splice, means in zip(masked[name], (*ablation.changes, *ablation.control), strict=True):
                change = torch.zeros_like(unmasked)  # an empty mask changes nothing: its forward is saved
                if splice is not None:
                    change = _loss(next_token_logits(splice, ids, below), ids) - unmasked
                _see(means, change, counted, groups_of)
                advance(len(groups_of))
    return ablations


def masked_splice(splice: Splice, mask: Mask) -> Splice | None:
    """Return a splice with units switched off; ``None`` where the mask has none, so that nothing changes."""
    return Splice(splice.model, splice.layers, mask=mask) if any(map(len, mask.values())) else None


def _loss(
    logits: Float[Tensor, "batch targets vocab"], ids: Int[Tensor, "batch seq"]
) -> Float[Tensor, "batch targets"]:
    return cross_entropy(logits.log_softmax(-1), ids[:, 1:]).cpu()


def _see(
    means: Sequence[Mean],
    losses: Float[Tensor, "batch targets"],
    counted: Bool[Tensor, "batch targets"],
    groups: Sequence[int],
) -> None:
    """Count each text's losses in the mean of its group."""
    for row, group in enumerate(groups):
        means[group].see(losses[row : row + 1], counted[row : row + 1])


def control_masks(masks: Sequence[Mask], active: Mapping[int, Bool[Tensor, " units"]], seed: int) -> Iterator[Mask]:
    """Yield for each mask one of the same size, of active units outside it; of fewer where there are not enough.

    Args:
        masks: the masks to be compared with.
        active: block number -> the units that are active on the texts.
        seed: draws the units.
    """
    rng = np.random.default_rng(seed)
    for mask in masks:
        drawn: dict[int, list[int]] = {}
        for number, units in mask.items():
            pool = np.setdiff1d(where(active[number]), units)
            drawn[number] = sorted(rng.choice(pool, min(len(units), len(pool)), replace=False).tolist())
        yield drawn


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
    """Draw up to ``limit`` texts of each group; units are chosen on the first half, losses measured on the second.

    Args:
        tokenizer: a Hugging Face tokenizer.
        texts: the texts of all groups; empty ones are never drawn.
        groups: the number of each text's group.
        names: what each group is called in messages.
        limit: texts of each group, at most.
        context: tokens of a text that are kept, BOS included.
        bos: begin each text with BOS where the tokenizer has one.
        seed: draws the texts.

    Raises:
        MxdError: no tokenizer, a group with fewer than two texts, or numbers that make no sense.
    """
    at_least("context", context, 2)
    head = head_ids(tokenizer, bos)
    choosing, measuring = [], []
    for group, name in enumerate(names):
        numbers = [n for n, text_group in enumerate(groups) if text_group == group and texts[n].strip()]
        random.Random(seed).shuffle(numbers)
        numbers = numbers[:limit]
        at_least(f"the number of texts of {name!r}", len(numbers), 2)
        choosing += numbers[: len(numbers) // 2]
        measuring += numbers[len(numbers) // 2 :]
    needed = [text if n in {*choosing, *measuring} else "" for n, text in enumerate(texts)]
    rows = tokenizer(needed, add_special_tokens=False, truncation=True, max_length=context - len(head), verbose=False)
    return Texts([head + ids for ids in rows["input_ids"]], list(groups), choosing, measuring)


def where(chosen: Bool[Tensor, " units"]) -> list[int]:
    """Return the numbers of the units that are chosen."""
    return chosen.nonzero().flatten().tolist()


def table(name: str, means: Sequence[Sequence[Estimate]]) -> dict[str, Any]:
    """Return numbers by name, and their standard errors."""
    return {
        name: [[mean.value for mean in row] for row in means],
        f"{name}_se": [[mean.standard_error for mean in row] for row in means],
    }


def matrices(
    masks: Sequence[str],
    columns: Sequence[str],
    changes: Sequence[Sequence[Estimate]],
    control: Sequence[Sequence[Estimate]],
) -> dict[str, Any]:
    """Return what each mask does to each domain, and the same of the control.

    Args:
        masks: what the rows are called.
        columns: the domains.
        changes: of each mask, on each domain.
        control: of the mask's control.

    Returns:
        ``matrix`` and ``control`` with standard errors, ``*_se``; and where masks and domains share names, the means
        over these, ``target`` and ``control_target``, and over the rest of their rows, ``others`` and
        ``control_others``.
    """
    found = table("matrix", changes) | table("control", control)
    own = np.array([[mask == column for column in columns] for mask in masks])
    rest = own.any(1, keepdims=True) & ~own
    for key, chosen in (("target", own), ("others", rest)):
        if chosen.any():
            found |= {key: float(np.array(found["matrix"])[chosen].mean())}
            found |= {f"control_{key}": float(np.array(found["control"])[chosen].mean())}
    return found


def at_least(what: str, got: float | int, least: int) -> None:
    """Refuse a number that is too small.

    Args:
        what: what it counts, for the message.
        got: the number.
        least: the smallest that is allowed.

    Raises:
        MxdError: the number is smaller than ``least``.
    """
    if not got >= least:
        raise MxdError(f"{what} is {got:g}; expected at least {least:g}.")


def _means(groups: int) -> list[Mean]:
    return [Mean() for _ in range(groups)]

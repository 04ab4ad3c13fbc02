"""Can outputs be rewritten for one group of texts, found by its units, and for no other?

After muMoE (Oldfield et al., NeurIPS 2024, section 4.2, table 2, figure 25): a classifier often fails on a cell, a
group's texts of one label, that is rare. The cell's mean code ``abar`` says which units it uses; something in the
label's favour is added to the layer's output in proportion to ``abar . a(x)``, so no text's group need be known.

The classifier is a probe of the spliced model's final hidden states. It is fitted on a quarter of the texts, as are the
mean codes; on another quarter the sign and the strength with the best rewrite score are chosen, for each way of
rewriting alike; half of the texts are measured. Beside ``expert`` stand ``blind``, which adds the same everywhere, and
``random``, with the mean code of as many random texts of other cells. The headline is the rewrite score of ``expert``
less that of ``blind``. How well the gates tell the cell from others, and how well one telltale token does, say what
there was to find.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.progress import Advance, progress
from mxd.data.contexts import special_ids
from mxd.data.grouped import grouped_texts
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.fairness import Cells, cell_accuracies, metrics, resampled, rewrite_score
from mxd.evaluation.masks import halves
from mxd.evaluation.rewriting import BLIND, PLAIN, Edit, Rewriting, direction_of
from mxd.evaluation.walk import evaluating
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, RewriteConfig

EXPERT, RANDOM = "expert", "random"
"""Ways of rewriting beside ``BLIND``: by the target's mean code, and by that of random other texts."""
LEAST = 4
"""Texts that a cell needs: one fits, one chooses, two are measured."""


def answer(subject: Subject, how: RewriteConfig = DEFAULTS.rewrite) -> dict[str, Any]:
    """Rewrite outputs of checkpoints, each layer spliced in alone.

    Args:
        subject: the checkpoints.
        how: on what, for which texts, and how.

    Raises:
        MxdError: as ``grouped_texts`` and ``evaluate_rewrite``.
    """
    subject = subject.with_neurons(how.neurons)
    labelled, groups = grouped_texts(how.set, how.text_column, how.label_column, how.group_column)
    what = subject.base, subject.layers, labelled.texts, labelled.labels, groups
    results = evaluate_rewrite(*what, how, subject.text.context, subject.text.bos)
    return subject.document(results, asked=how.model_dump(mode="json"), replacements=subject.members)


@dataclass(frozen=True)
class Split:
    """Texts in cells: those that fit, those that choose, those that are measured."""

    rows: list[list[int]]
    labels: list[int]
    """The number of each text's label."""
    cell_of: Int[np.ndarray, " texts"]
    fitting: list[int]
    tuning: list[int]
    measuring: list[int]
    cells: Cells

    @property
    def target_label(self) -> int:
        """The number of the target's label."""
        return self.labels[int(np.flatnonzero(self.cell_of == self.cells.target)[0])]

    def counted(self, numbers: Sequence[int]) -> list[int]:
        """Return how many of some texts are in each cell."""
        return np.bincount(self.cell_of[numbers], minlength=len(self.cells.texts)).tolist()


@torch.no_grad()
def evaluate_rewrite(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    texts: Sequence[str],
    labels: Sequence[str],
    groups: Sequence[str],
    how: RewriteConfig = DEFAULTS.rewrite,
    context: int = 128,
    bos: bool = True,
    batch: int = 16,
) -> dict[str, dict[str, Any]]:
    """Rewrite the output of each layer for one cell of texts, and measure what that does to every cell.

    Args:
        model: the frozen base model.
        layers: name -> a layer with its provenance.
        texts: texts of all labels and groups.
        labels: the label of each.
        groups: the group of each.
        how: what is asked.
        context: tokens of a text that are read.
        bos: begin each text with BOS where the tokenizer has one.
        batch: texts in one forward.

    Returns:
        Name -> ``cells`` (``label``, ``group``, and how many texts are ``fitted``, ``tuned`` and ``measured``) and the
        number of the ``target``; ``ways``: for ``plain``, ``blind``, ``expert`` and ``random`` (the mean over
        ``how.draws``) the ``strengths`` that were chosen, what ``fairness.metrics`` returns and the accuracy of each of
        the ``cells``; ``gain``, the rewrite score of ``expert`` less that of ``blind``, ``gain_random`` less that of
        ``random``, and ``best``, the largest score there is; ``auc``, how well ``s(x)``, averaged over its tokens, tells
        a text of the target from all others, ``auc_cells`` from each other cell, ``auc_least`` from the one it is most
        like, ``auc_random``, the same of the random texts' mean codes; and the best ``token`` by its presence. Standard
        errors ``*_se`` are those of a bootstrap over the measured texts of each cell.

    Raises:
        MxdError: no such target, a cell with fewer than four texts, a target whose label no other group has, fewer than
            two labels, no such ``how.direction``, no tokenizer, or layers that do not fit the model.
    """
    split = _split(model, texts, labels, groups, how, context, bos)
    tried = 1 + len(_edits([BLIND], how)) * (2 + how.draws)
    measured = len(split.measuring) * (3 + how.draws)
    total = len(layers) * (len(split.fitting) + len(split.tuning) * tried + measured)
    telltale = _telltale(model, split)
    with evaluating(model, layers), progress(f"rewriting {len(layers)} layers", total, "texts") as advance:
        return {
            name: {"block": trained.provenance.block, "num_units": trained.layer.num_units, "token": telltale}
            | _rewritten(Rewriting(model, trained, split.rows, split.labels, batch), split, how, advance)
            for name, trained in layers.items()
        }


def _split(
    model: FrozenModel,
    texts: Sequence[str],
    labels: Sequence[str],
    groups: Sequence[str],
    how: RewriteConfig,
    context: int,
    bos: bool,
) -> Split:
    """Sort texts into cells, and divide each cell."""
    pairs = list(zip(labels, groups, strict=True))
    cells = sorted({pair for pair, text in zip(pairs, texts, strict=True) if text.strip()})
    target = _target(pairs, cells, how)
    cell_of = [cells.index(pair) if pair in cells else -1 for pair in pairs]
    names = [f"{label}, {group}" for label, group in cells]
    for cell, name in enumerate(names):
        texts_there = sum(text.strip() != "" for text, n in zip(texts, cell_of, strict=True) if n == cell)
        if texts_there < LEAST:
            raise MxdError(f"{name!r} has {texts_there} texts; expected at least {LEAST}. Give more, or leave it out.")
    drawn = halves(model.tokenizer, texts, cell_of, names, how.limit, context, bos, how.seed)
    by_cell = [[n for n in drawn.choosing if cell_of[n] == cell] for cell in range(len(cells))]
    fitting = [n for members in by_cell for n in members[: (len(members) + 1) // 2]]
    tuning = [n for members in by_cell for n in members[(len(members) + 1) // 2 :]]
    known = sorted({label for label, _ in cells})
    numbers = [known.index(label) if label in known else -1 for label in labels]
    counts = np.bincount(np.array(cell_of)[drawn.measuring], minlength=len(cells))
    found = Cells([label for label, _ in cells], [group for _, group in cells], counts, cells.index(target))
    return Split(drawn.rows, numbers, np.array(cell_of), fitting, tuning, drawn.measuring, found)


def _target(pairs: Sequence[tuple[str, str]], cells: Sequence[tuple[str, str]], how: RewriteConfig) -> tuple[str, str]:
    """Return the rarest cell of those that are asked for."""
    fits = [(how.target_label in (None, label)) and (how.target_group in (None, group)) for label, group in cells]
    asked = [cell for cell, fit in zip(cells, fits, strict=True) if fit]
    if not asked:
        known = "; ".join(f"{label}, {group}" for label, group in cells)
        raise MxdError(
            f"no texts of the target, label {how.target_label!r} and group {how.target_group!r}; there are: {known}."
        )
    rarest = min(asked, key=pairs.count)
    labels = {label for label, _ in cells}
    if len(labels) < 2 or not any(label == rarest[0] and group != rarest[1] for label, group in cells):
        raise MxdError(
            f"the target is {', '.join(rarest)}; expected texts of another label, and of this label in another group, "
            "to compare with."
        )
    return rarest


def _rewritten(rewriting: Rewriting, split: Split, how: RewriteConfig, advance: Advance) -> dict[str, Any]:
    """Fit, choose and measure on one layer."""
    cells = split.cells
    members = _members(split, how)
    rewriting.fit(split.fitting, members, advance)
    added = direction_of(how.direction, rewriting, split.target_label)
    ways = [BLIND, *members]
    edits = [PLAIN, *_edits(ways, how)]
    tuned = rewriting.run(split.tuning, edits, added, advance)
    chosen = chosen_edits(edits, cell_accuracies(tuned.right, split.cell_of[split.tuning], len(cells.texts)), cells)
    found = rewriting.run(split.measuring, [PLAIN, *(chosen[way] for way in ways)], added, advance)
    random = [way for way in ways if way not in (BLIND, EXPERT)]
    rows = {"plain": [0], BLIND: [1], EXPERT: [2], RANDOM: [1 + ways.index(way) for way in random]}
    strengths = {"plain": [], BLIND: [BLIND], EXPERT: [EXPERT], RANDOM: random}
    numbers = split.fitting, split.tuning, split.measuring
    counts = zip(cells.labels, cells.groups, *map(split.counted, numbers), strict=True)
    keys = ("label", "group", "fitted", "tuned", "measured")
    return {
        "cells": [dict(zip(keys, values, strict=True)) for values in counts],
        "target": cells.target,
        "simplex": rewriting.simplex,
        **_report(found.right, rows, split, how.seed, {k: [chosen[w][1] for w in v] for k, v in strengths.items()}),
        **_separation(found.strengths, split.cell_of[split.measuring], cells),
    }


def _members(split: Split, how: RewriteConfig) -> dict[str, list[int]]:
    """Return the fitting texts whose codes are averaged: the target's, and as many random others, several times."""
    mine = [n for n in split.fitting if split.cell_of[n] == split.cells.target]
    others = [n for n in split.fitting if split.cell_of[n] != split.cells.target]
    rng = np.random.default_rng(how.seed)
    drawn = [rng.choice(others, min(len(mine), len(others)), replace=False).tolist() for _ in range(how.draws)]
    return {EXPERT: mine} | {f"{RANDOM} {i}": texts for i, texts in enumerate(drawn)}


def _edits(ways: Sequence[str], how: RewriteConfig) -> list[Edit]:
    """Return what is tried, the weakest first."""
    return [(way, sign * much) for way in ways for much in sorted(how.strengths) for sign in (1, -1)]


def chosen_edits(
    edits: Sequence[Edit], accuracies: Float[np.ndarray, "edits cells"], cells: Cells
) -> dict[str, Edit]:
    """Return for each way the edit with the best rewrite score, the first of equals; none where no score is above 0.

    Args:
        edits: the first adds nothing, the others of each way stand in order of strength.
        accuracies: on each cell, under each edit.
        cells: what these are.
    """
    scores = rewrite_score(accuracies[:1], accuracies, cells.target)
    chosen: dict[str, tuple[float, Edit]] = {}
    for (way, much), score in zip(edits, scores.tolist(), strict=True):
        best, _ = chosen.setdefault(way, (0.0, (way, 0.0)))
        if score > best + 1e-12:
            chosen[way] = score, (way, much)
    return {way: edit for way, (_, edit) in chosen.items()}


def _report(
    right: Bool[np.ndarray, "edits texts"],
    rows: Mapping[str, Sequence[int]],
    split: Split,
    seed: int,
    strengths: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return the metrics of each way, the mean over its rows of ``right``, and their standard errors."""
    cells, cell_of = split.cells, split.cell_of[split.measuring]
    accuracies = cell_accuracies(right, cell_of, len(cells.texts))
    samples = resampled(right, cell_of, len(cells.texts), seed)
    ways: dict[str, Any] = {}
    scores: dict[str, Float[np.ndarray, " draws"]] = {}
    for way, numbers in rows.items():
        at = list(numbers)
        values = metrics(accuracies[:1], accuracies[at], cells) | {"cells": accuracies[at]}
        drawn = metrics(samples[:1], samples[at], cells) | {"cells": samples[at]}
        ways[way] = {"strengths": list(strengths[way])}
        for key, value in values.items():
            ways[way][key] = value.mean(0).tolist()
            ways[way][f"{key}_se"] = drawn[key].mean(0).std(0, ddof=1).tolist()
        scores[way] = drawn["rewrite_score"].mean(0)
    gains = {}
    for key, other in (("gain", BLIND), ("gain_random", RANDOM)):
        gains[key] = ways[EXPERT]["rewrite_score"] - ways[other]["rewrite_score"]
        gains[f"{key}_se"] = float((scores[EXPERT] - scores[other]).std(ddof=1))
    return {"ways": ways, **gains, "best": 1 - ways["plain"]["target_accuracy"]}


def _separation(
    strengths: Mapping[str, Float[np.ndarray, " texts"]], cell_of: Int[np.ndarray, " texts"], cells: Cells
) -> dict[str, Any]:
    """Return how well mean codes tell texts of the target from others."""
    from sklearn.metrics import roc_auc_score

    mine = cell_of == cells.target
    by_cell: list[float | None] = []
    for cell in range(len(cells.texts)):
        some = mine | (cell_of == cell)
        by_cell.append(None if cell == cells.target else float(roc_auc_score(mine[some], strengths[EXPERT][some])))
    others = [(auc, name) for auc, name in zip(by_cell, cells.names, strict=True) if auc is not None]
    random = [roc_auc_score(mine, values) for way, values in strengths.items() if way != EXPERT]
    return {
        "auc": float(roc_auc_score(mine, strengths[EXPERT])),
        "auc_cells": by_cell,
        "auc_least": min(others)[0],
        "nearest": min(others)[1],
        "auc_random": float(np.mean(random)),
    }


def _telltale(model: FrozenModel, split: Split) -> dict[str, Any]:
    """Return the token whose presence or absence tells the fitting texts of the target best, and its AUC on others."""
    special = set(special_ids(model.tokenizer))
    mine = split.cell_of == split.cells.target
    present: dict[int, list[float]] = {}
    for n in split.fitting:
        for token in set(split.rows[n]) - special:
            present.setdefault(token, [0.0, 0.0])[int(mine[n])] += 1
    sizes = [max(int((mine[split.fitting] == side).sum()), 1) for side in (False, True)]
    gaps = {token: counts[1] / sizes[1] - counts[0] / sizes[0] for token, counts in present.items()}
    token = max(gaps, key=lambda i: (abs(gaps[i]), -i))
    held_out = np.array([token in split.rows[n] for n in split.measuring])
    inside = mine[split.measuring]
    gap = float(held_out[inside].mean() - held_out[~inside].mean())
    shown = "present" if gaps[token] > 0 else "absent"
    return {"text": model.tokenizer.decode([token]), "when": shown, "auc": 0.5 + (gap if gaps[token] > 0 else -gap) / 2}

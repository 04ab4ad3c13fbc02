"""Can outputs be rewritten for one group of texts, found by its units, and for no other?

After muMoE (Oldfield et al., NeurIPS 2024, section 4.2, table 2, figure 25): a classifier often fails on a cell, a
group's texts of one label, that is rare. The cell's mean code ``abar`` says which units it uses; something in the
label's favour is added to the layer's output in proportion to ``abar . a(x)``, so no text's group need be known.

The classifier is a probe of the spliced model's final hidden states. It is fitted on a quarter of the texts, as are the
mean codes; another quarter chooses the sign, with which the target gains, and for each way of rewriting alike the
strength with the best rewrite score; half of the texts are measured. ``expert`` is the paper's; ``contrast`` is ours
and takes off what units of all texts do. Beside them stand ``blind``, which adds the same everywhere, and the same two
with the codes of random texts of other cells, ``random`` and ``random_contrast``. The headline is the rewrite score of
``expert`` less that of ``blind``. How well gates tell the cell from others, and how well one token does, say what
there was to find.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from mxd.artifacts.checkpoint import Trained
from mxd.common.errors import MxdError
from mxd.common.progress import Advance, progress
from mxd.data.contexts import special_ids
from mxd.data.grouped import grouped_texts
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.fairness import Cells, cell_accuracies, compared, rewrite_score
from mxd.evaluation.masks import halves
from mxd.evaluation.rewriting import BLIND, PLAIN, Edit, Gate, Rewriting, direction_of
from mxd.evaluation.separation import separation, telltale
from mxd.evaluation.walk import evaluating
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, RewriteConfig

EXPERT, CONTRAST = "expert", "contrast"
"""Ways of rewriting beside ``BLIND``: by the target's mean code, and by its difference from all others'."""
CONTROLS = {EXPERT: "random", CONTRAST: "random_contrast"}
"""The same with random texts of other cells in the target's place."""
GAINS = {
    "gain": (EXPERT, BLIND),
    "gain_random": (EXPERT, CONTROLS[EXPERT]),
    "gain_contrast": (CONTRAST, BLIND),
    "gain_contrast_random": (CONTRAST, CONTROLS[CONTRAST]),
}
"""Differences of rewrite scores."""
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

    def probed(self, support: int | None) -> list[int]:
        """Return the fitting texts on which the probe is fitted: of the target ``support`` at most."""
        mine = [n for n in self.fitting if self.cell_of[n] == self.cells.target]
        left_out = set(mine[support:]) if support is not None else set()
        return [n for n in self.fitting if n not in left_out]

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
        number of the ``target``; ``ways``: for ``plain``, ``blind``, ``expert``, ``random``, ``contrast`` and
        ``random_contrast`` (means over ``how.draws``) the ``strengths`` that were chosen and what ``compared`` returns;
        the ``GAINS``, and ``best``, the largest rewrite score there is; ``tried``, the change of the target's accuracy
        and the sum of the others' changes with each strength on the texts that choose; ``separation`` of measured texts
        by ``s(x)``, the mean over their tokens, for each way; and the ``token`` that tells the target best. Standard
        errors ``*_se`` are those of a bootstrap over the measured texts of each cell.

    Raises:
        MxdError: no such target, a cell with fewer than four texts, a target whose label no other group has, fewer than
            two labels, no such ``how.direction``, no tokenizer, or layers that do not fit the model.
    """
    split = _split(model, texts, labels, groups, how, context, bos)
    gates = 2 * (1 + how.draws)
    tried, measured = 1 + len(how.strengths) * (2 + gates), 2 + gates
    total = len(layers) * (len(split.fitting) + len(split.tuning) * tried + len(split.measuring) * measured)
    token = _token(model, split)
    with evaluating(model, layers), progress(f"rewriting {len(layers)} layers", total, "texts") as advance:
        return {
            name: {"block": trained.provenance.block, "num_units": trained.layer.num_units, "token": token}
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
    cells, sets = split.cells, _sets(split, how)
    members = {f"{name}{side}": texts for name, both in sets.items() for side, texts in zip("+-", both, strict=True)}
    means = rewriting.fit(split.fitting, split.probed(how.support), members, advance)
    for name in sets:
        by_mean, by_contrast = (
            (EXPERT, CONTRAST) if name == "target" else (f"{way} {name}" for way in CONTROLS.values())
        )
        rewriting.gates[by_mean] = Gate.by_mean(means[f"{name}+"], rewriting.simplex)
        rewriting.gates[by_contrast] = Gate.by_contrast(means[f"{name}+"], means[f"{name}-"])
    added = direction_of(how.direction, rewriting, split.target_label)

    def accuracies(edits: Sequence[Edit]) -> Float[np.ndarray, "edits cells"]:
        right = rewriting.run(split.tuning, edits, added, advance).right
        return cell_accuracies(right, split.cell_of[split.tuning], len(cells.texts))

    strengths = sorted(how.strengths)
    blind = [PLAIN, *((BLIND, sign * much) for sign in (1, -1) for much in strengths)]
    tuned = accuracies(blind)
    sign = sign_of(tuned[1:, cells.target])
    edits = [(way, sign * much) for way in rewriting.gates for much in strengths]
    tuned = np.concatenate([tuned, accuracies(edits)])
    edits = [*blind, *edits]
    chosen = chosen_edits(edits, tuned, cells)
    ways = [BLIND, *rewriting.gates]
    found = rewriting.run(split.measuring, [PLAIN, *(chosen[way] for way in ways)], added, advance)
    rows = {way: [1 + i for i, each in enumerate(ways) if each.partition(" ")[0] == way] for way in _ways(ways)}
    cell_of = split.cell_of[split.measuring]
    report = compared(found.right, {"plain": [0], **rows}, cell_of, cells, GAINS, how.seed)
    for way, numbers in rows.items():
        report["ways"][way]["strengths"] = [chosen[ways[n - 1]][1] for n in numbers]
    apart = {way: separation(values, cell_of, cells) for way, values in found.strengths.items()}
    counts = map(split.counted, (split.fitting, split.tuning, split.measuring))
    keys = ("label", "group", "fitted", "tuned", "measured")
    return {
        "cells": [dict(zip(keys, cell, strict=True)) for cell in zip(cells.labels, cells.groups, *counts, strict=True)],
        "target": cells.target,
        "simplex": rewriting.simplex,
        **report,
        "best": 1 - report["ways"]["plain"]["target_accuracy"],
        "tried": _tried(edits, tuned, cells, sign),
        "separation": {way: apart[way] for way in CONTROLS}
        | {way: {"auc": float(np.mean([apart[ways[n - 1]]["auc"] for n in rows[way]]))} for way in CONTROLS.values()},
    }


def _ways(names: Sequence[str]) -> list[str]:
    """Return the ways, each once: draws of a control have its name and a number."""
    return list(dict.fromkeys(name.partition(" ")[0] for name in names))


def _sets(split: Split, how: RewriteConfig) -> dict[str, tuple[list[int], list[int]]]:
    """Return the fitting texts of the ``target``, and as many random others, several times; with each all the rest."""
    mine = [n for n in split.fitting if split.cell_of[n] == split.cells.target]
    others = [n for n in split.fitting if split.cell_of[n] != split.cells.target]
    rng = np.random.default_rng(how.seed)
    sets = {"target": mine}
    for draw in range(how.draws):
        sets[str(draw)] = rng.choice(others, min(len(mine), len(others)), replace=False).tolist()
    return {name: (texts, [n for n in split.fitting if n not in set(texts)]) for name, texts in sets.items()}


def sign_of(accuracies: Float[np.ndarray, " edits"]) -> int:
    """Return the sign with which the target is right more often: +1 or -1, and +1 if as often.

    Args:
        accuracies: on the target, with each strength added everywhere, then with each taken off.
    """
    more, less = accuracies.reshape(2, -1).mean(1)
    return 1 if more >= less else -1


def chosen_edits(edits: Sequence[Edit], accuracies: Float[np.ndarray, "edits cells"], cells: Cells) -> dict[str, Edit]:
    """Return for each way the edit with the best rewrite score, the first of equals; none where no score is above 0.

    Args:
        edits: the first adds nothing, the others of each way stand in order of strength.
        accuracies: on each cell, under each edit.
        cells: what these are.
    """
    scores = rewrite_score(accuracies[:1], accuracies, cells.target)
    chosen: dict[str, tuple[float, Edit]] = {}
    for (way, much), score in zip(edits, np.asarray(scores).tolist(), strict=True):
        best, _ = chosen.setdefault(way, (0.0, (way, 0.0)))
        if score > best + 1e-12:  # beyond rounding
            chosen[way] = score, (way, much)
    return {way: edit for way, (_, edit) in chosen.items()}


def _tried(
    edits: Sequence[Edit], accuracies: Float[np.ndarray, "edits cells"], cells: Cells, sign: int
) -> dict[str, list[dict[str, float]]]:
    """Return what each strength of the chosen sign did to the target and the others, means over a control's draws."""
    changes = accuracies - accuracies[0]
    others = np.delete(np.abs(changes), cells.target, 1).sum(1)
    tried: dict[str, list[dict[str, float]]] = {}
    for way in _ways([way for way, _ in edits]):
        for much in dict.fromkeys(much for _, much in edits if much * sign > 0):
            at = [i for i, (each, m) in enumerate(edits) if each.partition(" ")[0] == way and m == much]
            point = {"target": changes[at, cells.target], "others": others[at]}
            means = {key: float(values.mean()) for key, values in point.items()}
            tried.setdefault(way, []).append({"strength": much} | means)
    return tried


def _token(model: FrozenModel, split: Split) -> dict[str, Any]:
    leave_out = list(special_ids(model.tokenizer))
    found = telltale(split.rows, split.fitting, split.measuring, split.cell_of, split.cells.target, leave_out)
    token, more, auc = found
    return {"text": model.tokenizer.decode([token]), "present": more, "auc": auc}

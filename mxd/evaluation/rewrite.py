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
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from mxd.artifacts.checkpoint import Trained
from mxd.common.numbers import plural
from mxd.common.progress import Advance, progress
from mxd.data.contexts import special_ids
from mxd.data.grouped import grouped_texts
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.fairness import Cells, cell_accuracies, compared, rewrite_score
from mxd.evaluation.rewriting import BLIND, PLAIN, Edit, Found, Gate, Rewriting, direction_of
from mxd.evaluation.separation import separation, telltale
from mxd.evaluation.splitting import Split, split_texts
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
    split = split_texts(model, texts, labels, groups, how, context, bos)
    gates = 2 * (1 + how.draws)
    tried, measured = 1 + len(how.strengths) * (2 + gates), 2 + gates
    total = len(layers) * (len(split.fitting) + len(split.tuning) * tried + len(split.measuring) * measured)
    token = _token(model, split)
    with evaluating(model, layers), progress(f"rewriting {plural(len(layers), 'layer')}", total, "texts") as advance:
        return {
            name: {"block": trained.provenance.block, "num_units": trained.layer.num_units, "token": token}
            | _rewritten(Rewriting(model, trained, split.rows, split.labels, batch), split, how, advance)
            for name, trained in layers.items()
        }


def _rewritten(rewriting: Rewriting, split: Split, how: RewriteConfig, advance: Advance) -> dict[str, Any]:
    """Fit, choose and measure on one layer."""
    cells = split.cells
    _fit(rewriting, split, how, advance)
    added = direction_of(how.direction, rewriting, split.target_label)

    def accuracies(edits: Sequence[Edit]) -> Float[np.ndarray, "edits cells"]:
        right = rewriting.run(split.tuning, edits, added, advance).right
        return cell_accuracies(right, split.cell_of[split.tuning], len(cells.texts))

    strengths = sorted(how.strengths)
    blind = [PLAIN, *((BLIND, sign * much) for sign in (1, -1) for much in strengths)]
    tuned = accuracies(blind)
    sign = sign_of(tuned[1:, cells.target])
    gated = [(way, sign * much) for way in rewriting.gates for much in strengths]
    edits, tuned = [*blind, *gated], np.concatenate([tuned, accuracies(gated)])
    chosen = chosen_edits(edits, tuned, cells)
    found = rewriting.run(split.measuring, [PLAIN, *chosen.values()], added, advance)
    counts = map(split.counted, (split.fitting, split.tuning, split.measuring))
    keys = ("label", "group", "fitted", "tuned", "measured")
    report = _measured(found, chosen, split, how.seed)
    return {
        "cells": [dict(zip(keys, cell, strict=True)) for cell in zip(cells.labels, cells.groups, *counts, strict=True)],
        "target": cells.target,
        "simplex": rewriting.simplex,
        **report,
        "best": 1 - report["ways"]["plain"]["target_accuracy"],
        "tried": _tried(edits, tuned, cells, sign),
    }


def _fit(rewriting: Rewriting, split: Split, how: RewriteConfig, advance: Advance) -> None:
    """Fit the probe, and the gates of the target and of its controls."""
    sets = split.sets(how.draws, how.seed)
    members = {f"{name}{side}": texts for name, both in sets.items() for side, texts in zip("+-", both, strict=True)}
    means = rewriting.fit(split.fitting, split.probed(how.support), members, advance)
    for name in sets:
        by_mean, by_contrast = (
            (EXPERT, CONTRAST) if name == "target" else (f"{way} {name}" for way in CONTROLS.values())
        )
        rewriting.gates[by_mean] = Gate.by_mean(means[f"{name}+"], rewriting.simplex)
        rewriting.gates[by_contrast] = Gate.by_contrast(means[f"{name}+"], means[f"{name}-"])


def _measured(found: Found, chosen: Mapping[str, Edit], split: Split, seed: int) -> dict[str, Any]:
    """Return what none and then each chosen edit did to the measured texts, and how well gates tell the target."""
    cell_of, names = split.cell_of[split.measuring], list(chosen)
    draws = {way: [name for name in names if _way(name) == way] for way in dict.fromkeys(map(_way, names))}
    rows = {way: [1 + names.index(name) for name in each] for way, each in draws.items()}
    report = compared(found.right, {"plain": [0], **rows}, cell_of, split.cells, GAINS, seed)
    for way, each in draws.items():
        report["ways"][way]["strengths"] = [chosen[name][1] for name in each]
    apart = {name: separation(values, cell_of, split.cells) for name, values in found.strengths.items()}
    random = {way: {"auc": float(np.mean([apart[name]["auc"] for name in draws[way]]))} for way in CONTROLS.values()}
    return report | {"separation": {way: apart[way] for way in CONTROLS} | random}


def _way(name: str) -> str:
    """Return the way that a name stands for: draws of a control have its name and a number."""
    return name.partition(" ")[0]


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
    for way in dict.fromkeys(_way(name) for name, _ in edits):
        for much in dict.fromkeys(much for _, much in edits if much * sign > 0):
            at = [i for i, (each, m) in enumerate(edits) if _way(each) == way and m == much]
            point = {"target": changes[at, cells.target], "others": others[at]}
            means = {key: float(values.mean()) for key, values in point.items()}
            tried.setdefault(way, []).append({"strength": much} | means)
    return tried


def _token(model: FrozenModel, split: Split) -> dict[str, Any]:
    leave_out = list(special_ids(model.tokenizer))
    found = telltale(split.rows, split.fitting, split.measuring, split.cell_of, split.cells.target, leave_out)
    token, more, auc = found
    return {"text": model.tokenizer.decode([token]), "present": more, "auc": auc}

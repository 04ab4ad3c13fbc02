"""What would be lost without a unit? Units are dropped one by one, and accuracy is measured class by class.

After muMoE (Oldfield et al., NeurIPS 2024, section 4.1.2 and equation 4). With ``y_c`` the spliced model's accuracy on
class c, and ``y_c(n)`` without unit n,

    d_c(n) = (y_c - y_c(n)) / y_c,     p(n) = || d(n) - e ||,     e one-hot at argmax_c d_c(n)

``p(n)``, the unit's polysemanticity, is 0 where all accuracy on one class is lost and nothing else changes, about 1
where hardly anything changes, and large where several classes suffer. Means are over units that change anything.

Dropping anything moves some answers. So for each unit as many coefficients are dropped that are drawn from all those
active on the texts, whatever their unit: the control. A unit's effect is beyond chance where its largest ``d_c``
exceeds the 95% quantile of the same for the controls of nearly as many coefficients.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from mxd.artifacts.checkpoint import Trained
from mxd.common.numbers import plural
from mxd.common.progress import progress
from mxd.data.labelled import labelled_texts
from mxd.evaluation.checkpoints import Subject
from mxd.evaluation.dropping import Activity, Dropping
from mxd.evaluation.masks import Texts, at_least, halves
from mxd.evaluation.targets import NextTokens, ProbedClass, Target
from mxd.evaluation.walk import CodeMoments, check_units, codes, evaluating, padded_batches
from mxd.model.frozen import FrozenModel
from mxd.questions import DEFAULTS, AblationConfig

QUANTILE = 0.95
"""A unit's largest ``d_c`` is beyond chance above this quantile of its controls'."""
NEIGHBOURS = 40
"""Controls that a unit is compared with: those of the units with the most similar numbers of coefficients."""
BINS = 20
"""Bins of the histograms of polysemanticity."""


def answer(
    subject: Subject, how: AblationConfig = DEFAULTS.ablation, units: Sequence[int] | None = None
) -> dict[str, Any]:
    """Drop units of checkpoints, each layer spliced in alone.

    Args:
        subject: the checkpoints.
        how: on what, and which units.
        units: units to drop; by default those that fire most often (``frequent``).

    Raises:
        MxdError: as ``labelled_texts`` and ``evaluate_ablation``.
    """
    subject = subject.with_neurons(how.neurons)
    labelled, text = labelled_texts(how.set, how.text_column, how.label_column), subject.text
    what = subject.base, subject.layers, labelled.texts, labelled.labels
    results = evaluate_ablation(*what, how, units, text.context, text.bos)
    return subject.document(results, asked=how.model_dump(mode="json"), replacements=subject.members)


@torch.no_grad()
def evaluate_ablation(
    model: FrozenModel,
    layers: Mapping[str, Trained],
    texts: Sequence[str],
    labels: Sequence[str],
    how: AblationConfig = DEFAULTS.ablation,
    units: Sequence[int] | None = None,
    context: int = 128,
    bos: bool = True,
    batch: int = 8,
) -> dict[str, dict[str, Any]]:
    """Drop single units of each layer, and as many random coefficients, and measure the accuracy on every class.

    One half of the texts chooses the units and fits the probe, accuracy is measured on the other. A text runs again
    only where the unit is active somewhere in it, and only from the replaced block on.

    Args:
        model: the frozen base model.
        layers: name -> a layer with its provenance.
        texts: texts of all classes.
        labels: the class of each.
        how: what is asked.
        units: units to drop; by default those that fire most often (``frequent``).
        context: tokens of a text that are read.
        bos: begin each text with BOS where the tokenizer has one.
        batch: texts in one forward.

    Returns:
        Name -> ``classes``, how many ``texts`` of each are measured, the ``accuracy`` on each and ``chance``, that of
        the most frequent answer; ``units``: for each its firing ``rate``, the ``coefficients`` that were dropped, ``d``
        by class (``None`` where the accuracy is 0 anyway), ``p`` (``None`` where nothing changes), ``beyond_chance``,
        and the control's ``d`` and ``p``; what ``summarised`` says of all of them, of those ``beyond_chance``, and of
        the ``control``; histograms; and ``shared_left_out``, units above ``how.shared`` that were too many.

    Raises:
        MxdError: fewer than two classes, a class with fewer than two texts, no tokenizer, units that a layer does not
            have, or layers that do not fit the model.
    """
    classes = sorted(set(labels))
    at_least("the number of classes", len(classes), 2)
    check_units(layers, units)
    groups = [classes.index(label) for label in labels]
    drawn = halves(model.tokenizer, texts, groups, classes, how.limit, context, bos, how.seed)
    results = {}
    with evaluating(model, layers):
        for name, trained in layers.items():
            moments = _moments(model, trained, drawn, batch)
            chosen, left_out = (
                (list(dict.fromkeys(units)), 0) if units is not None else frequent(moments, how.top, how.shared)
            )
            found = _Ablated(model, trained, drawn, chosen, how, batch).measured(name)
            about = {"block": trained.provenance.block, "target": how.target, "classes": classes}
            about["num_units"] = trained.layer.num_units
            results[name] = about | _report(found, chosen, moments.rates.tolist()) | {"shared_left_out": left_out}
    return results


def frequent(moments: CodeMoments, top: int, shared: float) -> tuple[list[int], int]:
    """Return the units that are dropped by default, in numerical order, and how many shared ones are left out.

    They are the ``top`` that fire most often among those that are not shared, and at most as many shared ones; of
    units that fire equally often, those with the larger mean activation.

    Args:
        moments: of the layer's codes over a text.
        top: how many of each.
        shared: units active at more than this share of the tokens count as shared.
    """
    rates, means = moments.rates.numpy(), moments.sums.numpy()
    order = np.lexsort((-means, -rates))  # the last key is the first to count
    over = rates[order] > shared
    often, always = order[~over & (rates[order] > 0)][:top], order[over][:top]
    return sorted([*often.tolist(), *always.tolist()]), int(over.sum()) - len(always)


def polysemanticity(drops: Float[np.ndarray, "units classes"]) -> Float[np.ndarray, " units"]:
    """Return ``p(n)`` of each unit (equation 4), NaN for units that change nothing.

    Args:
        drops: ``d_c(n)``; NaN for classes that are left out.
    """
    d = drops[:, ~np.isnan(drops).all(0)]
    if not d.size:
        return np.full(len(drops), np.nan)
    ideal = np.eye(d.shape[1])[d.argmax(1)]
    return np.where((d != 0).any(1), np.linalg.norm(d - ideal, axis=1), np.nan)


def beyond_chance(
    largest: Float[np.ndarray, " units"], control: Float[np.ndarray, " units"], sizes: Int[np.ndarray, " units"]
) -> Bool[np.ndarray, " units"]:
    """Return which units' largest ``d_c`` exceeds the 95% quantile of controls that drop nearly as many coefficients.

    Args:
        largest: each unit's largest ``d_c``.
        control: the same of its control.
        sizes: coefficients that were dropped for each.
    """
    order = np.argsort(sizes, kind="stable")
    beyond = np.zeros(len(sizes), dtype=bool)
    for place, unit in enumerate(order):
        start = min(max(place - NEIGHBOURS // 2, 0), max(len(order) - NEIGHBOURS, 0))
        beyond[unit] = largest[unit] > np.quantile(control[order[start : start + NEIGHBOURS]], QUANTILE)
    return beyond


class _Ablated:
    """One layer with its units dropped."""

    def __init__(
        self, model: FrozenModel, trained: Trained, texts: Texts, units: list[int], how: AblationConfig, size: int
    ) -> None:
        self.model, self.texts, self.size = model, texts, size
        self.dropping = Dropping(model, trained, units, how.seed)
        self.classes = max(texts.groups) + 1
        self.target: Target = NextTokens(model)
        if how.target == "probe":
            self.target = ProbedClass(model, texts.groups)
            self.target.fit(self.dropping.spliced(padded_batches(texts.rows, texts.choosing, size)))

    def measured(self, name: str) -> "_Found":
        """Drop every unit, and its control, on all texts that are measured."""
        groups = np.array(self.texts.groups)
        activity = self.dropping.activity(padded_batches(self.texts.rows, self.texts.measuring, self.size))
        whole, asked = np.zeros((2, self.classes), dtype=int)
        changes = np.zeros((2, len(activity.units), self.classes), dtype=int)
        title = f"{plural(len(activity.units), 'unit')} of {name} and as many controls"
        with progress(title, len(self.texts.measuring) + activity.again, "texts") as advance:
            for batch in padded_batches(self.texts.rows, self.texts.measuring, self.size):
                at = self.dropping.at(batch)
                right = at.run(self.target)
                np.add.at(whole, groups[batch.numbers], right)
                np.add.at(asked, groups[batch.numbers], self.target.asked(batch))
                advance(len(right))
                for rows, kinds, unit, dropped in at.drops(activity, self.size):
                    change = at.run(self.target, rows, dropped) - right[rows]
                    np.add.at(changes, (kinds, unit, groups[batch.numbers][rows]), change)
                    advance(len(rows))
        return _Found(activity, whole, asked, changes, [self.texts.measured[group] for group in range(self.classes)])


class _Found:
    """What was counted: right answers by class, and what each unit and its control changes."""

    def __init__(
        self,
        activity: Activity,
        right: Int[np.ndarray, " classes"],
        asked: Int[np.ndarray, " classes"],
        changes: Int[np.ndarray, "2 units classes"],
        texts: list[int],
    ) -> None:
        self.activity, self.right, self.asked, self.texts = activity, right, asked, texts
        with np.errstate(divide="ignore", invalid="ignore"):
            drops = np.where(right > 0, -changes / right, np.nan)
        self.drops, self.control = drops


def _moments(model: FrozenModel, trained: Trained, texts: Texts, size: int) -> CodeMoments:
    moments = CodeMoments(trained.layer)
    for batch in padded_batches(texts.rows, texts.choosing, size):
        for _, code, _ in codes(model, {"": trained}, batch.ids, batch.real):
            moments.count(code)
    return moments


def _report(found: _Found, units: list[int], rates: list[float]) -> dict[str, Any]:
    both = {"units": found.drops, "control": found.control}
    p = {which: polysemanticity(drops) for which, drops in both.items()}
    largest = {which: _largest(drops) for which, drops in both.items()}
    sizes = found.activity.coefficients.sum(0)
    beyond = beyond_chance(largest["units"], largest["control"], sizes)
    known = np.concatenate([value[~np.isnan(value)] for value in p.values()])
    edges = np.histogram_bin_edges(known, BINS)
    histograms = {"units": p["units"], "beyond_chance": p["units"][beyond], "control": p["control"]}
    return {
        "texts": found.texts,
        "accuracy": (found.right / np.maximum(found.asked, 1)).tolist(),
        "mean_accuracy": float((found.right / np.maximum(found.asked, 1)).mean()),
        "ablated": len(units),
        **summarised(p["units"], largest["units"]),
        "beyond_chance": summarised(p["units"][beyond], largest["units"][beyond]) | {"units": int(beyond.sum())},
        "control": summarised(p["control"], largest["control"]),
        "histogram": {"edges": edges.tolist()}
        | {which: np.histogram(v[~np.isnan(v)], edges)[0].tolist() for which, v in histograms.items()},
        "units": {
            str(unit): {
                "rate": rates[unit],
                "coefficients": int(sizes[n]),
                "beyond_chance": bool(beyond[n]),
                "d": _listed(found.drops[n]),
                "p": _or_none(p["units"][n]),
                "control": {"d": _listed(found.control[n]), "p": _or_none(p["control"][n])},
            }
            for n, unit in enumerate(units)
        },
    }


def summarised(p: Float[np.ndarray, " units"], largest: Float[np.ndarray, " units"]) -> dict[str, Any]:
    """Return what is said of some units.

    ``polysemanticity`` is the mean of p over those that change anything, with its standard error over units,
    ``affecting`` how many these are, ``largest_drop`` the mean of the largest ``d_c``. Means over nothing, and standard
    errors over fewer than two units, are ``None``.

    Args:
        p: polysemanticity of each unit; NaN where nothing changes.
        largest: the largest ``d_c`` of each unit.
    """
    known = p[~np.isnan(p)]
    return {
        "polysemanticity": float(known.mean()) if len(known) else None,
        "polysemanticity_se": float(known.std(ddof=1) / np.sqrt(len(known))) if len(known) > 1 else None,
        "affecting": len(known),
        "largest_drop": float(largest.mean()) if len(largest) else None,
    }


def _largest(drops: Float[np.ndarray, "units classes"]) -> Float[np.ndarray, " units"]:
    return np.nan_to_num(drops, nan=-np.inf).max(1, initial=0.0)


def _listed(drops: Float[np.ndarray, " classes"]) -> list[float | None]:
    return [_or_none(drop) for drop in drops]


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 6)

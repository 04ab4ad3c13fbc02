"""Probes of single units for one class of texts: the MxD paper's (arXiv 2505.21364, app. B.5), and SAEBench's."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mxd.layers.gates import Gate

BINS = 30
"""Bins of a density."""
SAEBENCH_K = (1, 2, 5)
"""Units in one of SAEBench's probes."""


@dataclass(frozen=True)
class Units:
    """The pooled pre-activations of all units, computed for those asked for; several heads count separately.

    Pre-activations are affine in a layer's input (``ReplacementLayer.gates``), so the mean over tokens is
    taken of the input: one vector per text, whatever the number of units.
    """

    pooled: Float[Tensor, "texts width"]
    gates: Gate | None = None
    """Computes the units' pre-activations from it; ``None`` where they are its own entries, an MLP's neurons."""

    def differences(
        self, first: Bool[np.ndarray, " texts"], second: Bool[np.ndarray, " texts"]
    ) -> Float[Tensor, " units"]:
        """Return for each unit (head by head) its mean over some texts minus its mean over others."""
        first_mean, second_mean = (self.pooled[torch.from_numpy(rows)].double().mean(0) for rows in (first, second))
        gap = (first_mean - second_mean).float()
        if self.gates is None:
            return gap
        return torch.cat([self.gates.project(gap, head) for head in range(self.gates.heads)])

    def columns(self, units: Int[Tensor, " chosen"]) -> Float[np.ndarray, "texts chosen"]:
        """Return the pooled pre-activations of some units, numbered as ``differences`` lists them."""
        if self.gates is None:
            return self.pooled[:, units].double().cpu().numpy()
        heads, numbers = units // self.gates.units, units % self.gates.units
        columns = self.pooled.new_empty(len(self.pooled), len(units))
        for head in heads.unique().tolist():
            columns[:, heads == head] = F.linear(self.pooled, *self.gates.rows(numbers[heads == head], head))
        return columns.double().cpu().numpy()

    def named(self, unit: int) -> dict[str, int]:
        """Return how results name a unit of ``differences``: its number, and its head where there are several."""
        if self.gates is None or self.gates.heads == 1:
            return {"unit": unit}
        return {"unit": unit % self.gates.units, "head": unit // self.gates.units}


def probe_class(
    units: Units,
    positive: Bool[np.ndarray, " texts"],
    train: Bool[np.ndarray, " texts"],
    candidates: int,
) -> dict[str, Any]:
    """Probe single units for one class against all others.

    Args:
        units: pooled pre-activations of all units.
        positive: which texts are of the class.
        train: which texts the probes are fitted on; the others are held out.
        candidates: units that get a probe: those whose mean over the class exceeds that over the rest by most.

    Returns:
        ``f1``, the best on the held-out texts, and the ``unit`` that has it (the paper's number); ``train_choice``, the
        unit that is best on the training texts and its held-out F1; ``f1_always``, that of answering yes always;
        ``n_test`` and ``n_positive``, the numbers of held-out texts and of those of the class; ``density``, the best
        unit's pre-activations on held-out texts of the class and of the rest, as histograms with the same ``edges``.
    """
    chosen = units.differences(train & positive, train & ~positive)
    chosen = chosen.topk(min(candidates, len(chosen))).indices
    columns = units.columns(chosen)
    answers = np.stack([_answers(column[:, None], positive, train, _probe()) for column in columns.T])
    held_out = np.array([f1(positive[~train], answer[~train]) for answer in answers])
    training = np.array([f1(positive[train], answer[train]) for answer in answers])
    best, honest = int(held_out.argmax()), int(training.argmax())
    return {
        "f1": float(held_out[best]),
        **units.named(int(chosen[best])),
        "train_choice": {**units.named(int(chosen[honest])), "f1": float(held_out[honest])},
        "f1_always": f1(positive[~train], np.ones(int((~train).sum()), dtype=bool)),
        "n_test": int((~train).sum()),
        "n_positive": int((positive & ~train).sum()),
        "density": _density(columns[~train, best], positive[~train]),
    }


def k_sparse_accuracy(
    units: Units,
    positive: Bool[np.ndarray, " texts"],
    train: Bool[np.ndarray, " texts"],
    seed: int,
) -> dict[str, float]:
    """Return SAEBench's own numbers: held-out accuracy of a probe on the k units with the largest mean difference.

    Differences count by absolute value here, and equally many texts are drawn from the rest as the class has.

    Args:
        units: pooled pre-activations of all units.
        positive: which texts are of the class.
        train: which texts the probe is fitted on.
        seed: draws the texts of the rest.

    Returns:
        k -> accuracy on the held-out texts, half of which are of the class where the rest has enough.
    """
    rng = np.random.default_rng(seed)
    kept = positive.copy()
    for part in (train, ~train):
        rest = np.flatnonzero(part & ~positive)
        kept[rng.choice(rest, min(len(rest), int((part & positive).sum())), replace=False)] = True
    differences = units.differences(train & positive, train & kept & ~positive).abs()
    columns = units.columns(differences.topk(min(max(SAEBENCH_K), len(differences))).indices)
    held_out = kept & ~train
    accuracies = {}
    for k in SAEBENCH_K:
        answers = _answers(columns[:, :k], positive, train & kept, _saebench_probe())
        accuracies[str(k)] = float((answers[held_out] == positive[held_out]).mean())
    return accuracies


def f1(truth: Bool[np.ndarray, " n"], answers: Bool[np.ndarray, " n"]) -> float:
    """Return ``2 TP / (2 TP + FP + FN)``; 0 where nothing is true or found."""
    hits = int((truth & answers).sum())
    wrong = int((truth != answers).sum())
    return 2 * hits / (2 * hits + wrong) if hits else 0.0


def _probe() -> Any:
    """Return the paper's probe; its penalty, l2, is scikit-learn's default."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(class_weight="balanced", solver="newton-cholesky", max_iter=200)


def _saebench_probe() -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(max_iter=1000)


def fit(probe: Any, columns: Float[np.ndarray, "texts k"], labels: Shaped[np.ndarray, " texts"]) -> Any:
    """Fit a scikit-learn classifier, without its warnings, and return it.

    Args:
        probe: the classifier.
        columns: what it reads.
        labels: what it is to answer.
    """
    import sklearn
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings(), sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        for category in (ConvergenceWarning, RuntimeWarning):  # from ill-conditioned fits, which fall back on lbfgs
            warnings.simplefilter("ignore", category)
        return probe.fit(columns, labels)


def _answers(
    columns: Float[np.ndarray, "texts k"],
    positive: Bool[np.ndarray, " texts"],
    train: Bool[np.ndarray, " texts"],
    probe: Any,
) -> Bool[np.ndarray, " texts"]:
    """Fit a probe on the training texts and return its answers for all."""
    import sklearn

    fitted = fit(probe, columns[train], positive[train])
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        return fitted.predict(columns)


def _density(values: Float[np.ndarray, " texts"], positive: Bool[np.ndarray, " texts"]) -> dict[str, list[float]]:
    edges = np.histogram_bin_edges(values, BINS)
    sides = {"positive": values[positive], "negative": values[~positive]}
    return {"edges": edges.tolist()} | {
        name: np.histogram(side, edges, density=True)[0].tolist() for name, side in sides.items()
    }

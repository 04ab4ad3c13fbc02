"""Every number in results: key, name, unit, format, direction and meaning, for tables, cards, pages and docs."""

from collections.abc import Iterable

from mxd.metrics.conventions import CONVENTIONS
from mxd.metrics.dropped import ABLATION, SUBSET
from mxd.metrics.faithful import COST, DECOMPOSITION, FAITHFULNESS
from mxd.metrics.judged import AGREEMENT, EXPLAINING, STEERING
from mxd.metrics.masks import (
    BY_CHANCE,
    BY_MASK,
    KEPT,
    MASKING,
    PURGED,
    PURGED_SHARE,
    PURGING,
    TASKS,
    TOXIC,
)
from mxd.metrics.metric import Metric
from mxd.metrics.rewritten import CELL_ACCURACY, REWRITE, REWRITTEN, SEPARATION
from mxd.metrics.units import PROBING, STRUCTURE, UNITS
from mxd.metrics.whole import BY_BLOCK, GARBAGE, GENERATION, WHOLE

QUESTIONS = {"Is it faithful?": FAITHFULNESS, "Does it decompose?": DECOMPOSITION, "What does it cost?": COST}
"""The tables of an evaluation, by their titles."""

METRICS = {
    "faithfulness": tuple(dict.fromkeys((*FAITHFULNESS, *CONVENTIONS, *DECOMPOSITION, *COST))),
    "generation": GENERATION,
    "whole": (*WHOLE, *BY_BLOCK, *GARBAGE),
    "structure": STRUCTURE,
    "units": UNITS,
    "probing": PROBING,
    "steering": (*STEERING, *AGREEMENT),
    "explaining": EXPLAINING,
    "masking": (*MASKING, *BY_MASK, *TASKS, *KEPT),
    "purging": (*PURGING, *BY_MASK),
    "toxicity": (*TOXIC, PURGED, PURGED_SHARE, BY_CHANCE, *BY_MASK),
    "ablation": ABLATION,
    "subset": SUBSET,
    "rewrite": (*REWRITE, *REWRITTEN, CELL_ACCURACY, *SEPARATION),
}
"""Every number that people are shown, by the file that holds it."""

RESULTS = (*METRICS, "tuned")
"""The results that a run's folder may hold, each in a JSON file of its name."""


def explained(metrics: Iterable[Metric]) -> str:
    """Return the explanations of some metrics as one line of Markdown."""
    return "; ".join(f"*{metric.title}*: {metric.note}" for metric in metrics) + "."

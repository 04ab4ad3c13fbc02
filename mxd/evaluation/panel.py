"""Several judges of the same collections of texts: what each says, the mean over them, and how far they agree.

In the MxD paper two judges rate each collection (arXiv 2505.21364, figure 5, app. D.1). A mean over judges is taken
where all of them answered, and else is none, so that it does not depend on who failed where. Beside the steered
collections each judge rates one that is not steered: samples of one prompt share a theme, and are fluent, whatever a
unit does.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float

from mxd.common.progress import progress
from mxd.evaluation.judging import GIVE_UP, Judge, Verdict, judged

AXES = ("coherence", "fluency")


def judge_all(
    results: Mapping[str, dict[str, Any]], judges: Sequence[Judge], prompt: str, repeats: int, rubric: str
) -> None:
    """Add verdicts to all collections; a judge that has not answered ``GIVE_UP`` times running is not asked again.

    Args:
        results: name -> results of steering, which are changed.
        judges: who is asked; no two of one name (``check_judges``).
        prompt: the text that all samples continue.
        repeats: how often each judge is asked about each collection.
        rubric: with which words (``RUBRICS``).
    """
    names = [judge.name for judge in judges]
    silent = dict.fromkeys(names, 0)

    def ask(samples: Sequence[str]) -> dict[str, Any]:
        reports = {}
        for judge in judges:
            if silent[judge.name] < GIVE_UP:
                # the prompt precedes each sample, as in the paper's code
                verdict = judged(judge, [prompt + sample for sample in samples], repeats, rubric)
                answered = bool(verdict.answers or "not two numbers" in verdict.failures)
                silent[judge.name] = 0 if answered else silent[judge.name] + 1
            else:
                verdict = Verdict(failures=Counter({"not asked": repeats}))
            reports[judge.name] = verdict.report()
            advance(1)
        return combined(reports)

    total = len(judges) * sum(len(result["units"]) + 1 for result in results.values())
    with progress("judging", total, "collections") as advance:
        for result in results.values():
            for collection in result["units"].values():
                collection |= ask(collection["samples"])
            result["unsteered_judged"] = ask(result["unsteered"])
            result |= {"judge": ", ".join(names), "rubric": rubric} | panel(
                list(result["units"].values()), names, repeats
            )


def combined(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several judges say of one collection: means where all answered, failures of all together.

    Args:
        reports: judge -> what ``Verdict.report`` returns.
    """
    means: dict[str, Any] = {}
    for axis in AXES:
        rated = [report[axis] for report in reports.values()]
        means[axis] = None if None in rated else float(np.mean(rated))
    reasons = sum((Counter(report["reasons"]) for report in reports.values()), Counter[str]())
    return means | {
        "failures": sum(reasons.values()),
        "reasons": dict(reasons),
        "disagreement": any(report["disagreement"] for report in reports.values()),
        "judges": dict(reports),
    }


def panel(collections: Sequence[Mapping[str, Any]], names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Return means over collections, of all judges and under ``judges`` of each, and under ``agreement`` of each pair.

    Args:
        collections: what ``combined`` returns for each.
        names: the judges'.
        repeats: how often each was asked about each collection.
    """
    by_judge = {name: [collection["judges"][name] for collection in collections] for name in names}
    pairs = combinations(names, 2)
    return _totals(collections, len(names) * repeats) | {
        "judges": {name: _totals(reports, repeats) for name, reports in by_judge.items()},
        "agreement": [
            {"judges": [a, b]} | {axis: _agreement(axis, by_judge[a], by_judge[b]) for axis in AXES} for a, b in pairs
        ],
    }


def _totals(collections: Sequence[Mapping[str, Any]], each: int) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for axis in AXES:
        rated = [collection[axis] for collection in collections if collection[axis] is not None]
        means[axis] = float(np.mean(rated)) if rated else None
        means[f"{axis}_se"] = float(np.std(rated, ddof=1) / math.sqrt(len(rated))) if len(rated) > 1 else None
    reasons = sum((Counter(collection["reasons"]) for collection in collections), Counter[str]())
    return means | {
        "asked": each * len(collections),
        "failures": sum(reasons.values()),
        "reasons": dict(reasons),
        "disagreements": sum(collection["disagreement"] for collection in collections),
    }


def _agreement(axis: str, first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how two judges' numbers of the same collections differ on average, and whether their order agrees."""
    pairs = [(a[axis], b[axis]) for a, b in zip(first, second, strict=True) if None not in (a[axis], b[axis])]
    a, b = np.array(pairs, dtype=float).reshape(-1, 2).T
    n = len(pairs)
    return {
        "units": n,
        "difference": float((a - b).mean()) if n else None,
        "difference_se": float((a - b).std(ddof=1) / math.sqrt(n)) if n > 1 else None,
        "spearman": spearman(a, b),
        "chance": 1.96 / math.sqrt(n - 1) if n > 2 else None,
    }


def ranks(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return the ranks of values from 1 on; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[place]


def spearman(a: Float[np.ndarray, " n"], b: Float[np.ndarray, " n"]) -> float | None:
    """Return Spearman's rank correlation: Pearson's, of the ranks; ``None`` where one of the two is constant."""
    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])

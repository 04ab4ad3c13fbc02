"""A judge reads an explanation of a unit and two texts, and says on which of them the unit fires.

Chance is one half, and a judge that always says A has exactly that, or nearly: the right text stands first in every
other question. A text on which a unit fires strongly may stand out without any explanation, so each question is asked
again with that of another unit.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mxd.common.progress import progress
from mxd.evaluation.judging import GIVE_UP, Judge, NoAnswer

INSTRUCTIONS = """A part of a language model becomes active on certain words or topics. This is a description of what it
means, which may be poor:

{explanation}

It is active in one of the following two texts, and hardly or not in the other. In which one is it active?

TEXT A: {a}

TEXT B: {b}

Answer with exactly one letter, A or B, and nothing else."""


def decided(results: Mapping[str, dict[str, Any]], judges: Sequence[Judge], seed: int) -> None:
    """Have judges decide on all explanations; they are added to the results.

    Args:
        results: name -> ``units``: for each ``explanations`` and ``pairs``; changed. Every unit gets, and so does the
            whole, under ``judges`` what ``scored`` returns for each judge; a unit under ``other`` the unit whose
            explanations were its control.
        judges: who decides; no two of one name (``check_judges``).
        seed: draws the other units.
    """
    names = [judge.name for judge in judges]
    pairs = [unit for result in results.values() for unit in result["units"].values()]
    total = len(judges) * sum(2 * len(unit["explanations"]) * len(unit["pairs"]) for unit in pairs)
    with progress("judging explanations", total, "questions") as advance:
        asking = [_Asking(judge) for judge in judges]
        for number, result in enumerate(results.values()):
            units = result["units"]
            others = _others(list(units), np.random.default_rng([seed, number]))
            for place, (name, unit) in enumerate(units.items()):
                unit["other"] = others.get(name)
                told = {"own": unit["explanations"]}
                if name in others:
                    told["control"] = units[others[name]]["explanations"]
                unit["judges"] = {}
                for ask in asking:
                    unit["judges"][ask.judge.name] = {
                        kind: ask.all(explanations, unit["pairs"], place) for kind, explanations in told.items()
                    }
                    advance(2 * len(unit["explanations"]) * len(unit["pairs"]))
            result["judges"] = {name: scored([unit["judges"][name] for unit in units.values()]) for name in names}


def scored(units: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return one judge's numbers over units, with standard errors over them.

    Args:
        units: for each under ``own`` and ``control`` the numbers of answers, of ``right`` ones, and of failures.

    Returns:
        ``accuracy``; ``score``, 2 accuracy - 1, 0 by chance; the same of the control; ``beyond``, the mean difference
        of the two scores over units that have both; ``asked``, ``failures``, ``reasons``.
    """
    shares = {
        kind: np.array([_share(unit.get(kind)) for unit in units], dtype=float).reshape(-1)
        for kind in ("own", "control")
    }
    found: dict[str, Any] = {}
    for key, values in (
        ("accuracy", shares["own"]),
        ("score", 2 * shares["own"] - 1),
        ("control_score", 2 * shares["control"] - 1),
        ("beyond", 2 * (shares["own"] - shares["control"])),
    ):
        known = values[np.isfinite(values)]
        found[key] = float(known.mean()) if len(known) else None
        found[f"{key}_se"] = float(known.std(ddof=1) / math.sqrt(len(known))) if len(known) > 1 else None
    asked = [kind for unit in units for kind in unit.values()]
    reasons = sum((Counter(one["reasons"]) for one in asked), Counter[str]())
    found |= {"units": int(np.isfinite(shares["own"]).sum())}
    found |= {"asked": sum(one["answered"] for one in asked) + sum(reasons.values())}
    return found | {"failures": sum(reasons.values()), "reasons": dict(reasons)}


def _share(one: Mapping[str, Any] | None) -> float:
    return one["right"] / one["answered"] if one is not None and one["answered"] else math.nan


def _others(names: Sequence[str], rng: np.random.Generator) -> dict[str, str]:
    """Return another unit for each, drawn; none where there is only one."""
    order = [names[i] for i in rng.permutation(len(names))]
    return dict(zip(order, order[1:] + order[:1], strict=True)) if len(order) > 1 else {}


class _Asking:
    """A judge that is asked; after ``GIVE_UP`` questions running without an answer no more."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.silent = 0

    def all(self, explanations: Sequence[str], pairs: Sequence[Mapping[str, str]], place: int) -> dict[str, Any]:
        """Ask about each explanation and each pair; which text stands first alternates."""
        right = answered = 0
        reasons: Counter[str] = Counter()
        for i, explanation in enumerate(explanations):
            for j, pair in enumerate(pairs):
                first = (place + i + j) % 2 == 0
                a, b = (pair["active"], pair["random"]) if first else (pair["random"], pair["active"])
                said = self._ask(INSTRUCTIONS.format(explanation=explanation.strip(), a=a, b=b))
                if said in ("A", "B"):
                    right, answered = right + ((said == "A") == first), answered + 1
                else:
                    reasons[said] += 1
        return {"right": right, "answered": answered, "reasons": dict(reasons)}

    def _ask(self, prompt: str) -> str:
        """Return A or B, or why there is neither."""
        if self.silent >= GIVE_UP:
            return "not asked"
        try:
            said = self.judge(prompt).strip()
        except NoAnswer as problem:
            self.silent += 1
            return str(problem)
        self.silent = 0
        return said if said in ("A", "B") else "neither A nor B"

"""How well can one cell of texts be told from the others: by what a layer's units do, or by a single token?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from mxd.evaluation.fairness import Cells


def separation(
    strengths: Float[np.ndarray, " texts"], cell_of: Int[np.ndarray, " texts"], cells: Cells
) -> dict[str, Any]:
    """Return how well a number tells texts of the target from others, as areas under ROC curves (0.5 is chance).

    Args:
        strengths: the number, one for each text.
        cell_of: the number of each text's cell.
        cells: what these are.

    Returns:
        ``auc``, against all other texts; ``auc_cells``, against each other cell (``None`` at the target);
        ``auc_least``, the least of these, and ``nearest``, the number of that cell.
    """
    from sklearn.metrics import roc_auc_score

    mine = cell_of == cells.target
    against: list[float | None] = []
    for cell in range(len(cells.texts)):
        some = mine | (cell_of == cell)
        against.append(None if cell == cells.target else float(roc_auc_score(mine[some], strengths[some])))
    least, nearest = min((auc, cell) for cell, auc in enumerate(against) if auc is not None)
    every = float(roc_auc_score(mine, strengths))
    return {"auc": every, "auc_cells": against, "auc_least": least, "nearest": nearest}


def telltale(
    rows: Sequence[Sequence[int]],
    fitting: Sequence[int],
    measuring: Sequence[int],
    cell_of: Int[np.ndarray, " texts"],
    target: int,
    leave_out: Sequence[int] = (),
) -> tuple[int, bool, float]:
    """Return the token whose presence, or absence, tells the target's texts from others best.

    Args:
        rows: all texts, as token ids.
        fitting: texts that choose the token.
        measuring: texts on which it is measured.
        cell_of: the number of each text's cell.
        target: the target cell's number.
        leave_out: tokens that are not considered.

    Returns:
        The token, whether the target's texts have it more often than others, and the area under its ROC curve, which
        has one point: 0.5 plus half the difference of the shares of texts that have it.
    """
    mine = cell_of == target
    present: dict[int, list[int]] = {}
    for n in fitting:
        for token in set(rows[n]) - set(leave_out):
            present.setdefault(token, [0, 0])[int(mine[n])] += 1
    sizes = [max(int((mine[list(fitting)] == side).sum()), 1) for side in (False, True)]
    gaps = {token: inside / sizes[1] - outside / sizes[0] for token, (outside, inside) in present.items()}
    token = max(gaps, key=lambda i: (abs(gaps[i]), -i))
    has = np.array([token in rows[n] for n in measuring])
    inside = mine[list(measuring)]
    gap = float(has[inside].mean() - has[~inside].mean())
    return token, gaps[token] > 0, 0.5 + (gap if gaps[token] > 0 else -gap) / 2

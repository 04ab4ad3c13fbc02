"""Texts in cells, a group's texts of one label: a quarter fits, a quarter chooses, and half is measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from mxd.common.errors import MxdError
from mxd.evaluation.fairness import Cells
from mxd.evaluation.masks import halves
from mxd.model.frozen import FrozenModel
from mxd.questions import RewriteConfig

LEAST = 4
"""Texts that a cell needs: one fits, one chooses, two are measured."""


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
        mine, _ = self._fitting()
        left_out = set(mine[support:]) if support is not None else set()
        return [n for n in self.fitting if n not in left_out]

    def sets(self, draws: int, seed: int) -> dict[str, tuple[list[int], list[int]]]:
        """Return the fitting texts of the ``target``, and as many random others; with each all the rest.

        Args:
            draws: how many times others are drawn; these sets are called ``0``, ``1`` ...
            seed: draws them.
        """
        (mine, others), rng = self._fitting(), np.random.default_rng(seed)
        sets = {"target": mine}
        for draw in range(draws):
            sets[str(draw)] = rng.choice(others, min(len(mine), len(others)), replace=False).tolist()
        return {name: (texts, [n for n in self.fitting if n not in set(texts)]) for name, texts in sets.items()}

    def counted(self, numbers: Sequence[int]) -> list[int]:
        """Return how many of some texts are in each cell."""
        return np.bincount(self.cell_of[numbers], minlength=len(self.cells.texts)).tolist()

    def _fitting(self) -> tuple[list[int], list[int]]:
        """Return the fitting texts of the target, and the others."""
        mine = [n for n in self.fitting if self.cell_of[n] == self.cells.target]
        return mine, [n for n in self.fitting if self.cell_of[n] != self.cells.target]


def split_texts(
    model: FrozenModel,
    texts: Sequence[str],
    labels: Sequence[str],
    groups: Sequence[str],
    how: RewriteConfig,
    context: int,
    bos: bool,
) -> Split:
    """Sort texts into cells, and divide each cell.

    Args:
        model: the frozen base model, for its tokenizer.
        texts: texts of all labels and groups; empty ones are left out.
        labels: the label of each.
        groups: the group of each.
        how: which cell is the target, and how many texts of each are read.
        context: tokens of a text that are read.
        bos: begin each text with BOS where the tokenizer has one.

    Raises:
        MxdError: no such target, a cell with fewer than four texts, a target whose label no other group has, fewer than
            two labels, or no tokenizer.
    """
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

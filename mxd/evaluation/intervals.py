"""Which occurrences of a unit to show: samples from intervals of its activation, drawn in one pass over a text."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from mxd.layers import Code

INTERVALS = 6
"""Intervals between zero and a unit's largest activation (MxD, arXiv 2505.21364, app. E)."""
STEPS = 8
"""Steps per octave of the logarithmic grid of activations on which the ends of intervals lie."""
DEPTH = math.ceil(STEPS * math.log2(INTERVALS)) + 1
"""Steps below that of the largest activation that are kept apart; everything lower is in the lowest interval."""
PATIENCE = 2**17
"""Occurrences that are collected, at least, before they are sorted in."""

_ROW = np.dtype([("unit", "i4"), ("level", "i4"), ("context", "i8"), ("at", "i4"), ("value", "f4"), ("key", "f8")])


class Occurrence(NamedTuple):
    """A token at which a unit is active: the activation, the number of the context, the position in it."""

    value: float
    context: int
    at: int


class Interval(NamedTuple):
    """A range of activations, and occurrences drawn from it, no two in one context; strongest first."""

    low: float
    high: float
    occurrences: list[Occurrence]


class IntervalSamples:
    """For every unit, occurrences drawn evenly from intervals of its activation.

    The intervals are known only at the end, with the largest activation. So each occurrence gets a random key, and in
    each step of a fine grid the ``keep`` contexts with the largest keys are kept. An interval is made of whole steps,
    so the ``keep`` largest keys of the interval are among them: the sample is the one that would have been drawn had
    the intervals been known. Memory depends on the number of units alone: for each, ``DEPTH + 1`` times ``keep`` rows
    of 32 bytes.
    """

    def __init__(self, units: int, keep: int, seed: int = 0) -> None:
        self.keep = keep
        self.rng = np.random.default_rng(seed)
        self.largest = np.zeros(units, np.float32)
        self.top = np.full(units, np.iinfo(np.int32).min // 2)
        self.settled_top = self.top
        self.thresholds = np.empty((0, 0))
        self.kept = np.empty(0, _ROW)
        self.waiting: list[np.ndarray] = []

    def see(self, code: Code, context: Int[np.ndarray, " tokens"], at: Int[np.ndarray, " tokens"]) -> None:
        """Count the code of a batch of tokens.

        Args:
            code: their code.
            context: the number of the context that each token is in.
            at: its position there.
        """
        code = code.cpu()
        values, indices = code.activations.numpy(), code.indices.numpy()
        row, column = np.nonzero(values > 0)
        unit, value = indices[row, column], values[row, column]
        level, key = _level(value), self.rng.random(len(unit))
        np.maximum.at(self.largest, unit, value)
        np.maximum.at(self.top, unit, level)
        hopeful = np.flatnonzero(key > self._threshold(unit, level))  # the others' steps are full
        rows = np.empty(len(hopeful), _ROW)
        for name, values in zip(_ROW.names or (), (unit, level, context[row], at[row], value, key), strict=True):
            rows[name] = values[hopeful]
        self.waiting.append(rows)
        if sum(map(len, self.waiting)) > max(PATIENCE, len(self.kept)):
            self._settle()

    def intervals(self, unit: int) -> list[Interval]:
        """Return a unit's intervals, the strongest first; intervals without an occurrence are left out.

        They are of about equal width, from zero to the largest activation, with ends on the grid.
        """
        self._settle()
        rows = self.kept[self.kept["unit"] == unit]
        if not len(rows):
            return []
        rows = rows[np.argsort(-rows["key"], kind="stable")]
        largest = float(self.largest[unit])
        # equal widths on the scale of activations; each end is then moved to the nearest step of the grid
        ends = [round(STEPS * math.log2(largest * interval / INTERVALS)) for interval in range(1, INTERVALS)]
        values = [0.0, *(2 ** (end / STEPS) for end in ends), largest]
        interval_of = np.searchsorted(ends, rows["level"], side="right")
        intervals = [
            Interval(values[interval], values[interval + 1], _drawn(rows[interval_of == interval], self.keep))
            for interval in reversed(range(INTERVALS))
        ]
        return [interval for interval in intervals if interval.occurrences]

    def _threshold(self, unit: Int[np.ndarray, " n"], level: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return the key that an occurrence must exceed to be kept.

        Levels are compared with the largest activation at the last sorting. A larger one since then only merges steps,
        which raises thresholds, so nothing that must be kept is dropped.
        """
        if not len(self.thresholds):
            return np.full(len(unit), -1.0)
        step = np.maximum(level - self.settled_top[unit] + DEPTH, 0)
        return np.where(step > DEPTH, -1.0, self.thresholds[unit, np.minimum(step, DEPTH)])

    def _settle(self) -> None:
        """Keep, for each unit and step, one occurrence per context, and of these the ones with the largest keys."""
        if not self.waiting:
            return
        rows = np.concatenate([self.kept, *self.waiting])
        step = np.maximum(rows["level"] - self.top[rows["unit"]] + DEPTH, 0)
        cell = rows["unit"] * np.int64(DEPTH + 1) + step
        # In each cell (a unit and a step) the largest key of each context, then the ``keep`` largest of these.
        order = np.lexsort((-rows["key"], rows["context"], cell))
        order = order[_changes(cell[order]) | _changes(rows["context"][order])]
        order = order[np.lexsort((-rows["key"][order], cell[order]))]
        position = np.arange(len(order))
        rank = position - np.maximum.accumulate(np.where(_changes(cell[order]), position, 0))  # within its cell
        last = order[rank == self.keep - 1]
        self.thresholds = np.full((len(self.top), DEPTH + 1), -1.0)
        self.thresholds[rows["unit"][last], step[last]] = rows["key"][last]
        self.settled_top = self.top.copy()
        self.kept, self.waiting = rows[order[rank < self.keep]], []


def _level(value: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return the step of the logarithmic grid that each activation lies in."""
    return np.floor(STEPS * np.log2(value.astype(np.float64))).astype(np.int64)


def _changes(values: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Return True at the first of each run of equal values."""
    return np.concatenate([np.ones(min(len(values), 1), bool), values[1:] != values[:-1]])


def _drawn(rows: np.ndarray, keep: int) -> list[Occurrence]:
    """Return the first row of each context, for the first ``keep`` contexts, as occurrences; strongest first."""
    _, first = np.unique(rows["context"], return_index=True)
    chosen = rows[np.sort(first)[:keep]]
    fields = zip(chosen["value"].tolist(), chosen["context"].tolist(), chosen["at"].tolist(), strict=True)
    return sorted((Occurrence(*row) for row in fields), reverse=True)

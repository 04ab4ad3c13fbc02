"""Which occurrences of a unit to show: samples from intervals of its activation, drawn in one pass over a text."""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from mxd.layers import Code

INTERVALS = 6
"""Intervals of activation value (MxD, arXiv 2505.21364, app. E)."""
STEPS = 8
"""Occurrences are sampled on a logarithmic grid of so many steps an octave, on which the ends of intervals lie."""
DEPTH = math.ceil(STEPS * math.log2(INTERVALS)) + 1
"""Steps from that of the largest activation down to where the lowest interval is certain to hold everything."""
PATIENCE = 2**17
"""Occurrences that wait, at least, before they are sorted in."""

_ROW = np.dtype([("unit", "i4"), ("level", "i4"), ("context", "i8"), ("at", "i4"), ("value", "f4"), ("key", "f8")])


class Occurrence(NamedTuple):
    """A token at which a unit is active: the activation, the number of the context, the place in it."""

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

    Where the intervals lie is known only at the end, when the largest activation is. So each occurrence is given a
    random key, and of each step of a fine grid the ``keep`` contexts with the largest keys are kept. Those with the
    largest keys of any interval made of whole steps are among them: what would be drawn had the intervals been known.
    Memory depends on the number of units only, ``DEPTH + 1`` times ``keep`` rows of 32 bytes for each.
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
        """Count the code of a batch of tokens, given the context each is in and its place there."""
        values, indices = code.activations.cpu().numpy(), code.indices.cpu().numpy()
        row, column = np.nonzero(values > 0)
        unit, value = indices[row, column], values[row, column]
        level, key = _level(value), self.rng.random(len(unit))
        np.maximum.at(self.largest, unit, value)
        np.maximum.at(self.top, unit, level)
        hopeful = np.flatnonzero(key > self._threshold(unit, level))
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
        ends = [round(STEPS * math.log2(largest * interval / INTERVALS)) for interval in range(1, INTERVALS)]
        values = [0.0, *(2 ** (end / STEPS) for end in ends), largest]
        band_of = np.searchsorted(ends, rows["level"], side="right")
        intervals = [
            Interval(values[interval], values[interval + 1], _drawn(rows[band_of == interval], self.keep))
            for interval in reversed(range(INTERVALS))
        ]
        return [interval for interval in intervals if interval.occurrences]

    def _threshold(self, unit: Int[np.ndarray, " n"], level: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """Return the key that an occurrence must exceed to be kept; as the largest activation grows, it only rises."""
        if not len(self.thresholds):
            return np.full(len(unit), -1.0)
        step = np.maximum(level - self.settled_top[unit] + DEPTH, 0)
        return np.where(step > DEPTH, -1.0, self.thresholds[unit, np.minimum(step, DEPTH)])

    def _settle(self) -> None:
        """Keep, of each unit and step, one occurrence a context, and of these the ones with the largest keys."""
        if not self.waiting:
            return
        rows = np.concatenate([self.kept, *self.waiting])
        step = np.maximum(rows["level"] - self.top[rows["unit"]] + DEPTH, 0)
        cell = rows["unit"] * np.int64(DEPTH + 1) + step
        order = np.lexsort((-rows["key"], rows["context"], cell))
        order = order[_changes(cell[order]) | _changes(rows["context"][order])]
        order = order[np.lexsort((-rows["key"][order], cell[order]))]
        place = np.arange(len(order))
        rank = place - np.maximum.accumulate(np.where(_changes(cell[order]), place, 0))
        last = order[rank == self.keep - 1]
        self.thresholds = np.full((len(self.top), DEPTH + 1), -1.0)
        self.thresholds[rows["unit"][last], step[last]] = rows["key"][last]
        self.settled_top = self.top.copy()
        self.kept, self.waiting = rows[order[rank < self.keep]], []


def _level(value: Float[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    return np.floor(STEPS * np.log2(value.astype(np.float64))).astype(np.int64)


def _changes(values: np.ndarray) -> np.ndarray:
    """Return True at the first of each run of equal values."""
    return np.concatenate([np.ones(min(len(values), 1), bool), values[1:] != values[:-1]])


def _drawn(rows: np.ndarray, keep: int) -> list[Occurrence]:
    """Return the first rows of different contexts, as occurrences."""
    _, first = np.unique(rows["context"], return_index=True)
    chosen = rows[np.sort(first)[:keep]]
    found = zip(chosen["value"].tolist(), chosen["context"].tolist(), chosen["at"].tolist(), strict=True)
    return sorted((Occurrence(*row) for row in found), reverse=True)

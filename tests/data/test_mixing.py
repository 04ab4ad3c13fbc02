"""Which rows a batch takes of a cache that is read in another order; what they hold is tested in test_cache.py."""

from itertools import islice

import numpy as np
import pytest

from mxd.data.activations import Cursor
from mxd.data.mixing import mixed_runs


def test_the_example_of_the_docstring():
    takes = list(islice(mixed_runs(np.array([6, 3, 6, 3]), 4, 2, 0, Cursor()), 8))
    assert [(take.group, take.runs, take.end) for take in takes] == [
        (0, ((2, 0, 2), (0, 1, 3)), Cursor(0, 0, 1)),
        (0, ((2, 2, 4), (0, 3, 5)), Cursor(0, 0, 2)),
        (0, ((2, 4, 6), (0, 5, 6), (0, 0, 1)), Cursor(1)),
        (1, ((1, 0, 2), (3, 0, 2)), Cursor(1, 0, 1)),
        (1, ((1, 2, 3), (3, 2, 3)), None),
        (2, ((3, 0, 1), (0, 3, 4)), Cursor(2, 2, 0)),
        (2, ((3, 1, 2), (0, 4, 6), (0, 0, 1)), Cursor(2, 2, 1)),
        (2, ((3, 2, 3), (0, 1, 3)), None),
    ]


@pytest.mark.parametrize(("batch_tokens", "at_once"), [(1, 3), (7, 1), (10, 2), (64, 9), (111, 1)])
def test_every_token_once_in_each_epoch_and_on_from_any_place(batch_tokens, at_once):
    """Also where a batch is larger than a group, and goes on in several."""
    lengths = np.array([9, 50, 1, 30, 12, 10])
    takes = list(islice(mixed_runs(lengths, batch_tokens, at_once, 5, Cursor()), 300))
    groups = -(-len(lengths) // at_once)
    for epoch in range(takes[-1].group // groups):
        runs = [run for take in takes if take.group // groups == epoch for run in take.runs]
        rows = [(shard, row) for shard, low, high in runs for row in range(low, high)]
        assert len(rows) == len(set(rows)) == 112
    tokens = 0
    for take in takes:
        tokens += sum(high - low for _, low, high in take.runs)
        assert (take.end is None) == (tokens < batch_tokens)
        tokens %= batch_tokens
    for n, take in enumerate(takes[:100]):
        if take.end is not None:
            assert list(islice(mixed_runs(lengths, batch_tokens, at_once, 5, take.end), 9)) == takes[n + 1 : n + 10]


def test_a_batch_takes_equal_runs_of_each_shard_at_hand():
    lengths = np.full(12, 1000)
    members = []
    for take in islice(mixed_runs(lengths, 64, 4, 0, Cursor()), 3 * 63):
        taken = {m: sum(high - low for shard, low, high in take.runs if shard == m) for m in take.members}
        assert len(taken) == 4 and max(taken.values()) - min(taken.values()) <= 1
        assert sum(taken.values()) == 64 or take.end is None or take.end.batch == 0  # what a border cuts in two
        assert len(take.runs) <= 5  # one run of each; at most one goes on at its shard's beginning
        members += [take.members] if take.members not in members else []
    assert sorted(m for group in members for m in group) == list(range(12))


def test_shards_of_unequal_length_run_out_together():
    lengths = np.array([100, 1000, 10, 500])
    left = lengths.copy()
    for take in islice(mixed_runs(lengths, 100, 4, 0, Cursor()), 16):
        for shard_, low, high in take.runs:
            left[shard_] -= high - low
        assert (abs(left / left.sum() - lengths / 1610) < 0.05).all() or left.sum() < 100

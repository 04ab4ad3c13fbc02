"""Points of score and activation: drawn evenly from both parts, bounded, the same as what was seen."""

import numpy as np
import torch

from mxd.evaluation.scatter import POINTS, Scatter, numbered
from mxd.layers import Code


def seen(tokens, rng):
    """A code of two of five units at each token, and scores."""
    indices = np.stack([rng.permutation(5)[:2] for _ in range(tokens)])
    activations = np.where(rng.random((tokens, 2)) < 0.3, rng.random((tokens, 2)), 0)
    return Code(torch.from_numpy(activations), torch.from_numpy(indices)), rng.random(tokens)


def test_points_are_scores_and_activations_of_tokens_that_were_seen():
    rng = np.random.default_rng(0)
    scatter, known = Scatter([3, 1], seed=0), {3: [], 1: []}
    for _ in range(3):
        code, scores = seen(10, rng)
        scatter.see(code, scores)
        for unit, pairs in known.items():
            values = (code.activations * (code.indices == unit)).sum(-1).numpy()
            pairs += [(float(f"{s:.5g}"), float(f"{v:.5g}")) for s, v in zip(scores, values, strict=True)]
    for unit, pairs in known.items():
        got = scatter.report(unit)
        assert sorted(map(tuple, got["points"])) == sorted(pairs) and got["tokens"] == 30
        assert got["active"] == sum(value > 0 for _, value in pairs) > 0


def seen_with(seed):
    """The scores that are kept of the same tokens."""
    scatter = Scatter([0], seed)
    scatter.see(*seen(2000, np.random.default_rng(2)))
    return np.array(scatter.report(0)["points"])[:, 0]


def test_many_tokens_leave_an_even_draw_of_each_part():
    rng, drawn = np.random.default_rng(1), []
    for seed in range(20):
        scatter = Scatter([0], seed)
        for n in range(10):
            code, scores = seen(200, rng)
            scatter.see(code, scores + n)
        points = np.array(scatter.report(0)["points"])
        assert len(points) == 2 * POINTS and (points[:, 1] > 0).sum() == POINTS
        drawn.append(points[:, 0])
    counts = np.bincount(np.concatenate(drawn).astype(int), minlength=10)
    assert not np.array_equal(*(seen_with(seed) for seed in (0, 1))) and np.array_equal(seen_with(0), seen_with(0))
    assert abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean()), "early and late batches alike"


def test_units_are_grouped_by_block():
    leading = [{"block": 2, "unit": 5}, {"block": 1, "unit": 5}, {"block": 2, "unit": 0}]
    assert numbered(leading) == {2: [5, 0], 1: [5]}

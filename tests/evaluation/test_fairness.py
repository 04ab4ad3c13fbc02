"""Fairness metrics by hand, against the table of the muMoE paper, and against loops over texts."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from mxd.evaluation.fairness import (
    Cells,
    cell_accuracies,
    compared,
    equality_of_opportunity,
    max_min,
    metrics,
    overall,
    resampled,
    rewrite_score,
    std_bias,
)
from mxd.evaluation.separation import separation, telltale

# blond or not, female or male, as in CelebA; the target is blond males
HAIR = Cells(["blond", "blond", "dark", "dark"], ["female", "male", "female", "male"], np.array([20, 2, 40, 38]), 1)


def test_a_table_by_hand():
    before, after = np.array([0.9, 0.5, 0.8, 1.0]), np.array([0.95, 1.0, 0.7, 1.0])
    assert equality_of_opportunity(before, HAIR) == pytest.approx(0.4)
    assert std_bias(before) == pytest.approx(np.sqrt((0.1**2 + 0.3**2 + 0 + 0.2**2) / 4))
    assert max_min(before) == 0.5 and max_min(after) == 0.7
    assert overall(before, HAIR) == pytest.approx((18 + 1 + 32 + 38) / 100)
    assert rewrite_score(before, after, 1) == pytest.approx(0.5 - (0.05 + 0.1 + 0.0))
    assert rewrite_score(before, before, 1) == 0
    assert rewrite_score(after, before, 1) == pytest.approx(-0.5 - 0.15), "the target's loss counts once, as a loss"


def test_the_best_score_moves_the_target_alone():
    before = np.array([0.9, 0.25, 0.8, 1.0])
    best = np.array([0.9, 1.0, 0.8, 1.0])
    assert rewrite_score(before, best, 1) == 0.75 == 1 - before[1]


def test_what_the_paper_prints_of_blond_males():
    """Table 2: target .409, equality of opportunity .476, STD bias .236, max-min .409, overall 95.893.

    Blond females follow from the second; with dark-haired cells about 0.98 the spread over the four cells is the third.
    """
    cells = np.array([0.409 + 0.476, 0.409, 0.975, 0.985])
    assert equality_of_opportunity(cells, HAIR) == pytest.approx(0.476)
    assert std_bias(cells) == pytest.approx(0.236, abs=2e-3) and max_min(cells) == 0.409


def test_other_groups_of_the_label_count_by_their_texts():
    cells = Cells(["a", "a", "a", "b"], ["x", "y", "z", "x"], np.array([4, 30, 10, 7]), 0)
    accuracies = np.array([0.25, 0.8, 0.4, 0.0])
    assert equality_of_opportunity(accuracies, cells) == pytest.approx((0.8 * 30 + 0.4 * 10) / 40 - 0.25)
    assert cells.same_label.tolist() == [False, True, True, False] and cells.names[1] == "a, y"


def texts(rng, ways=3):
    cell_of = rng.permutation(np.repeat(np.arange(4), HAIR.texts))
    return rng.random((ways, len(cell_of))) < 0.7, cell_of


def test_accuracies_by_cell_and_stacks_of_them():
    right, cell_of = texts(np.random.default_rng(0))
    found = cell_accuracies(right, cell_of, 4)
    for way in range(3):
        for cell in range(4):
            mine = [bool(r) for r, c in zip(right[way], cell_of, strict=True) if c == cell]
            assert found[way, cell] == pytest.approx(sum(mine) / len(mine))
    stacked = metrics(found[:1], found, HAIR)
    for way in range(3):
        single = metrics(found[0], found[way], HAIR)
        assert all(stacked[key][way] == pytest.approx(float(value)) for key, value in single.items())
    assert stacked["accuracy"] == pytest.approx(right.mean(1))


def test_standard_errors_are_those_of_binomials_and_differences_are_paired():
    rng = np.random.default_rng(1)
    right, cell_of = texts(rng, 2)
    samples = resampled(right, cell_of, 4, seed=0, draws=4000)
    p = cell_accuracies(right, cell_of, 4)
    assert samples.mean(1) == pytest.approx(p, abs=0.02)
    assert samples.std(1) == pytest.approx(np.sqrt(p * (1 - p) / HAIR.texts), abs=0.02)
    same = np.stack([right[0], right[0]])
    pairs = resampled(same, cell_of, 4, seed=0)
    assert (pairs[0] == pairs[1]).all(), "all ways are measured on the same texts"


def test_ways_are_means_over_their_rows_and_gains_their_differences():
    right, cell_of = texts(np.random.default_rng(2), 4)
    ways = {"plain": [0], "one": [1], "two": [2, 3]}
    found = compared(right, ways, cell_of, HAIR, {"gain": ("one", "two"), "none": ("one", "one")}, 0)
    cells = cell_accuracies(right, cell_of, 4)
    scores = [float(rewrite_score(cells[0], cells[i], 1)) for i in range(4)]
    assert found["ways"]["two"]["rewrite_score"] == pytest.approx((scores[2] + scores[3]) / 2)
    assert found["ways"]["two"]["cells"] == pytest.approx(cells[2:].mean(0))
    assert found["gain"] == pytest.approx(scores[1] - (scores[2] + scores[3]) / 2) and found["gain_se"] > 0
    assert found["none"] == 0 == found["none_se"]
    assert found["ways"]["plain"]["rewrite_score"] == 0 == found["ways"]["plain"]["rewrite_score_se"]
    samples = resampled(right, cell_of, 4, 0)
    drawn = rewrite_score(samples[0], samples[1], 1)
    assert found["ways"]["one"]["rewrite_score_se"] == pytest.approx(drawn.std(ddof=1))


def test_separation_against_pairs_of_texts():
    rng = np.random.default_rng(3)
    _, cell_of = texts(rng)
    values = rng.integers(0, 5, len(cell_of)).astype(float) + (cell_of == 1)
    found = separation(values, cell_of, HAIR)

    def auc(others):
        pairs = [(a, b) for a in values[cell_of == 1] for b in values[others]]
        return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)

    assert found["auc"] == pytest.approx(auc(cell_of != 1))
    assert found["auc_cells"][1] is None
    against = {cell: auc(cell_of == cell) for cell in (0, 2, 3)}
    assert {cell: found["auc_cells"][cell] for cell in against} == pytest.approx(against)
    assert found["auc_least"] == pytest.approx(min(against.values()))
    assert against[found["nearest"]] == pytest.approx(min(against.values()))


@pytest.mark.parametrize("present", [True, False])
def test_the_telltale_token(present):
    """Token 7 is in 9 of 10 texts of the target and 2 of 10 others, or the other way round; 8 is in all."""
    cell_of = np.array([1] * 10 + [0] * 10)
    has = [n < 9 if n < 10 else n < 12 for n in range(20)]
    rows = [[8, n + 100, *([7] if on == present else [])] for n, on in enumerate(has)]
    token, more, auc = telltale(rows, range(20), range(20), cell_of, 1, [8])
    assert (token, more) == (7, present)
    numbers = [(7 in row) == present for row in rows]
    assert auc == pytest.approx(roc_auc_score(cell_of, numbers)) == pytest.approx(0.5 + (0.9 - 0.2) / 2)
    # measured on texts that did not choose it, where it says nothing
    nothing = [*rows, *[[7], [9]] * 4]
    labels = np.append(cell_of, [1, 1, 0, 0] * 2)
    assert telltale(nothing, range(20), range(20, 28), labels, 1, [8])[2] == 0.5

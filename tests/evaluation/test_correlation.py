"""Correlations with a score against NumPy token by token, and what chance makes of them."""

import numpy as np
import pytest
import torch

from mxd.evaluation import correlation
from mxd.evaluation.correlation import PERMUTATIONS, Correlation
from mxd.layers import Code

UNITS = 12


def drawn(seed, texts=40, units=UNITS, rare=False):
    """Activations of texts of unequal length, nearly all of them zero; with ``rare``, in two texts a unit at most."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(texts):
        values = np.maximum(rng.normal(size=(rng.integers(3, 30), units)) - 1, 0) * rng.lognormal(size=units)
        found.append(values * (rng.random(units) < (1.5 / texts if rare else 0.5)))
    return found


def counted(activations, scores, batch=7):
    """Feed texts to a ``Correlation``, some at a time, as sparse codes."""
    units = activations[0].shape[1]
    found = Correlation(units)
    for start in range(0, len(activations), batch):
        some = activations[start : start + batch]
        values = torch.from_numpy(np.concatenate(some))
        order = torch.argsort(values, 1, descending=True)
        row = torch.repeat_interleave(torch.arange(len(some)), torch.tensor([len(each) for each in some]))
        of_tokens = torch.from_numpy(np.concatenate(expanded(some, scores[start : start + batch])))
        found.see(Code(values.gather(1, order), order), row, of_tokens, len(some))
    return found


def expanded(activations, scores):
    """A score for each token."""
    return [np.broadcast_to(np.asarray(s, float), len(c)) for c, s in zip(activations, scores, strict=True)]


def pearson(rows, score):
    """NumPy's, of each column with the score; 0 for one that never changes."""
    return np.array([np.corrcoef(c, score)[0, 1] if np.ptp(c) > 1e-12 else 0.0 for c in rows.T])


@pytest.mark.parametrize("own", [False, True], ids=["of the text", "of the token"])
def test_correlations_over_tokens_and_over_texts_agree_with_numpy(own):
    activations, rng = drawn(0), np.random.default_rng(1)
    activations = [np.concatenate([c, np.zeros((len(c), 1)), np.full((len(c), 1), 0.7)], 1) for c in activations]
    scores = [rng.exponential(size=len(c)) if own else rng.exponential() for c in activations]
    found = counted(activations, scores).report()
    every = np.concatenate(activations), np.concatenate(expanded(activations, scores))
    np.testing.assert_allclose(found.over_tokens, pearson(*every), atol=1e-9)
    per_text = np.array([c.mean(0) for c in activations]), np.array([np.mean(s) for s in scores])
    np.testing.assert_allclose(found.over_texts, pearson(*per_text), atol=1e-9)
    assert found.over_tokens.abs().max() > 0.05 and found.over_tokens[UNITS:].tolist() == [0, 0]


@pytest.mark.long
def test_beyond_chance_is_a_permutation_test_written_out_over_tokens(monkeypatch):
    activations, scores = drawn(2, texts=80), np.random.default_rng(8).random(80).tolist()
    for c, score in zip(activations, scores, strict=True):
        c[:, 3], c[:, 5] = np.arange(len(c)) % 2 * score, (np.arange(len(c)) % 9 == 0) * score
        c[:, 7] = len(c) % 5  # the same at all tokens of a text, so that chance makes more of it than of the others
    rng = np.random.default_rng(9)
    every, seen = np.concatenate(activations), []
    for order in [np.arange(len(scores)), *(rng.permutation(len(scores)) for _ in range(PERMUTATIONS))]:
        seen.append(pearson(every, np.concatenate(expanded(activations, np.array(scores)[order]))))
    activation = np.array(seen) / np.sqrt(np.square(seen).mean(0))
    expected = activation[0] > activation[1:].max()
    assert expected[5] and np.array(seen)[1:].max() > seen[0][5], "each in units of its own spread"
    assert 0 < expected.sum() < UNITS
    assert counted(activations, scores).report(9).beyond_chance.tolist() == expected.tolist()
    monkeypatch.setattr(correlation, "NUMBERS", 5 * PERMUTATIONS)  # a few units at a time, to the same effect
    assert counted(activations, scores, batch=1).report(9).beyond_chance.tolist() == expected.tolist()


@pytest.mark.parametrize("own", [False, True], ids=["of the text", "of the token"])
@pytest.mark.parametrize("rare", [False, True], ids=["common", "rare"])
def test_scores_that_say_nothing_find_no_unit(rare, own):
    """Though many units reach a correlation of 0.1; skewed scores and units that fire in a text or two are worst."""
    reached = 0
    for seed in range(8):
        rng = np.random.default_rng(100 + seed)
        activations = drawn(seed, texts=30, units=300, rare=rare)
        scores = [rng.pareto(1.5, len(c)) if own else rng.pareto(1.5) for c in activations]
        found = counted(activations, scores).report(seed)
        reached += int((found.over_tokens >= 0.1).sum())
        assert not found.beyond_chance.any(), seed
    assert reached > 40


def test_a_unit_that_follows_the_score_is_found_among_many_that_do_not():
    rng = np.random.default_rng(3)
    activations, scores = drawn(4, texts=150, units=200), rng.exponential(size=150)
    for c, score in zip(activations, scores, strict=True):
        c[:, 17] = (rng.random(len(c)) < 0.4) * score  # at some tokens, as strong as the score of the text
    assert counted(activations, scores).report().beyond_chance.nonzero().tolist() == [[17]]
    within = [rng.exponential(size=len(c)) for c in activations]  # and one that follows tokens' own scores
    for c, score in zip(activations, within, strict=True):
        c[:, 17], c[:, 23] = 0, np.maximum(score - 1, 0) * (rng.random(len(c)) < 0.5)
    assert counted(activations, within).report().beyond_chance.nonzero().tolist() == [[23]]


def test_a_unit_of_one_text_is_never_beyond_chance():
    """Also where that has by far the highest score, which Fisher's z would take for proof."""
    activations, scores = drawn(5), [0.0] * 40
    for n, c in enumerate(activations):
        c[:, 0] = n == 11
    scores[11] = 1.0
    found = counted(activations, scores).report()
    assert found.over_tokens[0] == pytest.approx(1) and found.over_texts[0] == pytest.approx(1)
    assert not found.beyond_chance.any()


def test_what_is_kept_does_not_grow_with_the_tokens():
    activations, scores = drawn(6), list(range(40))
    short, long = counted(activations, scores), counted([np.tile(c, (9, 1)) for c in activations], scores)
    sizes = [
        [sum(len(value) for *_, value in entries) for entries in (one.sums, one.products)] for one in (short, long)
    ]
    assert sizes[0] == sizes[1] and sizes[0][0] <= 40 * UNITS and sizes[0][1] == 0
    np.testing.assert_allclose(short.report().over_tokens, long.report().over_tokens)

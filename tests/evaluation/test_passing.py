"""pass@k, against all draws of k samples and against the binomial coefficients."""

from itertools import combinations
from math import comb

import pytest

from mxd.common.errors import MxdError
from mxd.evaluation.passing import pass_at_k


@pytest.mark.parametrize("n", [1, 4, 6])
def test_it_is_the_share_of_draws_with_a_correct_sample(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_many_samples_neither_overflow_nor_lose_digits():
    assert pass_at_k(200, 17, 100) == pytest.approx(1 - comb(183, 100) / comb(200, 100), rel=1e-12)
    assert pass_at_k(2000, 3, 1000) == pytest.approx(float(1 - comb(1997, 1000) * 10**30 // comb(2000, 1000) / 10**30))
    assert (pass_at_k(200, 0, 100), pass_at_k(200, 101, 100), pass_at_k(10, 3, 1)) == (0, 1, pytest.approx(0.3))


@pytest.mark.parametrize("wrong", [(5, 6, 1), (5, -1, 1), (5, 2, 0), (5, 2, 6)])
def test_numbers_that_make_no_sense_are_refused(wrong):
    with pytest.raises(MxdError, match=rf"of {wrong[0]} samples {wrong[1]} are correct and {wrong[2]} are drawn"):
        pass_at_k(*wrong)

"""Sparse mixtures of low-rank maps and linear maps at some units against their dense reference, and the edges."""

from itertools import accumulate

import pytest
import torch

from mxd.ops import Selection, linear_at, low_rank_mixture, reference

RANKS = {"rank 1": [1] * 9, "one rank": [3] * 5, "a ladder": [4, 2, 2, 1, 1, 1, 1], "one unit": [2]}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def inputs(ranks, tokens=7, k=3, d_in=4, d_out=5):
    """x, values, indices, down, up and firsts; no unit is listed twice for a token."""
    firsts = [0, *accumulate(ranks)]
    k = min(k, len(ranks))
    indices = torch.rand(tokens, len(ranks)).argsort(1)[:, :k]
    shapes = (tokens, d_in), (tokens, k), (firsts[-1], d_in), (firsts[-1], d_out)
    x, values, down, up = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return x, values, indices, down, up, firsts


def differentiated(function, arguments):
    """Output, and the gradient of each argument that has one, for a fixed upstream gradient."""
    out = function(*arguments)
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.is_floating_point()]
    upstream = torch.arange(1.0, out.numel() + 1, dtype=torch.float64).view_as(out)
    return [out, *torch.autograd.grad((out * upstream).sum(), leaves)]


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_it_is_the_reference_with_all_its_gradients(ranks):
    arguments = inputs(ranks)
    pair = (differentiated(f, arguments) for f in (low_rank_mixture, reference.low_rank_mixture))
    for got, expected in zip(*pair, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_the_reference_is_the_sum_over_units(ranks):
    x, values, indices, down, up, firsts = inputs(ranks)
    expected = torch.zeros(len(x), up.shape[1], dtype=torch.float64)
    for t in range(len(x)):
        for value, n in zip(values[t], indices[t].tolist(), strict=True):
            own = slice(firsts[n], firsts[n + 1])
            expected[t] += value * (x[t] @ (down[own].T @ up[own]))
    torch.testing.assert_close(reference.low_rank_mixture(x, values, indices, down, up, firsts), expected)


@pytest.mark.parametrize("ranks", [[1] * 9, [3] * 5])
def test_no_tokens_add_nothing(ranks):
    arguments = inputs(ranks, tokens=0)
    out, *grads = differentiated(low_rank_mixture, arguments)
    assert out.shape == (0, 5)
    assert not any(grad.any() for grad in grads)


def test_inputs_that_need_no_gradient_get_none():
    x, *rest = inputs(RANKS["a ladder"])
    low_rank_mixture(x.detach(), *rest).sum().backward()
    assert x.grad is None
    assert all(weight.grad.any() for weight in (rest[0], rest[2], rest[3]))


def test_linear_at_is_the_dense_map_at_some_units():
    x, _, indices, weight, *_ = inputs([1] * 9)
    pair = (differentiated(f, (x, indices, weight)) for f in (linear_at, reference.linear_at))
    for got, expected in zip(*pair, strict=True):
        torch.testing.assert_close(got, expected)


def test_the_groups_of_a_selection_list_every_entry_once():
    indices = torch.rand(7, 9).argsort(1)[:, :3]
    indices[indices == 4] = 8  # a unit that no token uses; some tokens now list unit 8 twice, which does not matter
    found = list(Selection().groups(indices, 9))
    assert [unit for unit, *_ in found] == sorted(set(indices.flatten().tolist()))
    for unit, places, tokens in found:
        assert places.tolist() == (indices.flatten() == unit).nonzero().flatten().tolist()
        assert tokens.tolist() == [place // 3 for place in places.tolist()]

"""The nested sparse decode against one dense decode for each level."""

import pytest
import torch

from mxd.ops import Selection, nested_decode, reference


def inputs(tokens=7, k=4, units=11, d_out=5, count=3):
    torch.manual_seed(0)
    indices = torch.randint(units, (tokens, k))
    values = torch.randn(tokens, k, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(units, d_out, dtype=torch.float64, requires_grad=True)
    return values, indices, torch.randint(count, (tokens, k)), weight, count


@pytest.mark.parametrize("count", [1, 3, 6])
def test_it_is_a_decode_for_each_level(count):
    """Levels of any entries, also some that no entry has, with one upstream gradient for each."""
    values, _, _, weight, _ = arguments = inputs(count=count)
    outs = [f(*arguments) for f in (nested_decode, reference.nested_decode)]
    assert outs[0].shape == (7, count, 5)
    upstream = torch.randn_like(outs[0])
    pair = ([out, *torch.autograd.grad((out * upstream).sum(), (values, weight))] for out in outs)
    for got, expected in zip(*pair, strict=True):
        torch.testing.assert_close(got, expected)


def test_the_levels_add_up_to_the_sparse_decode():
    values, indices, levels, weight, count = inputs()
    whole = reference.sparse_decode(values, indices, weight)
    torch.testing.assert_close(nested_decode(values, indices, levels, weight, count, Selection()).sum(1), whole)


@pytest.mark.parametrize(("tokens", "k"), [(0, 4), (3, 0)])
def test_no_entries_add_nothing(tokens, k):
    values, indices, levels, weight, count = inputs(tokens=tokens, k=k)
    out = nested_decode(values, indices, levels, weight, count)
    assert out.shape == (tokens, count, 5) and not out.any()
    out.sum().backward()
    assert not weight.grad.any()

"""GroupMax, softmax and entmax."""

import pytest
import torch
from torch import nn

from mxd.layers import parse_layer
from mxd.layers.gates import LinearGate
from mxd.layers.sizing import size, transcoder_params
from mxd.layers.sparsity import EntmaxConfig, GroupMaxConfig, SoftmaxConfig
from mxd.layers.sparsity.simplex import entmax15

UNITS = 12


@pytest.fixture
def x():
    return torch.randn(30, 6, dtype=torch.float64)


@pytest.fixture
def gate():
    return LinearGate(
        nn.Parameter(torch.randn(UNITS, 6, dtype=torch.float64)), nn.Parameter(torch.randn(UNITS, dtype=torch.float64))
    )


# --- GroupMax -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2**26])
def test_group_max_keeps_the_largest_of_each_group(x, gate, limit, monkeypatch):
    monkeypatch.setattr("mxd.layers.sparsity.group_max.AT_ONCE", limit)
    code, scores = GroupMaxConfig(k=4).build(UNITS)(x, gate), gate.scores(x).squeeze(1)
    expected = scores.view(30, 4, 3).amax(-1).relu()
    torch.testing.assert_close(code.activations, expected)
    assert code.indices.shape == (30, 4) and (code.indices // 3 == torch.arange(4)).all()
    torch.testing.assert_close(scores.gather(1, code.indices).relu(), expected)
    upstream = torch.randn_like(expected)
    grads = [torch.autograd.grad((v * upstream).sum(), [gate.weight, gate.bias]) for v in (code.activations, expected)]
    torch.testing.assert_close(*grads)


def test_units_are_a_multiple_of_the_groups(mlp):
    fields = {"method": "transcoder", "sparsity": {"kind": "group_max", "k": 7}}
    config = parse_layer(fields).resolve(mlp)
    for match in ("exact", "paper"):
        assert size(config, 16, match).num_units % 7 == 0
    budget = transcoder_params(6, 5, 96)
    params = {n: config.model_copy(update={"num_units": n}).num_params for n in range(7, 200, 7)}
    assert size(config, 16).num_params == min(params.values(), key=lambda count: abs(count - budget))
    with pytest.raises(Exception, match=r"k = 7 equal groups, and num_units = 20 is no multiple of it; set .* to 21"):
        parse_layer(fields | {"num_units": 20})


# --- the simplex --------------------------------------------------------------------------------------------------


def by_bisection(row):
    """``max(s / 2 - tau, 0)^2`` with tau such that it sums to 1, found by halving an interval."""
    low, high = row.max() / 2 - 1, row.max() / 2
    for _ in range(100):
        tau = (low + high) / 2
        low, high = (tau, high) if (row / 2 - tau).clamp_min(0).square().sum() > 1 else (low, tau)
    return (row / 2 - tau).clamp_min(0).square()


@pytest.mark.parametrize("limit", [1, 350, 2**18])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_entmax_is_the_projection_with_exact_zeros(scale, limit, monkeypatch):
    monkeypatch.setattr("mxd.layers.sparsity.simplex.AT_ONCE", limit)
    scores = scale * torch.randn(20, 50, dtype=torch.float64)
    shares = entmax15(scores)
    torch.testing.assert_close(shares, torch.stack([by_bisection(row) for row in scores]), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(shares.sum(1), torch.ones(20).double())
    torch.testing.assert_close(entmax15(scores + 5), shares)
    assert ((shares == 0).sum() > 300) == (scale >= 1)
    torch.testing.assert_close(entmax15(torch.zeros(2, 50)), torch.full((2, 50), 0.02))


@pytest.mark.parametrize("limit", [1, 2**18])
def test_entmax_has_the_gradient_of_finite_differences(limit, monkeypatch):
    monkeypatch.setattr("mxd.layers.sparsity.simplex.AT_ONCE", limit)
    scores = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(entmax15, scores)


@pytest.mark.parametrize("kind", [SoftmaxConfig, EntmaxConfig])
def test_norms(kind, x, gate):
    """Per token over units, per unit over tokens, or none; the code lists all units."""
    shares = entmax15 if kind is EntmaxConfig else lambda scores: scores.softmax(-1)
    scores = gate.scores(x).squeeze(1)
    by_dim = {
        name: (scores - scores.mean(d, True)) / (scores.var(d, unbiased=False, keepdim=True) + 1e-5).sqrt()
        for name, d in {"layer": 1, "batch": 0}.items()
    }
    for norm, expected in {**by_dim, "none": scores}.items():
        code = kind(norm=norm).build(UNITS).double().train()(x, gate)
        torch.testing.assert_close(code.activations, shares(expected))
        assert (code.all_units and not torch.allclose(shares(expected), shares(scores))) or norm == "none"


def test_batch_moments_are_those_of_a_whole_step_and_evaluation_uses_running_ones(x, gate):
    one, parted = (SoftmaxConfig(norm="batch").build(UNITS).double().train() for _ in range(2))
    whole = one(x, gate).activations
    parted.begin_step(x.chunk(3), gate)
    torch.testing.assert_close(torch.cat([parted(part, gate).activations for part in x.chunk(3)]), whole)
    parted.end_step()
    torch.testing.assert_close(parted.state_dict(), one.state_dict())
    scores = gate.scores(x).squeeze(1)
    torch.testing.assert_close(one.mean, 0.1 * scores.mean(0))
    torch.testing.assert_close(one.variance, 0.9 + 0.1 * scores.var(0, unbiased=False))
    before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    expected = ((scores - one.mean) / (one.variance + 1e-5).sqrt()).softmax(-1)
    torch.testing.assert_close(one.eval()(x, gate).activations, expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())

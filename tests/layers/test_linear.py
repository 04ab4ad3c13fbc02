"""Linear maps as layers: their closed-form starts against NumPy, and the one unit that is always on."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from mxd.common.errors import MxdError
from mxd.layers import Code, Covariance, parse_layer, size
from mxd.layers.gates import ConstantGate
from mxd.layers.linear import LinearConfig, LowRankConfig
from mxd.ops import Selection

D, OUT, TOKENS = 6, 5, 200


@pytest.fixture
def data():
    """Inputs of unequal scales, off their mean, and outputs that are not linear in them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(TOKENS, D)) @ rng.normal(size=(D, D)) * [9, 1, 1, 1, 0.1, 3] + rng.normal(size=D)
    return x, np.tanh(x @ rng.normal(size=(D, OUT))) + 0.3 * x @ rng.normal(size=(D, OUT)) + 2


def started(config, x, y, dtype=torch.float64, start="paper"):
    layer = config.build().to(dtype)
    mean_x, mean_y = x.mean(0), y.mean(0)
    u, v = x - mean_x, y - mean_y
    moments = (torch.from_numpy(a.T @ b / len(x)) for a, b in ((u, u), (u, v), (v, v)))
    means = [torch.from_numpy(mean).to(dtype) for mean in (mean_x, mean_y)]
    layer.initialise(*means, start, Covariance(*moments))
    return layer


def low_rank(rank):
    return LowRankConfig(d_in=D, d_out=OUT, num_units=1, rank=rank)


def error(fit, y):
    return np.square(fit - y).sum()


def affine(x, y):
    """The least-squares solution with a column of ones: the map and its constant."""
    return np.linalg.lstsq(np.c_[x, np.ones(len(x))], y, rcond=None)[0]


@pytest.mark.parametrize("start", ["paper", "centred"])
def test_a_linear_layer_starts_at_the_least_squares_fit(data, start):
    x, y = data
    layer, solution = started(LinearConfig(d_in=D, d_out=OUT), x, y, start=start), affine(x, y)
    np.testing.assert_allclose(layer.weight.detach(), solution[:-1], atol=1e-4)
    np.testing.assert_allclose(layer.bias.detach(), solution[-1], atol=1e-4)
    with torch.no_grad():
        np.testing.assert_allclose(layer(torch.from_numpy(x)), np.c_[x, np.ones(TOKENS)] @ solution, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 4, 5])
def test_a_low_rank_layer_starts_at_the_best_fit_of_its_rank(data, rank):
    """Reduced-rank regression: the SVD of the centred fitted values, cut after ``rank`` (Eckart-Young)."""
    x, y = data
    layer = started(low_rank(rank), x, y)
    fitted = np.c_[x, np.ones(TOKENS)] @ affine(x, y) - y.mean(0)
    u, s, v = np.linalg.svd(fitted, full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ v[:rank] + y.mean(0)
    with torch.no_grad():
        out = layer(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(out, best, atol=1e-4)
    assert np.linalg.matrix_rank(layer.unit_weight(0).detach().numpy()) == rank
    # better than cutting the map's own SVD, which does not know how the inputs vary
    u, s, v = np.linalg.svd(affine(x, y)[:-1])
    cut = (x - x.mean(0)) @ ((u[:, :rank] * s[:rank]) @ v[:rank]) + y.mean(0)
    assert error(out, y) < 0.99 * error(cut, y) or rank == OUT


def test_full_rank_is_the_linear_layer_and_more_is_not_more(data):
    """Where R exceeds both widths' smaller, the rest of B stays zero."""
    x, y = data
    rows = torch.from_numpy(x)
    full, more = started(low_rank(OUT), x, y), started(low_rank(9), x, y)
    expected = started(LinearConfig(d_in=D, d_out=OUT), x, y)(rows)
    torch.testing.assert_close(full(rows), expected)
    torch.testing.assert_close(more(rows), expected)
    assert not more.output_factor[OUT:].any()


def test_inputs_that_do_not_span_their_space_have_a_fit_all_the_same(data):
    """After a layer norm inputs lie in a plane; a window of few tokens spans less still. The map is zero across it."""
    x, y = data
    flat = x - x.mean(1, keepdims=True)
    for rows in (slice(None), slice(3)):
        layer = started(LinearConfig(d_in=D, d_out=OUT), flat[rows], y[rows])
        solution = affine(flat[rows], y[rows])
        with torch.no_grad():
            got = layer(torch.from_numpy(flat[rows]))
        np.testing.assert_allclose(got, np.c_[flat[rows], np.ones(len(got))] @ solution, atol=1e-3)
        assert layer.weight.sum(0).abs().max() < 1e-6


def test_inputs_that_never_vary_leave_the_mean_output(data):
    y = data[1]
    layer = started(LinearConfig(d_in=D, d_out=OUT), np.ones((TOKENS, D)), y)
    assert not layer.weight.any()
    np.testing.assert_allclose(layer.bias.detach(), y.mean(0))


def test_what_is_left_out_is_relative_to_the_inputs(data):
    """In other units the same function."""
    x, y = data
    small, large = (started(LinearConfig(d_in=D, d_out=OUT), s * x, y)(torch.from_numpy(s * x)) for s in (1e-4, 1e4))
    torch.testing.assert_close(small, large)


def test_the_fit_is_made_in_float64(data):
    """The layer itself is float32; inputs whose mean is a thousand times their spread would lose the fit there."""
    x, y = data
    layer = started(LinearConfig(d_in=D, d_out=OUT), x + 1000, y, torch.float32)
    assert layer.weight.dtype == torch.float32
    np.testing.assert_allclose(layer.weight.detach(), affine(x, y)[:-1], atol=1e-4)


# --- the unit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LinearConfig(d_in=D, d_out=OUT), low_rank(2)], ids=["linear", "low_rank"])
def test_its_unit_is_the_map_and_always_on(config, randomise):
    layer, x = randomise(config.build()), torch.randn(4, D, dtype=torch.float64)
    code = layer.encode(x)
    assert code.activations.tolist() == [[1.0]] * 4
    assert code.indices.tolist() == [[0]] * 4
    torch.testing.assert_close(layer(x), x @ layer.unit_weight(0) + layer.bias)
    torch.testing.assert_close(layer.unit_output(0, x), x @ layer.unit_weight(0))
    off = layer.decode(x, code.without(torch.tensor([True])))
    assert torch.equal(off, layer.bias.expand(4, -1))
    doubled = layer.decode(x, Code(2 * code.activations, code.indices))
    torch.testing.assert_close(doubled - off, 2 * (layer(x) - off))


def test_a_constant_gate(randomise):
    """``scores``, ``rows``, ``project`` and ``top`` agree: every unit has 1 whatever the input."""
    gate, x = ConstantGate(3, D, torch.zeros(0, dtype=torch.float64)), torch.randn(4, D, dtype=torch.float64)
    weight, bias = gate.rows(torch.tensor([2, 0]))
    assert torch.equal(gate.scores(x)[:, 0, [2, 0]], x @ weight.T + bias)
    assert torch.equal(gate.scores(x), torch.ones(4, 1, 3, dtype=torch.float64))
    assert torch.equal(gate.project(x[0]), torch.zeros(3, dtype=torch.float64))
    values, units = gate.top(x, 2, "float32", Selection())
    assert values.tolist() == [[1.0, 1.0]] * 4
    assert units.tolist() == [[0, 1]] * 4


@pytest.mark.parametrize("method", ["linear", "low_rank"])
def test_only_one_unit_that_is_always_on(method):
    with pytest.raises(MxdError, match="num_units: expected 1, got 2"):
        parse_layer({"method": method, "num_units": 2})
    with pytest.raises(MxdError, match=r"sparsity topk does not work with .*; choose always"):
        parse_layer({"method": method, "sparsity": {"kind": "topk", "k": 1}})
    with pytest.raises(ValidationError, match="sparsity always does not work with TC"):
        parse_layer({"method": "transcoder"}).model_validate({"sparsity": {"kind": "always"}})


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("match", ["exact", "paper"])
def test_a_linear_layer_has_one_size(mlp, match):
    config = LinearConfig().resolve(mlp)
    assert size(config, 7, match) == config
    assert config.num_params == D * OUT + OUT


@pytest.mark.parametrize("match", ["exact", "paper"])
def test_a_low_rank_layer_is_sized_up_to_its_widths(mlp, match):
    config = LowRankConfig().resolve(mlp)
    assert (size(config, 1, match).rank, size(config, 1, match).num_units) == (OUT, 1)
    stated = size(config.model_copy(update={"rank": 2}), 1, match)
    assert (stated.rank, stated.num_units) == (2, 1)
    assert stated.num_params == 2 * D + 2 * OUT + OUT == sum(p.numel() for p in stated.build().parameters())


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_a_budget_gets_the_nearest_rank(mlp, rank):
    config = LowRankConfig().resolve(mlp)
    budget = rank * (D + OUT) + OUT
    assert [config.sized(budget + off).rank for off in (-5, 0, 5)] == [rank] * 3
    assert config.sized(budget + 6).rank == rank + 1
    assert rank == 1 or config.sized(budget - 6).rank == rank - 1


def test_a_rank_above_the_widths_is_an_error(mlp):
    config = LowRankConfig().resolve(mlp)
    most = min(config.d_in, config.d_out)
    assert config.model_copy(update={"rank": most}).sized(9).rank == most
    with pytest.raises(MxdError, match=f"rank = {most + 1} is more than the widths"):
        config.model_copy(update={"rank": most + 1}).sized(9)


def test_a_budget_below_rank_one_is_an_error(mlp):
    with pytest.raises(MxdError, match=r"a budget of 9 parameters does not pay for rank 1 \(16\)"):
        LowRankConfig().resolve(mlp).sized(9)

"""What training minimises: the normalized MSE and the sparsity's penalty, its gradient in parts, and what is read."""

import copy

import pytest
import torch
from variants import GENERAL

from mxd.layers import LAYERS
from mxd.layers.losses import normalized_mse
from mxd.layers.objective import auxk_loss, forward_backward


@pytest.fixture(params=GENERAL)
def layer(request, mlp, randomise):
    """A layer of each method, some with a penalty."""
    kind = {"kind": "relu_l1", "l1": 0.1} if request.param == "transcoder" else {"kind": "topk", "k": 4}
    config = LAYERS[request.param].model_validate({"num_units": 16, "sparsity": kind})
    if request.param == "cp_mumoe":
        config = config.model_copy(update={"rank": 4})
    return randomise(config.resolve(mlp).build())


@pytest.fixture
def sites():
    """Inputs and outputs of an MLP, of different widths."""
    return torch.randn(9, 6), torch.randn(9, 5)


def gradients(layer):
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def test_loss_error_and_gradients_are_those_of_the_formula(layer, sites):
    other, (x, y) = copy.deepcopy(layer), sites
    found = forward_backward(layer, x, y)
    read = y if layer.config.label == "SAE" else x
    out, penalty = other(read), other.penalty(other.encode(read))
    (normalized_mse(out, y) + penalty).backward()
    torch.testing.assert_close(found.loss, normalized_mse(out, y))
    torch.testing.assert_close(found.error, (out - y).square().sum(-1))
    assert torch.equal(found.code.activations, other.encode(read).activations)
    torch.testing.assert_close(gradients(layer), gradients(other))
    assert bool(penalty > 0) == (layer.config.label == "TC")


def test_the_gradients_of_the_parts_add_up_to_the_whole_ones(layer, sites):
    parts = copy.deepcopy(layer)
    forward_backward(layer, *sites)
    for part in zip(*(site.chunk(3) for site in sites), strict=True):
        forward_backward(parts, *part, 3)
    torch.testing.assert_close(gradients(parts), gradients(layer))


# --- AuxK -----------------------------------------------------------------------------------------------------------


def test_auxk_is_the_formula_on_dense_codes(layer, sites):
    """``min(dead / k, 1) ||r - (a_dead C)(z D)||^2``, with ``r`` held fixed and no bias, skip or live unit in it."""
    layer.float()
    other, (x, y) = copy.deepcopy(layer), sites
    dead = torch.arange(16) % 3 == 0
    read = other.read(x, y)
    weight, bias = other.gates.rows(torch.arange(16))
    pre = torch.where(dead, read @ weight.T + bias, 0).relu()
    kth = pre.topk(2).values[:, 1:]  # 5 // 2 units a token
    chosen = torch.where(pre >= kth, pre, 0)
    units = torch.stack([other.unit_output(n, read) for n in range(16)], -2)
    residual = (y - other(read)).detach()
    error = (residual - (chosen.unsqueeze(-1) * units).sum(-2)).square().sum(-1)
    expected = (error / y.norm(dim=-1)).mean() / 5
    got = auxk_loss(layer, read, layer.encode(read), y, dead)
    torch.testing.assert_close(got, expected)
    one = torch.arange(16) == 7
    few = auxk_loss(layer, read, layer.encode(read), y, one)
    expected_few = (residual - pre_of(other, read, 7) * other.unit_output(7, read)).square().sum(-1) / y.norm(dim=-1)
    torch.testing.assert_close(few, 0.5 * expected_few.mean() / 5)
    expected.backward()
    got.backward()
    zero = torch.zeros(5)
    torch.testing.assert_close(layer.bias.grad, zero)
    both = (gradients(owner) | {"bias": zero} for owner in (layer, other))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-3)


def pre_of(layer, read, n):
    weight, bias = layer.gates.rows(torch.tensor([n]))
    return (read @ weight.T + bias).relu()


def test_auxk_is_added_with_its_weight_and_nothing_where_no_unit_is_dead(layer, sites):
    x, y = sites
    plain, none, some, alone = (copy.deepcopy(layer) for _ in range(4))
    dead = torch.arange(16) > 11
    forward_backward(plain, x, y)
    forward_backward(none, x, y, 1, torch.zeros(16, dtype=torch.bool), 0.5)
    forward_backward(some, x, y, 1, dead, 0.5)
    read = alone.read(x, y)
    auxk_loss(alone, read, alone.encode(read), y, dead).backward()
    for (name, whole), one, other, extra in zip(
        gradients(some).items(),
        gradients(plain).values(),
        gradients(none).values(),
        gradients(alone).values(),
        strict=True,
    ):
        assert torch.equal(one, other)
        torch.testing.assert_close(whole, one + (0.5 * extra if extra is not None else 0), msg=name)

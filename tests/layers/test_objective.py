"""What training minimises: the normalized MSE and the sparsity's penalty, its gradient in parts, and what is read."""

import copy

import pytest
import torch
from variants import GENERAL

from mxd.layers import LAYERS
from mxd.layers.losses import normalized_mse
from mxd.layers.objective import forward_backward


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

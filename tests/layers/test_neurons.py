"""The base MLP's neurons as units: the same MLP with nothing masked, its terms with a mask, of every family."""

import numpy as np
import pytest
import torch

from mxd.common.errors import MxdError
from mxd.layers import Code, MLPShape, MLPWeights
from mxd.layers.config import ACTIVATIONS
from mxd.layers.neurons import Neurons
from mxd.splice import spliced


@pytest.fixture(scope="module")
def neurons(family):
    return Neurons.of(family.mlp_shape(1), family.mlp_weights(1))


def hidden_of(family, x):
    """The input of the down projection, by a hook on the model's own."""
    mlp = family.mlp(1)
    down = next(getattr(mlp, n) for n in ("c_proj", "dense_4h_to_h", "down_proj") if hasattr(mlp, n))
    kept = []
    handle = down.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.no_grad():
        mlp(x)
    handle.remove()
    return kept[0]


@torch.no_grad()
def test_with_nothing_masked_it_is_the_mlp(family, neurons, ids):
    x, y = family.record(ids, [1])[1]
    torch.testing.assert_close(neurons(x), y, rtol=1e-5, atol=1e-5)
    plain = family.logits(ids)
    for mask in ({}, {1: []}):
        with spliced(family, {1: neurons}, mask=mask):
            torch.testing.assert_close(family.logits(ids), plain, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_activations_are_sizes_and_units_add_up(family, neurons, ids):
    x, y = family.record(ids, [1])[1]
    hidden, code = hidden_of(family, x), neurons.encode(x)
    torch.testing.assert_close(code.activations, hidden.abs(), rtol=1e-5, atol=1e-5)
    assert (hidden < -1e-3).any() and (hidden > 1e-3).any()
    total = neurons.rest(x) + sum(
        code.activations[..., n : n + 1] * neurons.unit_output(n, x) for n in range(neurons.num_units)
    )
    torch.testing.assert_close(total, y, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_masking_drops_neurons(family, neurons, ids):
    """The MLP whose rows of the down projection are zero for the masked neurons."""
    x, y = family.record(ids, [1])[1]
    off = [0, 5, 17]
    term = hidden_of(family, x)[..., off] @ neurons.decoder[off]
    with spliced(family, {1: neurons}, mask={1: off}):
        found = family.record(ids, [1])[1][1]
    torch.testing.assert_close(found, y - term, rtol=1e-4, atol=1e-4)
    assert term.abs().max() > 1e-2
    code = neurons.encode(x)
    listed = Code(code.activations, code.indices.contiguous())
    torch.testing.assert_close(neurons.decode(x, listed), y, rtol=1e-4, atol=1e-4)


def test_weights_are_shared_and_counted(family, neurons):
    mlp = family.mlp(1)
    there = {p.untyped_storage().data_ptr() for p in mlp.parameters()}
    own = {p.untyped_storage().data_ptr() for p in neurons.parameters() if p is not neurons.bias}
    assert own <= there and not any(p.requires_grad for p in neurons.parameters())
    assert neurons.config.num_params == sum(p.numel() for p in neurons.parameters())
    assert sum(p.numel() for p in neurons.config.build().parameters()) == neurons.config.num_params


@torch.no_grad()
def test_the_gates_are_what_the_activation_reads(family, neurons, ids):
    x, _ = family.record(ids, [1])[1]
    hidden, scores = hidden_of(family, x), neurons.pre_activations(x)
    gate = ACTIVATIONS[neurons.config.activation](scores)
    up = torch.nn.functional.linear(x, neurons.encoder) if neurons.config.glu else torch.ones_like(gate)
    torch.testing.assert_close(gate * up, hidden, rtol=1e-4, atol=1e-5)


def test_norms(neurons):
    rows = np.linalg.norm(neurons.decoder.numpy(), axis=1)
    np.testing.assert_allclose(neurons.unit_norms().numpy(), rows, rtol=1e-5)
    np.testing.assert_allclose(neurons.factor_norms().numpy(), rows, rtol=1e-5)
    np.testing.assert_array_equal(neurons.unit_weight(3).numpy()[0], neurons.decoder[3].numpy())


def test_an_unknown_activation_is_refused():
    weights = MLPWeights(torch.ones(4, 2), None, None, torch.ones(4, 2), None)
    with pytest.raises(MxdError, match="activation function could not be read"):
        Neurons.of(MLPShape(2, 2, 4), weights)

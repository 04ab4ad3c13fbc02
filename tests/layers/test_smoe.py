"""The sparse mixture of small MLPs against the sum over its experts, and the softmax over the K largest."""

import pytest
import torch

from mxd.common.errors import MxdError
from mxd.layers import Code, MLPShape, parse_layer, size
from mxd.layers.gates import LinearGate
from mxd.layers.sparsity import TopKSoftmaxConfig

N, M, K = 7, 3, 2


@pytest.fixture
def layer(mlp, randomise):
    sparsity = {"kind": "topk_softmax", "k": K}
    fields = {"method": "smoe", "num_units": N, "expert_width": M, "activation": "relu2", "sparsity": sparsity}
    return randomise(parse_layer(fields).resolve(mlp).build())


@pytest.fixture
def x():
    return torch.randn(40, 6, dtype=torch.float64)


def strengths(layer, x):
    scores = x @ layer.gate.T + layer.gate_bias
    found = torch.zeros_like(scores)
    for t in range(len(x)):
        best = scores[t].argsort(descending=True)[:K]
        found[t, best] = scores[t, best].exp() / scores[t, best].exp().sum()
    return found


def written_out(layer, x, strength):
    out = layer.bias.expand(len(x), -1).clone()
    for n in range(N):
        u, v = layer.encoder[n * M : (n + 1) * M], layer.decoder[n * M : (n + 1) * M]
        out = out + strength[:, n : n + 1] * ((x @ u.T).clamp_min(0) ** 2 @ v)
    return out


def test_the_output_is_the_sum_over_the_chosen_experts(layer, x):
    layer.gate_bias.data -= 3
    assert ((x @ layer.gate.T + layer.gate_bias).topk(K).values < 0).any()  # negative scores are chosen, too
    torch.testing.assert_close(layer(x), written_out(layer, x, strengths(layer, x)))
    torch.testing.assert_close(layer(x[:1]), layer(x)[:1])  # most experts have no token
    assert layer(x[:0]).shape == (0, 5)


def test_gradients_are_those_of_the_sum(layer, x):
    upstream = torch.randn(40, 5, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad((out * upstream).sum(), list(layer.parameters()))
        for out in (layer(x), written_out(layer, x, strengths(layer, x)))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_masks_lists_and_hidden_states(layer, x):
    code, off = layer.encode(x), torch.arange(N) % 2 == 0
    masked = strengths(layer, x).masked_fill(off, 0)
    expected = written_out(layer, x, masked)
    torch.testing.assert_close(layer.decode(x, code.without(off)), expected)
    torch.testing.assert_close(layer.decode(x, Code(masked, torch.arange(N).expand(40, -1), True)), expected)
    hidden = layer.hidden(x)
    torch.testing.assert_close(layer.decode(x[:1], layer.encode(x[:1]), hidden[0]), layer(x[:1]))


def test_k_can_be_widened_in_training(x):
    module = TopKSoftmaxConfig(k=2).build(N)
    module.widening = 2.0
    gate = LinearGate(torch.randn(N, 6).double(), torch.randn(N).double())
    assert module.train()(x, gate).activations.shape == (40, 4)
    assert module.eval()(x, gate).activations.shape == (40, 2)


def test_sizing_solves_for_the_number_of_experts():
    shape = MLPShape(64, 64, 256, "gelu", False)
    config = size(parse_layer({"method": "smoe", "sparsity": {"kind": "topk_softmax", "k": 4}}).resolve(shape), 32)
    per_unit = 64 + 1 + 64 * 128
    assert config.num_units == round(32 * 64 * 129 / per_unit)
    assert config.num_params == config.num_units * per_unit + 64


def test_an_unknown_activation_is_an_error():
    with pytest.raises(MxdError, match="set activation"):
        parse_layer({"method": "smoe"}).resolve(MLPShape(6, 5))

"""PEER against brute force over all experts."""

import pytest
import torch

from mxd.common.errors import MxdError
from mxd.layers import Code, MLPShape, parse_layer, size
from mxd.layers.sizing import transcoder_params

HEADS, K, N = 3, 4, 6


@pytest.fixture(params=["none", "linear"])
def layer(request, mlp, randomise):
    sparsity = {"kind": "pair_topk", "heads": HEADS, "k": K}
    fields = {"method": "peer", "num_units": N * N, "query": request.param, "sparsity": sparsity}
    return randomise(parse_layer(fields).resolve(mlp).build())


@pytest.fixture
def x():
    return torch.randn(5, 6, dtype=torch.float64)


def gates(layer, x):
    """The gates of all heads and units, ``[tokens, heads, N]``: every pair is scored."""
    found = torch.zeros(len(x), HEADS, N * N, dtype=x.dtype)
    first, second = layer.first_keys.view(HEADS, N, 3), layer.second_keys.view(HEADS, N, 3)
    for t in range(len(x)):
        for h in range(HEADS):
            read = x[t] if layer.query is None else layer.query.view(HEADS, 6, 6)[h] @ x[t]
            scores = torch.stack([first[h, i] @ read[:3] + second[h, j] @ read[3:] for i in range(N) for j in range(N)])
            best = scores.argsort(descending=True)[:K]
            found[t, h, best] = scores[best].exp() / scores[best].exp().sum()
    return found


def written_out(layer, x, strengths):
    neurons = torch.nn.functional.gelu(x @ layer.encoder.T, approximate="tanh")
    return (strengths * neurons) @ layer.decoder + layer.bias


def test_the_output_is_that_of_brute_force(layer, x):
    strengths = gates(layer, x).sum(1)
    code = layer.encode(x)
    torch.testing.assert_close(torch.zeros_like(strengths).scatter_add(1, code.indices, code.activations), strengths)
    torch.testing.assert_close(layer(x), written_out(layer, x, strengths))


@pytest.mark.parametrize("limit", [1, 2**26])
def test_masks_lists_and_hidden_states(layer, x, limit, monkeypatch):
    monkeypatch.setattr("mxd.layers.peer.LISTED", limit)
    code, off = layer.encode(x), torch.arange(N * N) % 2 == 0
    masked = gates(layer, x).sum(1).masked_fill(off, 0)
    expected = written_out(layer, x, masked)
    torch.testing.assert_close(layer.decode(x, code.without(off)), expected)
    every = Code(masked, torch.arange(N * N).expand(5, -1), True)
    torch.testing.assert_close(layer.decode(x, every), expected)
    hidden = layer.hidden(x)
    torch.testing.assert_close(layer.decode(x[:1], code.at(torch.arange(5) == 0), hidden[0]), layer(x[:1]))


def test_gradients_are_those_of_brute_force(layer, x):
    layer.train()
    upstream = torch.randn(5, 5, dtype=torch.float64)
    found = [torch.autograd.grad((out * upstream).sum(), list(layer.parameters())) for out in (layer(x),)]
    dense = torch.autograd.grad((written_out(layer, x, gates(layer, x).sum(1)) * upstream).sum(), layer.parameters())
    for got, expected in zip(found[0], dense, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("query", ["none", "linear"])
@pytest.mark.parametrize("expansion", [2, 5, 32])
def test_no_other_number_of_keys_is_nearer_to_the_budget(query, expansion):
    sparsity = {"kind": "pair_topk", "heads": 2, "k": 2}
    config = parse_layer({"method": "peer", "query": query, "sparsity": sparsity})
    config = size(config.resolve(MLPShape(64, 48, 256, "gelu", False)), expansion)
    budget = transcoder_params(64, 48, 64 * expansion)
    off = {n: abs(config.model_copy(update={"num_units": n * n}).num_params - budget) for n in range(1, 100)}
    assert off[round(config.num_units**0.5)] == min(off.values())
    assert config.num_params == sum(p.numel() for p in config.build().parameters())


def test_gpt2s_budget_buys_as_many_units_as_a_transcoder_has():
    config = size(parse_layer({"method": "peer"}).resolve(MLPShape(768, 768, 3072, "gelu_tanh", False)))
    assert config.num_units == 155**2


def test_what_cannot_be_is_an_error(mlp):
    with pytest.raises(MxdError, match="set activation"):
        parse_layer({"method": "peer"}).resolve(MLPShape(6, 5))
    with pytest.raises(MxdError, match="does not pay for the part its units share"):
        parse_layer({"method": "peer", "query": "linear"}).resolve(mlp).sized(10)
    with pytest.raises(MxdError, match="k = 128 is more than"):
        parse_layer({"method": "peer", "num_units": 121})

"""Monet against the sum over all experts, written out."""

import pytest
import torch

from mxd.common.errors import MxdError
from mxd.layers import Code, MLPShape, PairCode, parse_layer, size
from mxd.layers.sizing import transcoder_params

N, M, HEADS = 4, 6, 3
GPT2 = MLPShape(768, 768, 3072, "gelu_tanh", False)
FORMS = ["horizontal", "vertical"]


def config_of(decompose, **fields):
    sparsity = {"kind": "product_topk", "heads": HEADS, "k": 2}
    fields = {"num_units": N * N, "expert_width": M, "activation": "relu2", "sparsity": sparsity} | fields
    return parse_layer({"method": "monet", "decompose": decompose, **fields})


@pytest.fixture(params=FORMS)
def layer(request, mlp, randomise):
    return randomise(config_of(request.param).resolve(mlp).build())


@pytest.fixture
def x():
    return torch.randn(5, 6, dtype=torch.float64)


def expert(layer, i, j, x):
    """``E_ij(x)`` of one token, from the paper's definition."""

    def hidden(row, count):
        return (layer.encoder[row : row + count] @ x + layer.encoder_bias[row : row + count]).clamp_min(0) ** 2

    if layer.config.decompose == "horizontal":
        return layer.decoder[j * M : (j + 1) * M].T @ hidden(i * M, M) + layer.decoder_bias[j]
    m, half = M // 2, N * M // 2
    u1, u2 = hidden(i * m, m), hidden(half + j * m, m)
    v11, v12 = layer.top[i * m : (i + 1) * m].T, layer.top[half + i * m : half + (i + 1) * m].T
    v21, v22 = layer.bottom[j * m : (j + 1) * m].T, layer.bottom[half + j * m : half + (j + 1) * m].T
    return torch.cat([v11 @ u1 + v12 @ u2 + layer.top_bias[i], v21 @ u1 + v22 @ u2 + layer.bottom_bias[j]])


def written_out(layer, x, pairs):
    """``b + sum_ij a_ij E_ij(x)``."""
    outs = []
    for t in range(len(x)):
        terms = [pairs[t, i, j] * expert(layer, i, j, x[t]) for i in range(N) for j in range(N)]
        outs.append(layer.bias + sum(terms))
    return torch.stack(outs)


def test_the_output_is_the_sum_over_all_experts(layer, x):
    code = layer.encode(x)
    assert isinstance(code, PairCode)
    pairs = torch.einsum("thi,thj->tij", code.first, code.second)
    torch.testing.assert_close(layer(x), written_out(layer, x, pairs))
    for n in range(N * N):
        expected = torch.stack([expert(layer, *divmod(n, N), row) for row in x])
        torch.testing.assert_close(layer.unit_output(n, x), expected)


def test_a_code_of_any_halves_needs_no_gates_that_add_up_to_one(layer, x):
    first, second = (torch.rand(5, HEADS, N).double() * (torch.rand(5, HEADS, N) < 0.6) for _ in range(2))
    pairs = torch.einsum("thi,thj->tij", first, second)
    torch.testing.assert_close(layer.decode(x, PairCode(first, second)), written_out(layer, x, pairs))


@pytest.mark.parametrize("limit", [1, 40, 2**26])
def test_lists_are_decoded_as_pairs_are(layer, x, limit, monkeypatch):
    """However many tokens' pairs are formed at a time; masked, as lists of all units, and one code for all tokens."""
    monkeypatch.setattr("mxd.layers.monet.LISTED", limit)
    code = layer.encode(x)
    torch.testing.assert_close(layer.decode(x, Code(code.activations, code.indices)), layer(x))
    off = torch.arange(N * N) % 3 == 0
    pairs = torch.einsum("thi,thj->tij", code.first, code.second)
    masked = pairs.flatten(1).masked_fill(off, 0)
    expected = written_out(layer, x, masked.unflatten(1, (N, N)))
    torch.testing.assert_close(layer.decode(x, code.without(off)), expected)
    every = torch.arange(N * N).expand(5, -1)
    torch.testing.assert_close(layer.decode(x, Code(masked, every, True)), expected)
    mean = masked.mean(0).expand(5, -1)
    expected = written_out(layer, x, mean.unflatten(1, (N, N)))
    torch.testing.assert_close(layer.decode(x, Code(mean, every, True)), expected)
    assert layer.decode(x[:0], layer.encode(x[:0]).without(off)).shape == (0, 5)


def test_the_halves_of_the_input(mlp, randomise, x):
    """``key_input: halves``: the first keys read the first half of the input alone."""
    layer = randomise(config_of("horizontal", key_input="halves").resolve(mlp).build())
    assert layer.first_keys.shape == layer.second_keys.shape == (HEADS * N, 3)
    changed = x.clone()
    changed[:, 3:] += torch.randn(5, 3)
    torch.testing.assert_close(layer.encode(changed).first, layer.encode(x).first)
    assert not torch.allclose(layer.encode(changed).second, layer.encode(x).second)


def test_defaults_follow_the_width():
    config = parse_layer({"method": "monet"}).resolve(GPT2)
    assert (config.keys, config.sparsity.heads, config.sparsity.k, config.activation) == (512, 3, 32, "gelu_tanh")
    small = parse_layer({"method": "monet"}).resolve(MLPShape(128, 128, 512, "gelu", False))
    assert (small.keys, small.sparsity.heads, small.sparsity.k) == (64, 1, 4)


def test_the_papers_router_at_gpt2s_budget():
    """SPEC: router 6.29M, 786,944 a unit of width, 39.5 before rounding."""
    sparsity = {"kind": "product_topk", "heads": 8, "k": 32}
    flat = size(parse_layer({"method": "monet", "sparsity": sparsity}).resolve(GPT2))
    tall = size(parse_layer({"method": "monet", "decompose": "vertical", "sparsity": sparsity}).resolve(GPT2))
    assert (flat.num_units, flat.expert_width, tall.expert_width) == (512**2, 40, 40)
    assert flat.num_params == tall.num_params
    assert flat.router_params == 2 * 8 * 512 * 768
    one_more = flat.model_copy(update={"expert_width": 41})
    assert one_more.num_params - flat.num_params == 786_944


@pytest.mark.parametrize("match", ["exact", "paper"])
@pytest.mark.parametrize("decompose", FORMS)
@pytest.mark.parametrize("expansion", [4, 7, 32])
def test_no_other_width_is_nearer_to_the_budget(decompose, expansion, match):
    config = parse_layer({"method": "monet", "decompose": decompose, "num_units": 256})
    config = size(config.resolve(MLPShape(64, 64, 256, "gelu", False)), expansion, match)
    step = 2 if decompose == "vertical" else 1
    off = {
        m: abs(config.model_copy(update={"expert_width": m}).num_params - transcoder_params(64, 64, 64 * expansion))
        for m in range(step, 200, step)
    }
    assert off[config.expert_width] == min(off.values())
    assert config.num_params == sum(p.numel() for p in config.build().parameters())
    assert config.unfactorised_params == config.router_params + 64 + 256 * (config.expert_width * (64 + 1 + 64) + 64)


def test_a_stated_width_is_kept():
    config = size(parse_layer({"method": "monet", "expert_width": 8}).resolve(MLPShape(64, 64, 256, "gelu", False)))
    assert (config.expert_width, config.num_units) == (8, 32**2)


def test_a_budget_too_small_is_an_error():
    config = parse_layer({"method": "monet", "num_units": 512**2}).resolve(MLPShape(64, 64, 256, "gelu", False))
    with pytest.raises(MxdError, match=r"does not pay for 512 halves .* give a smaller num_units"):
        size(config, 1)


def test_what_cannot_be_is_an_error():
    with pytest.raises(MxdError, match="expert_width = 7 is odd"):
        config_of("vertical", expert_width=7)
    with pytest.raises(MxdError, match="k = 5 is more than the 4 halves"):
        config_of("horizontal", sparsity={"kind": "product_quantile", "heads": 1, "k": 5})
    with pytest.raises(MxdError, match="set activation"):
        parse_layer({"method": "monet"}).resolve(MLPShape(6, 5))


def test_training_adds_the_penalty(mlp):
    """The penalty reaches the keys, though the output does not depend on them yet."""
    config = config_of("horizontal", sparsity={"kind": "product_topk", "heads": 1, "k": 3, "balance": 0.1})
    layer = config.resolve(mlp).build().train()
    code = layer.encode(torch.randn(9, 6))
    layer.penalty(code).backward()
    assert layer.first_keys.grad.abs().max() > 0 and layer.second_keys.grad.abs().max() > 0

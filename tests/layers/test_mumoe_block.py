"""The muMoE block: both layers against a double loop over experts, what a mask drops, and its published form."""

import math

import pytest
import torch
import torch.nn.functional as F

from mxd.common.errors import MxdError
from mxd.layers import Code, MLPShape
from mxd.layers.mumoe_block import MuMoEBlockConfig
from mxd.layers.sparsity import TopKConfig

N, D, HIDDEN, OUT, RANK = 11, 6, 8, 5, 4


@pytest.fixture
def x():
    return torch.randn(7, D, dtype=torch.float64)


def make(mlp, randomise, **fields):
    config = MuMoEBlockConfig(num_units=N, sparsity=TopKConfig(k=3), rank=RANK, **fields)
    return randomise(config.resolve(mlp).build())


def naive(layer, x, activations, phi):
    """``sum_n a_n [h, 1] M2_n + b`` with ``h = phi(sum_n a_n [x, 1] M1_n)``, every matrix formed, token by token."""
    first_in = torch.cat([layer.first_in, layer.first_bias[None]])
    second_in = torch.cat([layer.second_in, layer.second_bias[None]])
    rows = []
    for read, code in zip(x, activations, strict=True):
        between = torch.zeros(HIDDEN, dtype=x.dtype)
        for n in range(N):
            matrix = first_in @ torch.diag(layer.first_experts[n]) @ layer.first_out
            between += code[n] * torch.cat([read, read.new_ones(1)]) @ matrix
        out, between = layer.bias.clone(), torch.cat([phi(between), x.new_ones(1)])
        for n in range(N):
            out += code[n] * between @ (second_in @ torch.diag(layer.second_experts[n]) @ layer.second_out)
        rows.append(out)
    return torch.stack(rows)


def dense(layer, x):
    code = layer.encode(x)
    return torch.zeros(len(x), N, dtype=x.dtype).scatter(1, code.indices, code.activations)


@pytest.mark.parametrize("activation", ["gelu_tanh", "relu"])
@torch.no_grad()
def test_the_output_is_that_of_a_double_loop_over_experts(mlp, randomise, x, activation):
    layer = make(mlp, randomise, activation=activation)
    phi = {"gelu_tanh": lambda v: F.gelu(v, approximate="tanh"), "relu": torch.relu}[activation]
    torch.testing.assert_close(layer(x), naive(layer, x, dense(layer, x), phi))


@torch.no_grad()
def test_the_normalised_input_is_that_of_the_first_layer_and_not_of_the_gate(mlp, randomise, x):
    layer = make(mlp, randomise, activation="relu", layer_norm=True)
    normal = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(layer(x), naive(layer, normal, dense(layer, x), torch.relu))
    torch.testing.assert_close(layer.pre_activations(x), x @ layer.gate.T + layer.gate_bias)


@torch.no_grad()
def test_a_masked_unit_is_missing_from_both_layers(mlp, randomise, x):
    layer = make(mlp, randomise, activation="relu")
    code = layer.encode(x)
    off = torch.zeros(N, dtype=torch.bool)
    off[code.indices[0, 0]] = True
    masked = dense(layer, x).masked_fill(off, 0)
    torch.testing.assert_close(layer.decode(x, code.without(off)), naive(layer, x, masked, torch.relu))
    assert not torch.allclose(layer.decode(x, code.without(off))[0], layer(x)[0])
    nothing = layer.decode(x, Code(code.activations[:, :0], code.indices[:, :0]))
    torch.testing.assert_close(nothing, layer.bias.expand(7, -1))


@torch.no_grad()
def test_units_interact(mlp, randomise, x):
    """The output of two units is not the sum of theirs alone: that is why there is no ``unit_output``."""
    layer = make(mlp, randomise, activation="relu")
    values, units = torch.ones(7, 2, dtype=torch.float64), torch.tensor([2, 9]).expand(7, 2)
    both = layer.decode(x, Code(values, units)) - layer.bias
    alone = [layer.decode(x, Code(values[:, :1], units[:, i : i + 1])) - layer.bias for i in (0, 1)]
    assert not torch.allclose(both, alone[0] + alone[1])
    with pytest.raises(MxdError, match=r"a unit of muMoE-block adds no direction .* mask it instead"):
        layer.unit_output(0, x)


@torch.no_grad()
def test_the_hidden_state_is_what_the_first_experts_modulate(mlp, randomise, x):
    layer = make(mlp, randomise)
    torch.testing.assert_close(layer.hidden(x), x @ layer.first_in + layer.first_bias)
    torch.testing.assert_close(layer.decode(x[:1], layer.encode(x[:1]), layer.hidden(x)[0]), layer(x)[:1])


def test_a_units_weight_is_its_matrix_of_the_second_layer(mlp, randomise):
    layer = make(mlp, randomise)
    weight = layer.unit_weight(3)
    assert weight.shape == (HIDDEN + 1, OUT)
    expected = torch.cat([layer.second_in, layer.second_bias[None]]) @ torch.diag(layer.second_experts[3])
    torch.testing.assert_close(weight, expected @ layer.second_out)
    assert torch.linalg.matrix_rank(weight) == RANK


def test_the_number_of_parameters():
    """``N (d + 1) + R (N + d + 1 + H) + R (N + H + 1 + O) + O``, for GPT-2 with N = 256 and R = int(0.725 d)."""
    shape = MLPShape(768, 768, 3072, "gelu_tanh", False)
    config = MuMoEBlockConfig(num_units=256, rank=556).resolve(shape)
    assert config.num_params == 256 * 769 + 556 * (256 + 769 + 3072) + 556 * (256 + 3073 + 768) + 768
    assert config.unfactorised_params == 256 * 769 + 256 * (769 * 3072 + 3073 * 768) + 768
    assert MuMoEBlockConfig().resolve(shape).rank == 384


def test_how_it_starts():
    """The last factor is zero; ``replicate`` draws the experts' factors alone otherwise, around 1."""
    shape = MLPShape(25, 16, 36, "relu", False)
    layers = {
        start: MuMoEBlockConfig(num_units=400, rank=30, start=start).resolve(shape).build()
        for start in ("paper", "replicate")
    }
    for layer in layers.values():
        for zero in (layer.second_out, layer.bias, layer.gate_bias, layer.first_bias, layer.second_bias):
            assert torch.equal(zero, torch.zeros_like(zero))
        for factor, fan_in in ((layer.gate, 25), (layer.first_in, 25), (layer.first_out, 30), (layer.second_in, 36)):
            assert 0.9 / math.sqrt(fan_in) < factor.abs().max() <= 1 / math.sqrt(fan_in)
    for name in ("first_experts", "second_experts"):
        assert getattr(layers["paper"], name).abs().max() <= 1 / 20
        drawn = getattr(layers["replicate"], name)
        assert abs(drawn.mean() - 1) < 0.05 and abs(drawn.std() - 1) < 0.05


def test_a_base_mlp_that_could_not_be_read():
    with pytest.raises(MxdError, match="muMoE-block: the base MLP's activation could not be read"):
        MuMoEBlockConfig().resolve(MLPShape(8, 8, 16))
    assert MuMoEBlockConfig(hidden=3, activation="relu").resolve(MLPShape(8, 8)).hidden == 3

"""The unfactorised MoE: only chosen experts multiply, and every form of code is decoded alike."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mxd.layers import Code
from mxd.layers.moe import MoEConfig
from mxd.layers.sparsity import ReLUL1Config, TopKConfig

N = 6


@pytest.fixture
def layer(mlp, randomise):
    return randomise(MoEConfig(num_units=N, sparsity=TopKConfig(k=2)).resolve(mlp).build())


@pytest.fixture
def x():
    return torch.randn(7, 6, dtype=torch.float64)


def test_experts_start_at_zero_and_few_are_active_by_default(mlp):
    layer = MoEConfig(num_units=N).resolve(mlp).build()
    assert torch.equal(layer.experts, torch.zeros(N, 8, 5))
    assert layer.config.slug == "moe-k2"


def test_products_are_with_the_tokens_that_chose_an_expert(layer, x):
    """T k products of a token with a matrix, not T N."""
    code, z = layer.encode(x), layer.hidden(x)
    with FlopCounterMode(display=False) as counter:
        layer._decode(x, code, z)
    assert counter.get_total_flops() == 2 * 7 * 2 * 8 * 5


def test_one_code_for_all_tokens_needs_one_product(layer, x):
    values = torch.rand(N, dtype=torch.float64)
    code, z = Code(values.expand(7, -1), torch.arange(N).expand(7, -1), True), layer.hidden(x)
    with FlopCounterMode(display=False) as counter:
        out = layer._decode(x, code, z)
    assert counter.get_total_flops() == 2 * 7 * 8 * 5 + 2 * N * 8 * 5
    torch.testing.assert_close(out, z @ torch.einsum("n,nho->ho", values, layer.experts) + layer.bias)


def test_thresholds_that_keep_all_units_decode_as_a_list_does(mlp, randomise, x):
    layer = randomise(MoEConfig(num_units=N, sparsity=ReLUL1Config()).resolve(mlp).build())
    code = layer.encode(x)
    assert code.all_units and 0 < (code.activations > 0).sum() < 7 * N
    expected = torch.einsum("tn,th,nho->to", code.activations, layer.hidden(x), layer.experts) + layer.bias
    torch.testing.assert_close(layer(x), expected)

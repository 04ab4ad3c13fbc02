"""Parameters that a token's output depends on, against the gradients of one token's output."""

import pytest
import torch
from variants import CASES, parse

COUNTED = [case for case in CASES if case[1] in ("topk", "levels") and case[0] != "mxd-relu" and "molt" not in case[0]]
"""Where every unit costs the same, and no hidden unit is off."""


def gradients(layer):
    """The number of entries with a gradient, for one token at which as many units are active as can be."""
    for name, parameter in layer.named_parameters():
        parameter.data /= 5  # where GELU is steep
        if name.endswith(("gate_bias", "encoder_bias")):
            parameter.data += 2
    x = torch.randn(1, layer.config.d_in, dtype=torch.float64)
    out = layer(x)
    (out * torch.randn_like(out)).sum().backward()
    count = sum(int((p.grad != 0).sum()) for p in layer.parameters() if p.grad is not None)
    return count, float(layer.encode(x).active_count())


@pytest.mark.parametrize("case", COUNTED, ids="-".join)
def test_they_are_those_with_a_gradient(case, mlp, randomise):
    layer = randomise(parse(*case).resolve(mlp).build())
    count, l0 = gradients(layer)
    assert layer.config.active_params(l0) == count


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_they_are_all_where_every_unit_is_active(case, mlp):
    config = parse(*case).resolve(mlp)
    if case[1] not in ("levels", "product_topk", "product_quantile"):
        assert config.active_params(float(config.num_units)) == pytest.approx(config.layer_params)
    assert 0 < config.active_params(1.0) <= config.layer_params


def test_of_transforms_the_mean(mlp):
    config = parse("molt", "topk").resolve(mlp)
    ranks = [rank for rank, count in zip(config.ranks, config.counts, strict=True) for _ in range(count)]
    each = [6 + 1 + rank * (6 + 5) for rank in ranks]
    assert config.active_params(3.0) == pytest.approx(3 * sum(each) / len(each) + 5)


@pytest.mark.parametrize("variant", ["monet", "monet-vd"])
def test_of_a_monet_the_halves_that_heads_choose(variant, mlp):
    """Two heads choose two of five halves each on both sides: at most four on each side, and the router."""
    config = parse(variant, "product_topk").resolve(mlp)
    half = 4 * (6 + 1 + 5) + 5
    assert config.active_params(8.0) == config.router_params + 4 * half + 5

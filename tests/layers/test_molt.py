"""MOLT: the mixture written out, its ladder of ranks, its sizes, and the layers that it contains as special cases."""

import math

import pytest
import torch

from mxd.common.errors import MxdError
from mxd.layers import MLPShape, size
from mxd.layers.molt import MOLTConfig
from mxd.layers.sizing import transcoder_params
from mxd.layers.sparsity import ReLUL1Config, TopKConfig

GPT2 = MLPShape(768, 768, 3072, "gelu_tanh", False)
D, OUT, N = 6, 5, 11
FORMS = {
    "ladder": {"rank": 4, "halvings": 2},
    "rank 1": {"rank": 1},
    "rank 3": {"rank": 3, "halvings": 0},
    "skip": {"rank": 2, "skip": True},
    "dense": {"rank": 4, "sparsity": ReLUL1Config()},
}


def config(**fields):
    return MOLTConfig(**({"d_in": D, "d_out": OUT, "num_units": N, "sparsity": TopKConfig(k=3)} | fields))


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def layer(request, randomise):
    return randomise(config(**request.param).build())


def transforms(layer):
    """``V_t`` and ``U_t`` of every transform, cut from the tables by the config's ranks and counts."""
    ranks = [rank for rank, count in zip(layer.config.ranks, layer.config.counts, strict=True) for _ in range(count)]
    return list(zip(layer.down.split(ranks), layer.up.split(ranks), strict=True))


def activations(layer, x):
    code = layer.encode(x)
    return torch.zeros(len(x), N, dtype=x.dtype).scatter(1, code.indices, code.activations)


# --- the function ---------------------------------------------------------------------------------------------------


def test_it_is_the_mixture_of_its_transforms(layer):
    x = torch.randn(7, D, dtype=torch.float64)
    a, pairs = activations(layer, x), transforms(layer)
    expected = layer.bias + sum(a[:, [t]] * (x @ down.T @ up) for t, (down, up) in enumerate(pairs))
    if layer.skip is not None:
        expected = expected + x @ layer.skip
    torch.testing.assert_close(layer(x), expected)
    for t, (down, up) in enumerate(pairs):
        torch.testing.assert_close(layer.unit_weight(t), down.T @ up)
        torch.testing.assert_close(layer.unit_output(t, x), x @ down.T @ up)
        assert torch.linalg.matrix_rank(layer.unit_weight(t)) == min(len(down), OUT)


def test_transforms_that_are_always_on_are_one_linear_map(layer):
    layer.gate.data.zero_()
    layer.gate_bias.data.fill_(1)
    layer.sparsity = ReLUL1Config().build(N)
    x = torch.randn(7, D, dtype=torch.float64)
    linear = layer.down.T @ layer.up + (0 if layer.skip is None else layer.skip)
    torch.testing.assert_close(layer(x), x @ linear + layer.bias)


def test_rank_1_is_a_transcoder_of_bilinear_features(randomise):
    layer, x = randomise(config(rank=1).build()), torch.randn(7, D, dtype=torch.float64)
    assert layer.down.shape == layer.gate.shape
    features = activations(layer, x) * (x @ layer.down.T)
    torch.testing.assert_close(layer(x), features @ layer.up + layer.bias)


def test_the_start_draws_v_at_unit_output_and_leaves_u_at_zero():
    layer = config(d_in=400, d_out=30, num_units=31, rank=16).build()
    assert layer.down.std().item() == pytest.approx(1 / math.sqrt(400), rel=0.02)
    assert layer.gate.abs().max() <= 1 / math.sqrt(400)
    zero = [p for name, p in layer.named_parameters() if name not in ("down", "gate")]
    assert len(zero) == 3 and not any(p.any() for p in zero)


# --- ranks, counts and sizes ----------------------------------------------------------------------------------------


def test_the_published_ladder():
    """N x 512, 2 N x 256, 4 N x 128, 8 N x 64, 16 N x 32: 31 N transforms, ranks that add up to 2,560 N."""
    found = MOLTConfig(num_units=1550).resolve(GPT2)
    assert found.ranks == (512, 256, 128, 64, 32)
    assert found.counts == (50, 100, 200, 400, 800)
    assert found.total_rank == 50 * 2560
    assert found.layer_params == 1550 * 769 + 50 * 2560 * 1536 + 768


@pytest.mark.parametrize(("d", "rank"), [(1, 1), (6, 4), (128, 64), (576, 512), (768, 512), (1024, 512), (2048, 1024)])
def test_the_largest_rank_follows_the_width(d, rank):
    assert MOLTConfig().resolve(MLPShape(d, d)).rank == rank


def test_ranks_halve_down_to_one_at_most():
    assert config(rank=12).ranks == (12, 6, 3, 1)
    assert config(rank=12, halvings=1).ranks == (12, 6)
    assert config(rank=1).ranks == (1,)
    assert config(rank=32, halvings=0).ranks == (32,)
    assert config(rank=4, halvings=10**9).ranks == (4, 2, 1)


def test_counts_add_up_and_parameters_grow_with_the_units():
    """For any number of units, and as near to 1 : 2 : 4 as whole numbers are."""
    before = 0
    for units in range(1, 100):
        found = config(num_units=units, rank=4, sparsity=TopKConfig(k=1))
        assert sum(found.counts) == units
        assert all(abs(count - units * 2**g / 7) < 1 + 1e-9 for g, count in enumerate(found.counts))
        assert found.num_params > before
        before = found.num_params


@pytest.mark.parametrize("expansion", [2, 32])
@pytest.mark.parametrize("fields", [{}, {"rank": 1}, {"rank": 64, "halvings": 1}, {"skip": True}])
def test_sizing_finds_the_nearest_number_of_units(fields, expansion):
    shape = MLPShape(24, 20)
    asked = MOLTConfig(sparsity=TopKConfig(k=1), **fields).resolve(shape)
    budget = transcoder_params(24, 20, 24 * expansion)
    off = {n: abs(asked.model_copy(update={"num_units": n}).num_params - budget) for n in range(1, 1000)}
    assert off[size(asked, expansion).num_units] == off[size(asked, expansion, "paper").num_units] == min(off.values())


def test_a_budget_below_what_the_units_share_is_refused():
    with pytest.raises(MxdError, match=r"SMOLT: a budget of 10 parameters does not pay for .* \(590,592\)"):
        MOLTConfig(skip=True).resolve(GPT2).sized(10)


def test_slugs_name_the_ranks():
    assert config(rank=64).slug == "molt-r64-4-k3"
    assert config(rank=1, skip=True).slug == "smolt-r1-k3"
    assert config(rank=32, halvings=0).slug == "molt-r32-k3"

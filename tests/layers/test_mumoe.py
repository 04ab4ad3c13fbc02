"""CP-muMoE: MxD's equation 22, the bound on its experts' rank, and the layers it contains as special cases."""

import math

import pytest
import torch

from mxd.layers import MLPShape
from mxd.layers.mumoe import CPMuMoEConfig
from mxd.layers.mxd import MxDConfig
from mxd.layers.sparsity import TopKConfig

N, HIDDEN, OUT = 11, 8, 5


def make(mlp, randomise, **fields):
    return randomise(CPMuMoEConfig(num_units=N, sparsity=TopKConfig(k=3), **fields).resolve(mlp).build())


@pytest.fixture
def x():
    return torch.randn(7, 6, dtype=torch.float64)


def activations(layer, x):
    code = layer.encode(x)
    return torch.zeros(len(x), N, dtype=x.dtype).scatter(1, code.indices, code.activations)


@pytest.mark.parametrize("rank", [1, 3, 20])
def test_equation_22(mlp, randomise, x, rank):
    """``y^ = sum_r sum_n sum_h a_n c'_nr z_h d'_hr w_ro + b``."""
    layer = make(mlp, randomise, rank=rank)
    explicit = torch.einsum(
        "tn,nr,th,hr,ro->to",
        activations(layer, x),
        layer.expert_factor,
        layer.encoder(x),
        layer.input_factor,
        layer.output_factor,
    )
    torch.testing.assert_close(layer(x), explicit + layer.bias)


def test_it_is_a_mixture_of_its_experts(mlp, randomise, x):
    """``sum_n a_n (z W_n)`` with ``W_n = D' diag(c'_n) W`` formed explicitly."""
    layer = make(mlp, randomise, rank=3)
    experts = [layer.input_factor @ torch.diag(c) @ layer.output_factor for c in layer.expert_factor]
    for n, expert in enumerate(experts):
        torch.testing.assert_close(layer.unit_weight(n), expert)
        torch.testing.assert_close(layer.unit_output(n, x), layer.encoder(x) @ expert)
    mixture = torch.einsum("tn,th,nho->to", activations(layer, x), layer.encoder(x), torch.stack(experts))
    torch.testing.assert_close(layer(x), mixture + layer.bias)


@pytest.mark.parametrize("rank", [1, 2, 4, 5, 20])
def test_experts_have_rank_min_of_h_o_and_r(mlp, randomise, rank):
    layer = make(mlp, randomise, rank=rank)
    ranks = {torch.linalg.matrix_rank(layer.unit_weight(n)).item() for n in range(N)}
    assert ranks == {min(HIDDEN, OUT, rank)}


@pytest.mark.parametrize(("share", "rank"), [(0.25, 16), (0.5, 32), (1.0, 64), (2.0, 128), (0.001, 1)])
def test_rank_share_is_of_the_output_width(share, rank):
    shape = MLPShape(d_in=48, d_out=64, hidden=192, activation="gelu", glu=False)
    assert CPMuMoEConfig(rank_share=share).resolve(shape).rank == rank
    assert CPMuMoEConfig(rank_share=share, rank=7).resolve(shape).rank == 7


def test_initialisation():
    """The output factor starts at zero, as MxD's D does; the other factors as ``nn.Linear``; all biases zero."""
    layer = CPMuMoEConfig(d_in=25, d_out=16, hidden=36, num_units=100, rank=30, activation="relu", glu=False).build()
    for parameter, fan_in in ((layer.gate, 25), (layer.expert_factor, 100), (layer.input_factor, 36)):
        bound = 1 / math.sqrt(fan_in)
        assert 0.97 * bound < parameter.abs().max() <= bound
    for zero in (layer.output_factor, layer.bias, layer.gate_bias, layer.encoder.bias):
        assert torch.equal(zero, torch.zeros_like(zero))


# --- special cases ------------------------------------------------------------------------------------------------


def test_mxd_is_the_case_of_an_identity_output_factor(mlp, randomise, x):
    """``R = O`` and ``W = I``: then ``D' = D`` and ``C' = C``."""
    cp = make(mlp, randomise, rank=OUT)
    mxd = randomise(MxDConfig(num_units=N, sparsity=TopKConfig(k=3)).resolve(mlp).build())
    shared = {name: p for name, p in cp.state_dict().items() if name in mxd.state_dict()}
    mxd.load_state_dict(shared | {"expert_scale": cp.expert_factor, "decoder": cp.input_factor})
    cp.output_factor.data = torch.eye(OUT, dtype=torch.float64)
    torch.testing.assert_close(cp(x), mxd(x))
    torch.testing.assert_close(cp.unit_weight(2), mxd.unit_weight(2))

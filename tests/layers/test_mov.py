"""MoV: mixtures of (IA)^3 vectors, which are the muMoE with ``R = H`` and ``D' = I``; and (IA)^3 itself."""

import math

import pytest
import torch

from mxd.layers import Code, size
from mxd.layers.mov import MoVConfig
from mxd.layers.mumoe import CPMuMoEConfig
from mxd.layers.mxd import MxDConfig
from mxd.layers.sparsity import TopKConfig

N, HIDDEN, OUT = 11, 8, 5


@pytest.fixture(params=[False, True], ids=["mlp", "glu"])
def layer(request, mlp, randomise):
    return randomise(MoVConfig(num_units=N, sparsity=TopKConfig(k=3), glu=request.param).resolve(mlp).build())


@pytest.fixture
def x():
    return torch.randn(7, 6, dtype=torch.float64)


def activations(layer, x):
    code = layer.encode(x)
    return torch.zeros(len(x), N, dtype=x.dtype).scatter(1, code.indices, code.activations)


def test_it_is_a_mixture_of_its_experts(layer, x):
    """``sum_n a_n (z W_n)`` with ``W_n = diag(c_n) D`` formed explicitly, neuron by neuron."""
    experts = [torch.diag(c) @ layer.decoder for c in layer.expert_scale]
    for n, expert in enumerate(experts):
        torch.testing.assert_close(layer.unit_weight(n), expert)
        torch.testing.assert_close(layer.unit_output(n, x), layer.encoder(x) @ expert)
    mixture = torch.einsum("tn,th,nho->to", activations(layer, x), layer.encoder(x), torch.stack(experts))
    torch.testing.assert_close(layer(x), mixture + layer.bias)


def test_the_factorised_form(layer, x):
    """``((a C) * z) D + b``."""
    explicit = torch.einsum(
        "tn,nh,th,ho->to", activations(layer, x), layer.expert_scale, layer.encoder(x), layer.decoder
    )
    torch.testing.assert_close(layer(x), explicit + layer.bias)


def test_a5_it_is_the_mumoe_of_rank_h_with_an_identity(mlp, randomise, x):
    """Appendix A.5: with ``R = H`` and ``D' = I``; the mode-2 unfolding is the Khatri-Rao product of C and D^T."""
    layer = randomise(MoVConfig(num_units=N, sparsity=TopKConfig(k=3)).resolve(mlp).build())
    cp = randomise(CPMuMoEConfig(num_units=N, rank=HIDDEN, sparsity=TopKConfig(k=3)).resolve(mlp).build())
    state = layer.state_dict()
    scale, decoder = state.pop("expert_scale"), state.pop("decoder")
    identity = torch.eye(HIDDEN, dtype=torch.float64)
    cp.load_state_dict(state | {"expert_factor": scale, "output_factor": decoder, "input_factor": identity})
    torch.testing.assert_close(layer(x), cp(x))
    tensor = torch.stack([layer.unit_weight(n) for n in range(N)])
    unfolding = tensor.permute(1, 0, 2).reshape(HIDDEN, N * OUT)
    torch.testing.assert_close(unfolding, torch.stack([torch.kron(scale[:, h], decoder[h]) for h in range(HIDDEN)]))


def test_a5_ia3_is_one_expert_always_on(layer, x):
    """(IA)^3 rescales the hidden state by one learned vector."""
    on = Code(torch.ones(7, 1, dtype=torch.float64), torch.full((7, 1), 4))
    ia3 = (layer.encoder(x) * layer.expert_scale[4]) @ layer.decoder
    torch.testing.assert_close(layer.decode(x, on), ia3 + layer.bias)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_experts_have_at_most_the_rank_of_the_decoder(layer, rank):
    layer.decoder.data = torch.randn(HIDDEN, rank).double() @ torch.randn(rank, OUT).double()
    assert {torch.linalg.matrix_rank(layer.unit_weight(n)).item() for n in range(N)} == {rank}


def test_initialisation():
    """D starts at zero; C as ``nn.Linear`` with N inputs; all biases zero."""
    layer = MoVConfig(d_in=25, d_out=16, hidden=36, num_units=100, activation="relu", glu=False).build()
    for parameter, fan_in in ((layer.gate, 25), (layer.expert_scale, 100), (layer.encoder.weight, 25)):
        bound = 1 / math.sqrt(fan_in)
        assert 0.97 * bound < parameter.abs().max() <= bound
    for zero in (layer.decoder, layer.bias, layer.gate_bias, layer.encoder.bias):
        assert torch.equal(zero, torch.zeros_like(zero))


@pytest.mark.parametrize("match", ["exact", "paper"])
def test_at_a_budget_it_has_fewer_experts_than_mxd(match):
    """A unit costs ``d + 1 + H`` in place of ``d + 1 + O``: GPT-2's 8,605 against 21,504."""
    gpt2 = {"d_in": 768, "d_out": 768, "hidden": 3072, "activation": "gelu_tanh", "glu": False}
    assert size(MoVConfig(**gpt2), match=match).num_units == 8_605
    assert size(MxDConfig(**gpt2)).num_units == 21_504

"""TR-muMoE: the trace formula, the bound on its experts' rank, and the forms it contains as special cases."""

import pytest
import torch

from mxd.layers import MLPShape
from mxd.layers.mumoe import CPMuMoEConfig
from mxd.layers.sparsity import TopKConfig
from mxd.layers.tensor_ring import TRMuMoEConfig

N, HIDDEN, OUT = 11, 8, 5


def make(mlp, randomise, **fields):
    return randomise(TRMuMoEConfig(num_units=N, sparsity=TopKConfig(k=3), **fields).resolve(mlp).build())


def cores(layer):
    """``U1 [R1, N, R2]``, ``U2 [R2, H, R3]`` and ``U3 [R3, O, R1]`` as the paper orders them."""
    one, two, three = layer.config.rank_1, layer.config.rank_2, layer.config.rank_3
    return (
        layer.expert_factor.view(N, one, two).permute(1, 0, 2),
        layer.input_factor.view(HIDDEN, two, three).permute(1, 0, 2),
        layer.output_factor.view(one, three, OUT).permute(1, 2, 0),
    )


@pytest.mark.parametrize("ranks", [(4, 4, 2), (2, 3, 4), (3, 1, 2)])
def test_an_entry_is_the_trace_of_a_product_of_slices(ranks, mlp, randomise):
    layer = make(mlp, randomise, rank_1=ranks[0], rank_2=ranks[1], rank_3=ranks[2])
    u1, u2, u3 = cores(layer)
    for n, h, o in ((0, 0, 0), (10, 7, 4), (3, 2, 1)):
        torch.testing.assert_close(layer.unit_weight(n)[h, o], torch.trace(u1[:, n] @ u2[:, h] @ u3[:, o]))


@pytest.mark.parametrize("ranks", [(1, 1, 3), (2, 2, 1), (2, 3, 2), (4, 2, 2), (4, 4, 4)])
def test_the_rank_of_an_expert_reaches_its_bound(ranks, mlp, randomise):
    """``min(R3 min(R1, R2), H, O)``."""
    one, two, three = ranks
    layer = make(mlp, randomise, rank_1=one, rank_2=two, rank_3=three)
    found = {torch.linalg.matrix_rank(layer.unit_weight(n)).item() for n in range(N)}
    assert found == {min(three * min(one, two), HIDDEN, OUT)}


def test_with_r1_of_one_it_is_a_tensor_train(mlp, randomise):
    """``W_n[h, o] = u1_n . U2[:, h, :] . U3[:, o]``: the experts share their output space of R3 directions."""
    layer = make(mlp, randomise, rank_1=1, rank_2=4, rank_3=2)
    u1, u2, u3 = cores(layer)
    expected = torch.einsum("nb,bhc,co->nho", u1[0], u2, u3[:, :, 0])
    torch.testing.assert_close(torch.stack([layer.unit_weight(n) for n in range(N)]), expected)


def test_with_r1_and_r2_of_one_experts_are_multiples_of_one_matrix(mlp, randomise):
    layer = make(mlp, randomise, rank_1=1, rank_2=1, rank_3=3)
    shared = layer.input_factor @ layer.output_factor
    for n in range(N):
        torch.testing.assert_close(layer.unit_weight(n), layer.expert_factor[n, 0] * shared)


def test_with_diagonal_slices_it_is_cp(mlp, randomise):
    """Where all slices are diagonal the trace is a sum over one index: a CP of rank R1 = R2 = R3."""
    ring = make(mlp, randomise, rank_1=3, rank_2=3, rank_3=3)
    cp = randomise(CPMuMoEConfig(num_units=N, sparsity=TopKConfig(k=3), rank=3).resolve(mlp).build())
    ring.expert_factor.data = torch.diag_embed(cp.expert_factor.data).flatten(1)
    ring.input_factor.data = torch.diag_embed(cp.input_factor.data).flatten(1)
    ring.output_factor.data = torch.diag_embed(cp.output_factor.data.T).permute(1, 2, 0).flatten(0, 1)
    for n in range(N):
        torch.testing.assert_close(ring.unit_weight(n), cp.unit_weight(n))


@pytest.mark.parametrize(
    ("fields", "rank"),
    [
        ({}, 16),
        ({"rank_share": 0.25}, 4),
        ({"rank_1": 1}, 64),
        ({"rank_1": 2, "rank_share": 0.5}, 16),
        ({"rank_1": 3, "rank_2": 5}, 22),
        ({"rank_share": 0.001}, 1),
        ({"rank_3": 7}, 7),
    ],
)
def test_rank_share_is_the_bound_as_a_share_of_the_output_width(fields, rank):
    shape = MLPShape(d_in=48, d_out=64, hidden=192, activation="gelu", glu=False)
    assert TRMuMoEConfig(**fields).resolve(shape).rank_3 == rank


def test_ranks_stand_in_the_slug(mlp):
    assert TRMuMoEConfig(sparsity=TopKConfig(k=3)).resolve(mlp).slug == "tr-mumoe-r4x4x2-k3"


def test_an_expert_costs_a_gate_row_and_r1_r2_numbers():
    shape = MLPShape(768, 768, 3072, "gelu_tanh", False)
    config = TRMuMoEConfig(num_units=100).resolve(shape)
    assert config.model_copy(update={"num_units": 101}).num_params - config.num_params == 769 + 16

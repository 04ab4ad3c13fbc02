"""Tucker-muMoE: the core and its factors, the bound on its experts' rank, its special case CP, its default ranks."""

import pytest
import torch

from mxd.layers import MLPShape
from mxd.layers.mumoe import CPMuMoEConfig
from mxd.layers.sparsity import TopKConfig
from mxd.layers.tucker import TuckerMuMoEConfig

N, HIDDEN, OUT = 11, 8, 5


def make(mlp, randomise, units=3, inputs=4, outputs=2):
    ranks = {"rank_units": units, "rank_in": inputs, "rank_out": outputs}
    return randomise(TuckerMuMoEConfig(num_units=N, sparsity=TopKConfig(k=3), **ranks).resolve(mlp).build())


@pytest.mark.parametrize("ranks", [(1, 4, 4), (3, 2, 9), (3, 9, 2), (2, 9, 9), (30, 7, 5)])
def test_the_rank_of_an_expert_reaches_its_bound(ranks, mlp, randomise):
    layer = make(mlp, randomise, *ranks)
    found = {torch.linalg.matrix_rank(layer.unit_weight(n)).item() for n in range(N)}
    assert found == {min(HIDDEN, OUT, ranks[1], ranks[2])}


def test_experts_are_mixtures_of_as_many_matrices_as_their_rank(mlp, randomise):
    layer = make(mlp, randomise, units=3)
    matrices = torch.stack([layer.input_factor @ piece @ layer.output_factor for piece in layer.core])
    weights = torch.stack([layer.unit_weight(n) for n in range(N)])
    torch.testing.assert_close(weights, torch.einsum("np,pho->nho", layer.expert_factor, matrices))
    assert torch.linalg.matrix_rank(weights.flatten(1)).item() == 3


def test_with_a_diagonal_core_it_is_cp(mlp, randomise):
    tucker = make(mlp, randomise, 4, 4, 4)
    cp = randomise(CPMuMoEConfig(num_units=N, sparsity=TopKConfig(k=3), rank=4).resolve(mlp).build())
    tucker.load_state_dict(cp.state_dict() | {"core": torch.zeros(4, 4, 4)})
    tucker.core.data[range(4), range(4), range(4)] = 1.0
    x = torch.randn(7, 6, dtype=torch.float64)
    torch.testing.assert_close(tucker(x), cp(x))
    torch.testing.assert_close(tucker.unit_norms(), cp.unit_norms())


@pytest.mark.parametrize(("width", "rank"), [(5, 2), (64, 16), (256, 64), (3072, 64)])
def test_ranks_are_64_or_less_in_narrow_models(width, rank):
    shape = MLPShape(d_in=width, d_out=width, hidden=4 * width, activation="gelu", glu=False)
    config = TuckerMuMoEConfig(sparsity=TopKConfig(k=3)).resolve(shape)
    assert config.widths == (rank, rank, rank)
    assert config.slug == f"tucker-mumoe-r{rank}x{rank}x{rank}-k3"
    assert TuckerMuMoEConfig(rank_in=3).resolve(shape).widths == (rank, 3, rank)

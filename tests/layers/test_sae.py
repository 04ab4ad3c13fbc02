"""TopK sparse autoencoder: what it reads, its start, and numbers worked by hand."""

import pytest
import torch

from mxd.layers import LAYERS
from mxd.layers.sae import TopKSAEConfig
from mxd.layers.sparsity import TopKConfig


def test_it_reads_the_mlps_output_and_the_others_its_input():
    assert {name: config.reads for name, config in LAYERS.items()} == {
        name: "mlp_out" if name == "topk_sae" else "mlp_in" for name in LAYERS
    }


def test_both_widths_are_the_outputs(mlp):
    config = TopKSAEConfig().resolve(mlp)
    assert (config.d_in, config.d_out) == (mlp.d_out, mlp.d_out) == (5, 5)


def test_by_hand():
    """``y = (3, 1)``: pre = (3, 1, 2); features 0 and 2: ``3 * (1, 0) + 2 * (0.5, 0.5) + b``."""
    layer = TopKSAEConfig(d_in=2, d_out=2, num_units=3, sparsity=TopKConfig(k=2)).build()
    values = {
        "encoder": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
        "encoder_bias": [0.0, 0.0, -2.0],
        "decoder": [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]],
        "bias": [10.0, 20.0],
    }
    layer.load_state_dict({name: torch.tensor(v) for name, v in values.items()})
    assert layer(torch.tensor([3.0, 1.0])).tolist() == [14.0, 21.0]


def test_the_decoder_starts_as_the_encoder_at_unit_norm():
    layer = TopKSAEConfig(d_in=16, d_out=16, num_units=40).build()
    torch.testing.assert_close(layer.unit_norms(), torch.ones(40))
    torch.testing.assert_close(layer.decoder * layer.encoder.norm(dim=1, keepdim=True), layer.encoder.data)
    assert 0.97 * 0.25 < layer.encoder.abs().max() <= 0.25
    assert not layer.encoder_bias.any()
    assert not layer.bias.any()


def test_the_tied_start_points_towards_its_input():
    """Each code's reconstruction has a positive product with what was encoded: training starts the right way round."""
    layer = TopKSAEConfig(d_in=16, d_out=16, num_units=40, sparsity=TopKConfig(k=8)).build()
    y = torch.randn(50, 16)
    assert ((layer(y) * y).sum(-1) > 0).all()


def test_orthonormal_features_reconstruct_exactly(randomise):
    """With an orthonormal dictionary and its mirror image, K = d features give every y back."""
    d = 6
    layer = randomise(TopKSAEConfig(d_in=d, d_out=d, num_units=2 * d, sparsity=TopKConfig(k=d)).build())
    basis = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64)).Q
    layer.encoder.data = layer.decoder.data = torch.cat([basis, -basis])
    layer.encoder_bias.data.zero_()
    layer.bias.data.zero_()
    y = torch.randn(20, d, dtype=torch.float64)
    torch.testing.assert_close(layer(y), y)


@pytest.mark.parametrize("units", [1, 50])
def test_it_costs_what_a_transcoder_of_its_width_does(units):
    one, tc = (
        LAYERS[name](d_in=7, d_out=7, num_units=units, sparsity=TopKConfig(k=1)) for name in ("topk_sae", "transcoder")
    )
    assert one.num_params == tc.num_params == units * 7 + units + units * 7 + 7

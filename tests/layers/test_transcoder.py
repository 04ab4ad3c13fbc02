"""Transcoder and skip transcoder: equation 2 of the MxD paper and numbers worked by hand."""

import pytest
import torch

from mxd.layers.sparsity import TopKConfig
from mxd.layers.transcoder import TranscoderConfig

WEIGHTS = {
    "encoder": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
    "encoder_bias": [0.0, 1.0, -2.0],
    "decoder": [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]],
    "bias": [0.5, -0.5],
}
# x = (1, 2):   pre = (1, 3, 1);    the largest is feature 1 with 3
# x = (4, -1):  pre = (4, 0, 1);    feature 0 with 4
# x = (-3, -2): pre = (-3, -1, -7); none
X = [[1.0, 2.0], [4.0, -1.0], [-3.0, -2.0]]
OUT = [[6.5, 59.5], [4.5, 39.5], [0.5, -0.5]]
SKIP = [[1.0, -1.0], [0.0, 2.0]]
X_SKIP = [[1.0, 3.0], [4.0, -6.0], [-3.0, -1.0]]


def build(skip, k=1):
    layer = TranscoderConfig(d_in=2, d_out=2, num_units=3, skip=skip, sparsity=TopKConfig(k=k)).build()
    weights = WEIGHTS | ({"skip": SKIP} if skip else {})
    layer.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    return layer


def test_transcoder_by_hand():
    layer = build(skip=False)
    assert layer(torch.tensor(X)).tolist() == OUT
    assert layer.encode(torch.tensor(X[:2])).indices.tolist() == [[1], [0]]


def test_skip_transcoder_by_hand():
    expected = torch.tensor(OUT) + torch.tensor(X_SKIP)
    assert build(skip=True)(torch.tensor(X)).tolist() == expected.tolist()


def test_with_two_features_by_hand():
    """x = (4, -1): features 0 and 2, ``4 * (1, 10) + 1 * (3, 30) + b``."""
    assert build(skip=False, k=2)(torch.tensor(X[1])).tolist() == [7.5, 69.5]


@pytest.mark.parametrize("skip", [False, True])
def test_a_features_output_is_its_decoder_row_for_every_input(skip):
    layer, x = build(skip), torch.randn(2, 3, 2)
    for n, row in enumerate(WEIGHTS["decoder"]):
        assert torch.equal(layer.unit_output(n, x), torch.tensor(row).expand(2, 3, 2))
        assert layer.unit_weight(n).tolist() == [row]


@pytest.mark.parametrize("skip", [False, True])
def test_the_output_bias_is_not_subtracted_from_the_input(skip):
    """An autoencoder's habit that hurts a transcoder: here b only shifts the output."""
    layer, x = build(skip), torch.tensor(X)
    before = layer(x)
    layer.bias.data += 7
    torch.testing.assert_close(layer(x), before + 7)


@pytest.mark.parametrize("skip", [False, True])
def test_initialisation(skip):
    """Decoder, skip and biases zero, the encoder as ``nn.Linear``: the layer starts as the zero function."""
    layer = TranscoderConfig(d_in=25, d_out=16, num_units=100, skip=skip).build()
    assert 0.97 * 0.2 < layer.encoder.abs().max() <= 0.2
    zero = [p for name, p in layer.named_parameters() if name != "encoder"]
    assert len(zero) == 3 + skip
    assert all(torch.equal(p, torch.zeros_like(p)) for p in zero)


def test_the_skip_is_the_only_difference():
    plain, skip = (TranscoderConfig(d_in=7, d_out=5, num_units=40, skip=s) for s in (False, True))
    assert skip.num_params - plain.num_params == 7 * 5
    assert (plain.label, skip.label) == ("TC", "STC")
    one, other = plain.build(), skip.build()
    assert set(other.state_dict()) - set(one.state_dict()) == {"skip"}
    other.load_state_dict(one.state_dict() | {"skip": torch.zeros(7, 5)})
    x = torch.randn(3, 7)
    assert torch.equal(one(x), other(x))

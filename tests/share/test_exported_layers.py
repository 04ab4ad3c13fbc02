"""Every form of every layer, in the plain PyTorch of exported models: the same outputs from the same tensors."""

import pytest
import torch
from torch import nn
from variants import CASES, parse

from mxd.assets.modeling_spliced import SparseLayer
from mxd.layers import MLPShape
from mxd.share.export import _layer_tensors, _spec
from mxd.splice import SplicedMLP, _TokenIds

SHAPE = MLPShape(d_in=6, d_out=5, hidden=8, activation="gelu_tanh", glu=False)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_an_exported_layer_is_the_layer(case):
    torch.manual_seed(0)
    layer = parse(*case).resolve(SHAPE).build().double().eval()
    for parameter in layer.parameters():
        parameter.data.normal_()
    spliced = SplicedMLP(layer, nn.Identity(), torch.zeros(0, dtype=torch.int64), None, _TokenIds())
    plain = SparseLayer(_spec(spliced, layer)).double()
    plain.load_state_dict(_layer_tensors(layer), strict=True)
    x = torch.randn(2, 4, layer.config.d_in, dtype=torch.float64)
    expected = layer(x)
    torch.testing.assert_close(plain(x), expected)
    assert expected.std() > 0.1

"""Fixtures of the layers' tests."""

import pytest
import torch

from mxd.layers import MLPShape


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def mlp():
    """An MLP's shape whose numbers all differ, so that no two widths can be mixed up unnoticed."""
    return MLPShape(d_in=6, d_out=5, hidden=8, activation="gelu_tanh", glu=False)


@pytest.fixture
def randomise():
    """Give every parameter random float64 values: as initialised, decoders are zero and most facts hold trivially."""

    def fill(layer):
        layer.double()
        for parameter in layer.parameters():
            parameter.data.normal_()
        return layer.eval()

    return fill

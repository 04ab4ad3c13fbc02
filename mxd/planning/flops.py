"""What a replacement costs once it is trained."""

import torch

from mxd.layers import ReplacementConfig
from mxd.planning.profiler import meter

TOKENS = 2048
"""Tokens that are metered; the cost of one is the same."""


def token_flops(config: ReplacementConfig) -> float:
    """Return the FLOPs of a layer's output for one token, two for each multiply-add, dense and sparse alike."""
    with torch.device("meta"):
        layer = config.build().eval()
        x = torch.empty(TOKENS, config.d_in or 0)
    with torch.no_grad():
        cost = meter(lambda: layer(x))
    return (cost.flops + cost.sparse) / TOKENS

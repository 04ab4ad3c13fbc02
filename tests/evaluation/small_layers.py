"""Small layers of every method for the tests of evaluations, and their codes written out in NumPy."""

from pathlib import Path

import numpy as np
import torch

from mxd.artifacts.checkpoint import Trained
from mxd.artifacts.provenance import Provenance
from mxd.layers import LAYERS

UNITS, K = 40, 4


def layer_for(model, number, method="mxd", sparsity=None, seed=0, **fields):
    """A layer of ``UNITS`` units that fits the model's block, none of its parameters left at zero."""
    config = LAYERS[method](sparsity=sparsity or {"kind": "topk", "k": K}, num_units=UNITS, **fields)
    layer = config.resolve(model.mlp_shape(number)).build(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return layer.eval()


def trained_on(base, number, layer, excluded_ids=(0,), **fields):
    """A layer with the provenance of one that was trained for the model's block without the excluded tokens."""
    known = {"model": "a/name", "revision": None, "block": number, "fingerprint": base.fingerprint(number)}
    return Trained(layer, Provenance(**{**known, "excluded_ids": excluded_ids, **fields}), Path())


def dense_code(model, number, layer, rows):
    """All activations ``[contexts, seq, units]``, from the definition: ReLU, then the K largest."""
    x, y = model.record(torch.from_numpy(rows), [number])[number]
    read = (x if layer.config.reads == "mlp_in" else y).double().numpy()
    weight, bias = (p.detach().double().numpy() for p in layer.gates.rows(torch.arange(layer.num_units)))
    active = np.maximum(read @ weight.T + bias, 0)
    if layer.config.sparsity.max_k is not None:
        active = np.where(active >= np.sort(active, -1)[..., [-K]], active, 0)
    return active


def contexts_of(rows):
    """A stream of contexts, as ``token_contexts`` makes."""
    return lambda start: iter(rows[start:])

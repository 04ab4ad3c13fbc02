"""What evaluations measure, written out in NumPy."""

import numpy as np
import pytest
import torch

from mxd.layers import Code


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def check_reconstruction(found: dict, layer, read: torch.Tensor, y: torch.Tensor) -> None:
    with torch.no_grad():
        code = layer.encode(read)
        hat = layer.decode(read, code).double().numpy()
    dense = np.zeros((len(read), layer.num_units))
    np.put_along_axis(dense, code.indices.numpy(), code.activations.numpy().astype(np.float64), 1)
    target, bias = y.double().numpy(), layer.bias.detach().double().numpy()
    error = ((target - hat) ** 2).sum(1)
    assert found["normalized_mse"] == pytest.approx(
        (error / target.shape[1] / np.linalg.norm(target, axis=1)).mean(), rel=1e-4
    )
    fvu = error.sum() / ((target - target.mean(0)) ** 2).sum()
    assert found["fvu"] == pytest.approx(fvu, rel=1e-4)
    assert found["explained_variance"] == pytest.approx(1 - fvu, abs=1e-3 * abs(fvu))
    assert found["l0"] == pytest.approx((dense > 0).sum(1).mean())
    assert found["dead_share"] == pytest.approx(((dense > 0).sum(0) == 0).mean())
    mean_gate = decode_dense(layer, read, np.broadcast_to(dense.mean(0), dense.shape))
    leading = np.zeros_like(dense)
    n = (dense > 0).sum(0).argmax()
    leading[:, n] = dense[:, n]
    shared = decode_dense(layer, read, leading)
    size_of = ((hat - bias) ** 2).sum()
    assert found["routed_share"] == pytest.approx(((hat - mean_gate) ** 2).sum() / size_of, rel=1e-3)
    assert found["shared_share"] == pytest.approx(((shared - bias) ** 2).sum() / size_of, rel=1e-3, abs=1e-6)
    gate_error = ((target - mean_gate) ** 2).mean(1) / np.linalg.norm(target, axis=1)
    assert found["nmse_mean_gate"] == pytest.approx(gate_error.mean(), rel=1e-3)
    total = dense.sum(1, keepdims=True)
    p = np.divide(dense, total, out=np.zeros_like(dense), where=total > 0)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
    assert found["effective_units"] == pytest.approx(np.where(total[:, 0] > 0, np.exp(entropy), 0).mean(), rel=1e-4)


def decode_dense(layer, read: torch.Tensor, dense: np.ndarray) -> np.ndarray:
    """Sum every unit's output times its activation, from the units' own view, plus what no unit explains."""
    zero = Code(torch.zeros(len(read), 1), torch.zeros(len(read), 1, dtype=torch.int64))
    with torch.no_grad():
        out = layer.decode(read, zero).double().numpy()
        for n in np.flatnonzero(dense.sum(0)):
            out = out + dense[:, n : n + 1] * layer.unit_output(int(n), read).double().numpy()
    return out

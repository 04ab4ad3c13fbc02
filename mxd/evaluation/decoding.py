"""How long does decoding take with k of K units? After "Implicit bias in Soft MoE", table 3."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mxd.layers import Code, ReplacementLayer


def decoding_times(
    layer: ReplacementLayer, read: Float[Tensor, "tokens d_in"], shares: Sequence[float], times: int
) -> list[dict[str, Any]]:
    """Time decoding with the k strongest units of each token, for shares of K, the most that any token has active.

    Args:
        layer: the layer.
        read: what it reads at some tokens.
        shares: k over K.
        times: how many times each is decoded, after once to warm up.

    Returns:
        For the code as it is (``share`` and ``k`` None), then for the list of k units of each share: ``k``, and the
        mean in milliseconds, ``ms``, with the standard deviation over the times, ``ms_sd``.
    """
    code = layer.encode(read)
    found: list[dict[str, Any]] = [{"share": None, "k": None, **_timed(layer, read, code, times)}]
    for share, (k, short) in zip(shares, shortened(code, shares), strict=True):
        found.append({"share": share, "k": k, **_timed(layer, read, short, times)})
    return found


def shortened(code: Code, shares: Sequence[float]) -> Iterator[tuple[int, Code]]:
    """Yield for each share a number of units k, and the code that lists only the k strongest units of each token.

    Args:
        code: the code of some tokens.
        shares: of the most units that any of the tokens has active.
    """
    most = int((code.activations > 0).sum(-1).amax())
    for share in shares:
        k = max(1, round(share * most))
        activations, place = code.activations.topk(k)
        yield k, Code(activations, code.indices.gather(-1, place))


def _timed(layer: ReplacementLayer, read: Tensor, code: Code, times: int) -> dict[str, float]:
    taken = []
    for _ in range(times + 1):
        _settle(read.device)
        start = time.perf_counter()
        layer.decode(read, code)
        _settle(read.device)
        taken.append(1e3 * (time.perf_counter() - start))
    return {"ms": float(np.mean(taken[1:])), "ms_sd": float(np.std(taken[1:]))}


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

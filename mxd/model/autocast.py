"""When the base model runs under autocast: bfloat16 products, a float32 residual stream."""

from typing import Literal

import torch

from mxd.common.errors import MxdError
from mxd.ops import dense_dtype

WIDE = 512
"""Width of a base model from which autocast pays on a CPU."""


def under_autocast(asked: Literal["auto"] | bool, dtype: str, device: torch.device, width: int) -> bool:
    """Return whether a base model runs under autocast while its activations are recorded.

    Args:
        asked: ``data.autocast``. ``auto``: a float32 model, wide enough, on a CPU with instructions for bfloat16.
        dtype: the dtype that the model is in.
        device: the device that it is on.
        width: of its embeddings.

    Raises:
        MxdError: it was asked for, and the model is not in float32.
    """
    if asked == "auto":
        return dtype == "float32" and width >= WIDE and dense_dtype(device) == "bfloat16"
    if asked and dtype != "float32":
        raise MxdError(f"data.autocast is for a base model in float32, this one is in {dtype}; leave it at auto.")
    return asked

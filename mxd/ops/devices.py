"""What a device runs: the sparse operations or the dense reference, in which dtype, by whose kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

CandidateDtype = Literal["float32", "bfloat16"]

DEVICES = ("cpu", "cuda")
"""Devices that run the sparse operations; any other (MPS, say) runs the dense reference."""


@dataclass
class _Settings:
    """All that the operations depend on besides their arguments."""

    triton: bool = False
    """Whether CUDA tensors go through the kernels of ``mxd.ops.kernels``."""
    meta_device: str = "cpu"
    """The device that tensors on the meta device stand for."""


_settings = _Settings()


def candidate_dtype(device: torch.device, asked: Literal["auto"] | CandidateDtype = "auto") -> CandidateDtype:
    """Return what was asked for; for ``auto``, ``bfloat16`` where the device has native instructions for it."""
    if asked != "auto":
        return asked
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # there is no public function for it
    return "bfloat16" if device.type == "cpu" and supported() else "float32"


def use_triton(on: bool) -> None:
    """Send CUDA tensors through the Triton kernels of ``mxd.ops.kernels``, or (the default) through PyTorch's own.

    Both give the same up to rounding; `scripts/bench_gpu.py` times them. Off by default: no GPU has timed them yet.
    """
    _settings.triton = on


@contextmanager
def metered_as(device: str) -> Iterator[None]:
    """Inside the ``with`` block, do with tensors on the meta device what would be done on ``device``."""
    before, _settings.meta_device = _settings.meta_device, device
    try:
        yield
    finally:
        _settings.meta_device = before


def runs_triton(tensor: Any) -> bool:
    """Return whether a tensor goes through the Triton kernels."""
    return _settings.triton and tensor.is_cuda


def device_type(tensor: Tensor) -> str:
    """Return the type of a tensor's device; on the meta device, of the one that it stands for."""
    return _settings.meta_device if tensor.is_meta else tensor.device.type


def runs_sparse(tensor: Tensor) -> bool:
    """Return whether the device of a tensor runs the sparse operations; on the meta device, the one it stands for."""
    return device_type(tensor) in DEVICES

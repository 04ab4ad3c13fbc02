"""Checks of loaded tensors."""

from collections.abc import Mapping

from torch import Tensor

from mxd.common.errors import MxdError


def fit_tensors(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], where: str) -> None:
    """Check names, shapes and kinds of loaded tensors.

    Args:
        expected: name -> a tensor of the right shape and kind.
        got: name -> loaded tensor.
        where: where they come from, for messages.

    Raises:
        MxdError: a tensor is missing, extra, of the wrong shape, or of integers in place of floats or the reverse.
    """
    missing, extra = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or extra:
        raise MxdError(f"{where}: missing tensors: {missing or 'none'}; unexpected tensors: {extra or 'none'}.")
    for name, tensor in expected.items():
        if got[name].shape != tensor.shape:
            raise MxdError(f"{where}: {name} has shape {tuple(got[name].shape)}, expected {tuple(tensor.shape)}.")
        if got[name].dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise MxdError(f"{where}: {name} is {got[name].dtype}, expected {tensor.dtype}.")

"""Conversion of a tool's conventions to mxd's: shifted or unscaled inputs, and the norms around an MLP."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mxd.common.errors import MxdError
from mxd.model.frozen import FrozenModel

READERS = (
    ("encoder", "encoder_bias"),
    ("gate", "gate_bias"),
    ("encoder.weight", "encoder.bias"),
    ("encoder.glu_weight", "encoder.glu_bias"),
)
"""Every linear map of the input in a layer's state dict: weight ``[rows, d_in]`` and bias."""


def shift_input(
    tensors: Mapping[str, Tensor], scale: Float[Tensor, " d_in"], shift: Float[Tensor, " d_in"]
) -> dict[str, Tensor]:
    """Return the state dict of a layer that computes from ``x`` what this one computes from ``(x - shift) / scale``.

    ``W' = W / scale``, ``b' = b - W' shift``; summed in float64.

    Args:
        tensors: the layer's state dict.
        scale: divides its inputs.
        shift: is subtracted from them first.
    """
    folded = {name: tensor.double() for name, tensor in tensors.items()}
    scale, shift = scale.double(), shift.double()
    for weight, bias in READERS:
        if weight in folded:
            folded[weight] = folded[weight] / scale
            folded[bias] = folded[bias] - folded[weight] @ shift
    if "skip" in folded:  # [d_in, d_out], the transpose of the others
        folded["skip"] = folded["skip"] / scale.unsqueeze(1)
        folded["bias"] = folded["bias"] - shift @ folded["skip"]
    return {name: tensor.float() for name, tensor in folded.items()}


def norms(model: FrozenModel, block: int) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the module whose output is the MLP's input, and the one, dropout aside, whose input is the MLP's output.

    They are found in a forward pass, by the identity of the tensors; ``None`` where there is none.
    """
    producers: dict[int, nn.Module] = {}
    consumers: dict[int, nn.Module] = {}

    def watch(module: nn.Module) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            producers.setdefault(id(output), module)
            if args and not isinstance(module, nn.Dropout):
                consumers.setdefault(id(args[0]), module)
            alive.append((args, output))  # so that no id is used twice
            if module is mlp:
                site[:] = args[0], output

        return hook

    alive: list[object] = []
    site: list[Any] = []
    mlp = model.mlp(block)
    handles = [module.register_forward_hook(watch(module)) for module in model.blocks[block].modules()]
    try:
        model.logits(torch.zeros(1, 2, dtype=torch.int64))
    finally:
        for handle in handles:
            handle.remove()
    x, y = site
    return producers.get(id(x)), consumers.get(id(y))


def output_hook(model: FrozenModel, block: int) -> str:
    """Return TransformerLens's name, within a block, of the mlp module's output, which depends on a norm after it."""
    return "hook_mlp_out" if norms(model, block)[1] is None else "mlp.hook_out"


def affine(norm: nn.Module | None, width: int) -> tuple[Float[Tensor, " d_in"], Float[Tensor, " d_in"]]:
    """Return gain and bias of a layer norm, ``norm(x) = x^ * gain + bias``.

    Raises:
        MxdError: there is no norm, or its gain is zero somewhere, so that it cannot be inverted.
    """
    if norm is None:
        raise MxdError("no norm of this model makes the MLP's input, so inputs before its affine part have no meaning.")
    if isinstance(norm, nn.LayerNorm):
        gain = norm.weight.detach()
        bias = torch.zeros_like(gain) if norm.bias is None else norm.bias.detach()
    else:  # an RMS norm maps a constant vector to its gain, whether it stores the gain or the gain minus one
        like = next(norm.parameters())
        gain = norm(torch.full((width,), 1000.0, dtype=like.dtype, device=like.device)).detach()
        bias = torch.zeros_like(gain)
    if not bool((gain != 0).all()):
        raise MxdError("the layer norm's gain is zero somewhere, so weights for its input cannot be folded into it.")
    return gain.float().cpu(), bias.float().cpu()

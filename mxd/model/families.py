"""Model families: where each keeps its blocks, and the form and weights of its MLPs.

The site is the block's ``mlp`` module of the unmodified Hugging Face model: its input is the pre-MLP activation
(after the layer norm with its affine part), its output the post-MLP activation, before the residual sum.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mxd.common.errors import MxdError, first_line
from mxd.layers import MLPShape, MLPWeights
from mxd.layers.config import Activation


@dataclass(frozen=True)
class Family:
    """Where a model family keeps its blocks, and the names of its MLP's linear maps."""

    blocks: str
    encoder: str
    decoder: str
    encoder_glu: str | None = None
    """The gate of a GLU. Where it is the encoder itself, the gate is the first half of that map's rows."""


FAMILIES = {
    "gpt2": Family("transformer.h", "c_fc", "c_proj"),
    "gpt_neox": Family("gpt_neox.layers", "dense_h_to_4h", "dense_4h_to_h"),
    "llama": Family("model.layers", "up_proj", "down_proj", encoder_glu="gate_proj"),
    "phi": Family("model.layers", "fc1", "fc2"),
    "phi3": Family("model.layers", "gate_up_proj", "down_proj", encoder_glu="gate_up_proj"),
    "gptj": Family("transformer.h", "fc_in", "fc_out"),
    "nemotron": Family("model.layers", "up_proj", "down_proj"),
}
"""The known forms, by the family that is known for each; others with the same names are read alike (docs/models.md)."""

_ACTIVATION_NAMES: dict[str, Activation] = {
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def find_blocks(module: nn.Module, name: str) -> nn.ModuleList:
    """Return a model's blocks: by the table for known families, else the only list whose members all have an ``mlp``.

    Of a model that reads images, too, these are the blocks of its text decoder.

    Args:
        module: the Hugging Face model.
        name: the model's name in messages.

    Raises:
        MxdError: it has no such list, or several.
    """
    family = FAMILIES.get(getattr(module.config, "model_type", ""))
    if family is not None:
        try:
            return cast(nn.ModuleList, module.get_submodule(family.blocks))
        except AttributeError as error:
            raise MxdError(f"{name}: a {type(module).__name__} has no {family.blocks}; give the causal LM.") from error
    lists = _lists_with_mlp(module)
    if len(lists) > 1 and hasattr(module, "get_decoder"):
        lists = _lists_with_mlp(cast(Any, module).get_decoder())
    if len(lists) != 1:
        count = "no list" if not lists else f"{len(lists)} lists"
        raise MxdError(
            f"{name}: model type {getattr(module.config, 'model_type', '?')!r} has {count} of blocks that carry an "
            f"`mlp` module, which is what a layer replaces{_what_blocks_hold(module)}. {_REMEDY}"
        )
    return lists[0]


def _lists_with_mlp(module: nn.Module) -> list[nn.ModuleList]:
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child)]
    return [blocks for blocks in lists if all(hasattr(unwrap(block), "mlp") for block in blocks)]


def _what_blocks_hold(module: nn.Module) -> str:
    """Return what a model's blocks hold in place of an ``mlp``, for a message; "" where it has no blocks."""
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList) and len(child)]
    if not lists or hasattr(lists[0][0], "mlp"):
        return ""
    return f"; its blocks hold {', '.join(name for name, _ in lists[0][0].named_children())}"


def mlp_slot(block: nn.Module) -> tuple[nn.Module, str]:
    """Return the module and attribute that hold a block's MLP, so that ``setattr`` replaces it.

    On a TransformerLens bridge that is the module inside the MLP's bridge: its ``hook_in`` and ``hook_out`` stay.
    """
    block = unwrap(block)
    if _wrapped(block.mlp):
        return cast(nn.Module, block.mlp), "_original_component"
    return block, "mlp"


def unwrap(module: Any) -> Any:
    """Return the Hugging Face module inside TransformerLens wrappers."""
    while _wrapped(module):
        module = module._original_component
    return module


def _wrapped(module: Any) -> bool:
    return "_original_component" in getattr(module, "_modules", {})


_REMEDY = "docs/models.md lists families that work."

_WIDTHS: WeakKeyDictionary[nn.Module, tuple[int, int]] = WeakKeyDictionary()
"""Widths of MLPs that were run already."""


def mlp_widths(mlp: nn.Module, model: Any, name: str) -> tuple[int, int]:
    """Return an MLP's input and output width, found by running it on two tokens, once.

    Args:
        mlp: the MLP; of a spliced block, its original one.
        model: the Hugging Face model that it belongs to.
        name: its name in messages.

    Raises:
        MxdError: it does not map one tensor to one tensor of the same shape.
    """
    if mlp in _WIDTHS:
        return _WIDTHS[mlp]
    parameter = next(mlp.parameters(), None)
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    refusal = f"{name} ({type(mlp).__name__}) does not map one tensor to one tensor, so it cannot be replaced"
    if "residual" in signature(mlp.forward).parameters:
        raise MxdError(f"{refusal}: it takes the residual stream, too, and adds it inside. {_REMEDY}")
    if parameter is None or width is None:
        raise MxdError(f"{refusal}: it has no parameters, or its config no hidden_size. {_REMEDY}")
    try:
        with torch.no_grad():
            dtype = parameter.dtype if parameter.is_floating_point() else getattr(model, "dtype", torch.float16)
            out = mlp(torch.zeros(1, 2, width, dtype=dtype, device=parameter.device))
    except (TypeError, RuntimeError, ValueError) as error:
        raise MxdError(f"{refusal}: {first_line(error)}. {_REMEDY}") from error
    if not isinstance(out, Tensor) or out.shape[:2] != (1, 2):
        raise MxdError(f"{refusal}: it returns a {type(out).__name__}. {_REMEDY}")
    _WIDTHS[mlp] = width, out.shape[-1]
    return _WIDTHS[mlp]


def mlp_shape(mlp: nn.Module, config: Any, widths: tuple[int, int]) -> MLPShape:
    """Return an MLP's form, with ``None`` for what cannot be read.

    Args:
        mlp: the MLP.
        config: the Hugging Face config of its model.
        widths: its input and output width (``mlp_widths``).
    """
    family = _family_of(mlp)
    if family is None:
        return MLPShape(*widths)
    return MLPShape(
        *widths,
        hidden=_read(mlp, family.decoder)[0].shape[1],
        activation=_activation(config),
        glu=family.encoder_glu is not None,
    )


def mlp_weights(mlp: nn.Module) -> MLPWeights:
    """Return an MLP's weights in this project's layout.

    Raises:
        MxdError: its form is not one of ``FAMILIES``, or its gate has a bias.
    """
    family = _family_of(mlp)
    if family is None:
        raise MxdError(f"the weights of {type(mlp).__name__} cannot be read; known forms: {', '.join(FAMILIES)}.")
    encoder, encoder_bias = _read(mlp, family.encoder)
    decoder, decoder_bias = _read(mlp, family.decoder)
    glu, glu_bias = _read(mlp, family.encoder_glu) if family.encoder_glu else (None, None)
    if family.encoder_glu == family.encoder:
        glu, encoder = encoder.chunk(2)
    if glu_bias is not None:
        raise MxdError(f"{type(mlp).__name__} has a bias on its gate; such GLU weights cannot be copied.")
    return MLPWeights(encoder, encoder_bias, glu, decoder.T, decoder_bias)


def _family_of(mlp: nn.Module) -> Family | None:
    """Return the family in the table with exactly this MLP's linear maps, of matching shapes, or ``None``."""
    for family in FAMILIES.values():
        names = {n for n in (family.encoder, family.decoder, family.encoder_glu) if n}
        with_weights = {n for n, child in mlp.named_children() if any(True for _ in child.parameters())}
        halves = 2 if family.encoder_glu == family.encoder else 1
        if names == with_weights:
            rows, columns = _read(mlp, family.encoder)[0].shape[0], _read(mlp, family.decoder)[0].shape[1]
            return family if rows == halves * columns else None
    return None


def _read(mlp: nn.Module, name: str) -> tuple[Float[Tensor, "out in"], Float[Tensor, " out"] | None]:
    """Return weight and bias of one of the MLP's linear maps (GPT-2's Conv1D stores ``[in, out]``)."""
    linear = unwrap(getattr(mlp, name))
    weight = linear.weight.detach()
    bias = linear.bias.detach() if linear.bias is not None else None
    return (weight.T if type(linear).__name__ == "Conv1D" else weight), bias


def _activation(config: Any) -> Activation | None:
    text = config.get_text_config()
    for name in ("hidden_activation", "activation_function", "hidden_act", "activation"):
        if getattr(text, name, None):
            return _ACTIVATION_NAMES.get(getattr(text, name))
    return None

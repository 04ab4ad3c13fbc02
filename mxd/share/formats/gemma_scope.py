"""Gemma Scope 2 transcoders, import only: JumpReLU, some with an affine skip.

<folder>/config.json           hf_hook_point_in, hf_hook_point_out, architecture, model_name
<folder>/params.safetensors    w_enc [d, n], b_enc [n], w_dec [n, o], b_dec [o], threshold [n], and in
                               some affine_skip_connection [d, o]

    y = a w_dec + b_dec + x affine_skip_connection,   a = pre * (pre > threshold),   pre = x w_enc + b_enc

They predict what the block adds to the residual stream, which in Gemma is a norm of the MLP's output.
"""

from pathlib import Path

from mxd.common.errors import MxdError
from mxd.layers.sparsity import JumpReLUConfig
from mxd.share.formats.base import (
    Format,
    Incoming,
    ToolConfig,
    as_transcoder,
    positive_thresholds,
    read_tensors,
    read_tool_config,
    site,
    take,
)

NAMES = {
    "w_enc": "encoder",
    "b_enc": "encoder_bias",
    "w_dec": "decoder",
    "b_dec": "bias",
    "affine_skip_connection": "skip",
    "threshold": "sparsity.threshold",
}


class GemmaScopeConfig(ToolConfig):
    """``config.json``."""

    architecture: str
    hf_hook_point_in: str
    hf_hook_point_out: str | None = None
    model_name: str | None = None
    width: int | None = None


def read(path: Path) -> list[Incoming]:
    """Read one transcoder's folder.

    Raises:
        MxdError: no such files, or an autoencoder or cross-layer transcoder.
    """
    where, settings = str(path), read_tool_config(path / "config.json", GemmaScopeConfig)
    if settings.architecture != "jump_relu":
        raise MxdError(f"{where}: architecture {settings.architecture!r}, expected 'jump_relu'.")
    if settings.hf_hook_point_out in (None, settings.hf_hook_point_in):
        raise MxdError(f"{where} is an autoencoder of {settings.hf_hook_point_in}: it does not replace an MLP.")
    weights = take(read_tensors(path / "params.safetensors"), NAMES, where)
    if "encoder" in weights:
        weights["encoder"] = weights["encoder"].mT
    positive_thresholds(where, weights)
    config, tensors = as_transcoder(where, weights, JumpReLUConfig(), {"width": (settings.width, "encoder", 0)})
    block, input, writes = site(settings.hf_hook_point_in, settings.hf_hook_point_out, where)
    return [Incoming(where, config, tensors, settings.model_name, block, input, writes)]


FORMAT = Format(read)

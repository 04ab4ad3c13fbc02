"""EleutherAI's sparsify: a folder for each hookpoint, named by the module's path under ``model.base_model``.

<hookpoint>/cfg.json            k, num_latents, skip_connection, transcode ...
<hookpoint>/sae.safetensors     encoder.weight [n, d], encoder.bias [n], W_dec [n, d], b_dec [d], W_skip [d, d]
<hookpoint>/mxd.json            the layer's provenance, where mxd wrote it

    y = TopK(relu(x encoder.weight^T + encoder.bias)) W_dec + b_dec + x W_skip^T

or, with ``activation: groupmax``, the largest of each of k groups of neighbouring units in place of TopK.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import PositiveInt
from safetensors.torch import save_file

from mxd.common.errors import MxdError
from mxd.common.files import atomic_folder, write_json
from mxd.layers.sparsity import GroupMaxConfig, RandomKConfig, TopKConfig
from mxd.model.frozen import FrozenModel
from mxd.share.formats.base import (
    Format,
    Incoming,
    Outgoing,
    ToolConfig,
    as_transcoder,
    config_folders,
    only_one_per_block,
    read_tensors,
    read_tool_config,
    take,
    weights_of,
)

NAMES = {
    "encoder.weight": "encoder",
    "encoder.bias": "encoder_bias",
    "W_dec": "decoder",
    "b_dec": "bias",
    "W_skip": "skip",
}


class SparsifyConfig(ToolConfig):
    """``cfg.json``."""

    activation: Literal["topk", "groupmax"] = "topk"
    d_in: PositiveInt
    k: PositiveInt
    num_latents: int = 0
    transcode: bool = False
    skip_connection: bool = False


def read(path: Path) -> list[Incoming]:
    """Read one hookpoint's folder, or a folder of them.

    Raises:
        MxdError: no such files, an autoencoder, or a hookpoint that is no block's MLP.
    """
    return [_read(folder.resolve()) for folder in config_folders(path, "sparse coder")]


def _read(folder: Path) -> Incoming:
    where, settings = str(folder), read_tool_config(folder / "cfg.json", SparsifyConfig)
    if not settings.transcode:
        raise MxdError(f"{where} is an autoencoder (transcode is false): it explains an MLP and does not replace it.")
    weights = take(read_tensors(folder / "sae.safetensors"), NAMES, where)
    if settings.skip_connection != ("skip" in weights):
        raise MxdError(f"{where}: skip_connection is {settings.skip_connection}, the tensors say otherwise.")
    if "skip" in weights:
        weights["skip"] = weights["skip"].T
    sparsity = GroupMaxConfig(k=settings.k) if settings.activation == "groupmax" else TopKConfig(k=settings.k)
    stated = {"d_in": (settings.d_in, "encoder", 1), "num_latents": (settings.num_latents or None, "encoder", 0)}
    config, tensors = as_transcoder(where, weights, sparsity, stated)
    match = re.fullmatch(r"(?:.*\.)?(\d+)\.mlp", folder.name)
    if match is None and re.search(r"\.\d+(\.|$)", folder.name):
        raise MxdError(f"{where}: hookpoint {folder.name!r} is no block's MLP, which is all that mxd replaces.")
    note = folder / "mxd.json"
    provenance = read_tool_config(note, ToolConfig).provenance if note.is_file() else None
    return Incoming(where, config, tensors, block=int(match[1]) if match else None, provenance=provenance)


def write(layers: Sequence[Outgoing], out: Path, base: FrozenModel) -> list[Path]:
    """Write a folder for each block's MLP.

    Args:
        layers: at most one for each block.
        out: the folder that gets them.
        base: their base model.

    Raises:
        MxdError: two layers for one block, an output of another width, or a folder that exists.
    """
    only_one_per_block(layers, "sparsify")
    return [_write(item, out / hookpoint(base, item.provenance.block)) for item in layers]


def _write(item: Outgoing, folder: Path) -> Path:
    config, weights = item.layer.config, weights_of(item.layer)
    sparsity = config.sparsity
    assert config.d_in and config.num_units and isinstance(sparsity, TopKConfig | RandomKConfig | GroupMaxConfig)
    if config.d_in != config.d_out:
        raise MxdError(f"sparsify has one width for input and output; this layer's are {config.d_in}, {config.d_out}.")
    if folder.exists():
        raise MxdError(f"{folder} exists; choose another folder.")
    if "skip" in weights:
        weights["skip"] = weights["skip"].T.contiguous()
    with atomic_folder(folder) as partial:
        save_file({name: weights[ours] for name, ours in NAMES.items() if ours in weights}, partial / "sae.safetensors")
        settings = {
            "activation": "groupmax" if isinstance(sparsity, GroupMaxConfig) else "topk",
            "expansion_factor": max(1, config.num_units // config.d_in),
            "normalize_decoder": False,
            "num_latents": config.num_units,
            "k": sparsity.k,
            "multi_topk": False,
            "skip_connection": config.skip,
            "transcode": True,
            "d_in": config.d_in,
        }
        write_json(partial / "cfg.json", settings)
        write_json(partial / "mxd.json", {"mxd": item.note})  # its own file, since sparsify warns of unknown keys
    return folder


def hookpoint(base: FrozenModel, block: int) -> str:
    """Return the path of a block's MLP under ``model.base_model``, for example ``h.3.mlp``."""
    inner = getattr(base.module, "base_model", base.module)
    return next(name for name, module in inner.named_modules() if module is base.mlp(block))


FORMAT = Format(read, write, kinds=("topk", "random_k", "group_max"))

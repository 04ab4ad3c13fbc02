"""SAELens 6: one folder for each transcoder. It has ReLU and JumpReLU, no TopK.

<folder>/cfg.json                   architecture, sizes, conventions; hook names and training text under ``metadata``
<folder>/sae_weights.safetensors    W_enc [d, n], b_enc [n], W_dec [n, o], b_dec [o], threshold [n], W_skip [o, d]

    y = a W_dec + b_dec + x W_skip^T,   a = relu(pre) * (pre > threshold),   pre = x W_enc + b_enc
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt
from safetensors.torch import save_file

from mxd.common.errors import MxdError, unknown
from mxd.common.files import atomic_folder, write_json
from mxd.layers.sparsity import AnySparsity, JumpReLUConfig, ReLUL1Config
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
    site,
    take,
    weights_of,
)
from mxd.share.formats.conventions import output_hook

NAMES = {
    "W_enc": "encoder",
    "b_enc": "encoder_bias",
    "W_dec": "decoder",
    "b_dec": "bias",
    "W_skip": "skip",
    "threshold": "sparsity.threshold",
}
TRANSPOSED = ("encoder", "skip")
ARCHITECTURES = {  # name -> (skip, kind of sparsity)
    "transcoder": (False, "relu_l1"),
    "skip_transcoder": (True, "relu_l1"),
    "jumprelu_transcoder": (False, "jumprelu"),
    "jumprelu_skip_transcoder": (True, "jumprelu"),
}
VERSION = "6.0.0"
"""The oldest SAELens that reads what is written here."""


class SAELensMetadata(ToolConfig):
    """``metadata`` of ``cfg.json``."""

    model_name: str | None = None
    hook_name: str | None = None
    hook_name_out: str | None = None
    hf_hook_name: str | None = None
    hf_hook_name_out: str | None = None
    dataset_path: str | None = None
    context_size: PositiveInt | None = None
    prepend_bos: bool | None = None


class SAELensConfig(ToolConfig):
    """``cfg.json``."""

    architecture: str
    d_in: PositiveInt
    d_sae: PositiveInt
    d_out: PositiveInt
    apply_b_dec_to_input: bool = True
    normalize_activations: str = "none"
    reshape_activations: Literal["none", "hook_z"] = "none"
    metadata: SAELensMetadata = Field(default_factory=SAELensMetadata)


def read(path: Path) -> list[Incoming]:
    """Read one transcoder's folder, or a folder of them.

    Raises:
        MxdError: no such files, an autoencoder, or inputs that are changed by something not linear.
    """
    return [_read(folder) for folder in config_folders(path, "transcoder")]


def _read(folder: Path) -> Incoming:
    where, settings = str(folder), read_tool_config(folder / "cfg.json", SAELensConfig)
    if settings.architecture not in ARCHITECTURES:
        raise unknown("architecture", settings.architecture, ARCHITECTURES, f"({where})")
    _check_conventions(where, settings)
    skip, kind = ARCHITECTURES[settings.architecture]
    weights = take(read_tensors(folder / "sae_weights.safetensors"), NAMES, where)
    if ("skip" in weights, "sparsity.threshold" in weights) != (skip, kind == "jumprelu"):
        raise MxdError(f"{where}: the tensors are not those of a {settings.architecture}.")
    sparsity: AnySparsity = JumpReLUConfig() if kind == "jumprelu" else ReLUL1Config(l1=0.0)
    stated = {
        "d_in": (settings.d_in, "encoder", 1),
        "d_sae": (settings.d_sae, "encoder", 0),
        "d_out": (settings.d_out, "decoder", 1),
    }
    transposed = {name: t.T if name in TRANSPOSED else t for name, t in weights.items()}
    config, tensors = as_transcoder(where, transposed, sparsity, stated)
    metadata = settings.metadata
    # Names of modules are more reliable than TransformerLens's: Gemma Scope 2 calls the normed input hook_mlp_in.
    block, input, writes = site(
        metadata.hf_hook_name or metadata.hook_name, metadata.hf_hook_name_out or metadata.hook_name_out, where
    )
    data = {"source": metadata.dataset_path, "context": metadata.context_size, "bos": metadata.prepend_bos}
    return Incoming(
        where,
        config,
        tensors,
        model=metadata.model_name,
        block=block,
        input=input,
        writes=writes,
        record={"data": {name: value for name, value in data.items() if value is not None}},
        provenance=metadata.provenance,
    )


def _check_conventions(where: str, settings: SAELensConfig) -> None:
    if settings.apply_b_dec_to_input:
        raise MxdError(f"{where}: apply_b_dec_to_input is true, which SAELens itself refuses for a transcoder.")
    if settings.normalize_activations != "none":
        raise MxdError(
            f"{where}: normalize_activations is {settings.normalize_activations!r}; the scale is not in the files or "
            "differs from token to token. Fold it into the weights in SAELens, where that is possible, and save again."
        )
    if settings.reshape_activations != "none":
        raise MxdError(f"{where}: reshape_activations {settings.reshape_activations!r} is for attention outputs.")


def write(layers: Sequence[Outgoing], out: Path, base: FrozenModel) -> list[Path]:
    """Write a folder for each block, ``blocks.3.mlp``.

    Args:
        layers: at most one for each block.
        out: the folder that gets them.
        base: their base model.

    Raises:
        MxdError: two layers for one block, or a folder that exists.
    """
    only_one_per_block(layers, "a folder of SAELens transcoders")
    paths = {id(module): path for path, module in base.module.named_modules()}
    return [
        _write(
            item,
            out / f"blocks.{item.provenance.block}.mlp",
            paths[id(base.mlp(item.provenance.block))],
            output_hook(base, item.provenance.block),
        )
        for item in layers
    ]


def _write(item: Outgoing, folder: Path, module: str, hook_out: str) -> Path:
    config, weights, provenance = item.layer.config, weights_of(item.layer), item.provenance
    if folder.exists():
        raise MxdError(f"{folder} exists; choose another folder.")
    tensors = {
        name: (weights[ours].T if ours in TRANSPOSED else weights[ours]).contiguous()
        for name, ours in NAMES.items()
        if ours in weights
    }
    block, text = f"blocks.{provenance.block}", provenance.data
    metadata: dict[str, Any] = {
        "sae_lens_version": VERSION,
        "sae_lens_training_version": None,
        "model_name": provenance.model,
        "hook_name": f"{block}.mlp.hook_in",
        "hook_name_out": f"{block}.{hook_out}",
        "hf_hook_name": f"{module}.input",
        "hf_hook_name_out": f"{module}.output",
        "dataset_path": text.get("source"),
        "context_size": text.get("context"),
        "prepend_bos": text.get("bos"),
        "exclude_special_tokens": list(provenance.excluded_ids) or False,
        "mxd": item.note,
    }
    with atomic_folder(folder) as partial:
        save_file(tensors, partial / "sae_weights.safetensors")
        settings = {
            "architecture": next(
                name for name, form in ARCHITECTURES.items() if form == (config.skip, config.sparsity.kind)
            ),
            "d_in": config.d_in,
            "d_sae": config.num_units,
            "d_out": config.d_out,
            "dtype": "float32",
            "device": "cpu",
            "apply_b_dec_to_input": False,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "metadata": metadata,
        }
        write_json(partial / "cfg.json", settings)
    return folder


FORMAT = Format(read, write, kinds=("relu_l1", "jumprelu"))

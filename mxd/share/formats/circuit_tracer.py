"""circuit-tracer: a set of transcoders, one for each block from 0 on, all of one width.

config.yaml               model_name, model_kind, feature_input_hook, feature_output_hook, activation, k
layer_{i}.safetensors     W_enc [n, d], b_enc [n], W_dec [n, d], b_dec [d], W_skip [d, d], activation_function.threshold

    y = a W_dec + b_dec + x W_skip^T,   pre = x W_enc^T + b_enc
    a = relu(pre), or pre * (pre > threshold), or the k largest of pre, even where they are negative

The last is not mxd's TopK, which applies ReLU first: they differ for tokens with fewer than k positive pre-activations.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
import yaml
from jaxtyping import Float
from pydantic import PositiveInt
from safetensors.torch import save_file
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.common.files import atomic_folder
from mxd.layers.gates import Code
from mxd.layers.sparsity import AnySparsity, JumpReLUConfig, RandomKConfig, ReLUL1Config, TopKConfig
from mxd.layers.transcoder import Transcoder
from mxd.model.frozen import FrozenModel
from mxd.share.formats.base import (
    Format,
    Incoming,
    Outgoing,
    ToolConfig,
    as_transcoder,
    only_one_per_block,
    positive_thresholds,
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
    "activation_function.threshold": "sparsity.threshold",
}
TOPK_NOTE = (
    "circuit-tracer's TopK keeps negative pre-activations where fewer than k are positive, mxd's never does: outputs "
    "differ for such tokens"
)


class CircuitTracerConfig(ToolConfig):
    """``config.yaml``."""

    model_name: str | None = None
    model_kind: Literal["transcoder_set", "cross_layer_transcoder"] = "transcoder_set"
    feature_input_hook: str
    feature_output_hook: str
    activation: Literal["relu", "topk", "jump_relu", "jumprelu"] | None = None
    k: PositiveInt | None = None
    transcoders: list[str] | None = None


def read(path: Path) -> list[Incoming]:
    """Read a set.

    Raises:
        MxdError: no such files, a cross-layer transcoder, files elsewhere, or inputs that are not an MLP's.
    """
    settings = read_tool_config(path / "config.yaml", CircuitTracerConfig)
    if settings.model_kind != "transcoder_set":
        raise MxdError(f"{path} is a {settings.model_kind}: it writes to all later blocks, which no layer of mxd does.")
    if settings.activation == "topk" and settings.k is None:
        raise MxdError(f"{path}/config.yaml: activation is topk and k is not given.")
    return [_read(file, number, settings) for number, file in enumerate(_files(path, settings.transcoders))]


def _files(folder: Path, listed: list[str] | None) -> list[Path]:
    """Return the set's files, all of them in the folder, whatever the config names."""
    if listed is None:
        count = len(list(folder.glob("layer_*.safetensors")))
        if not count:
            raise MxdError(f"{folder} holds no layer_0.safetensors.")
        return [folder / f"layer_{number}.safetensors" for number in range(count)]
    for name in listed:
        if "://" in name or not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise MxdError(
                f"{folder}/config.yaml names {name!r}, which is not in this folder, and nothing is fetched because a "
                "file says so. Download it yourself (hf download), list it by its name here, and convert again."
            )
    return [folder / name for name in listed]


def _read(file: Path, number: int, settings: CircuitTracerConfig) -> Incoming:
    where = str(file)
    weights = take(read_tensors(file), NAMES, where)
    if "skip" in weights:
        weights["skip"] = weights["skip"].T
    positive_thresholds(where, weights)
    sparsity: AnySparsity = ReLUL1Config(l1=0.0)
    if settings.activation == "topk":
        sparsity = TopKConfig(k=settings.k or 0)
    elif "sparsity.threshold" in weights:
        sparsity = JumpReLUConfig()
    config, tensors = as_transcoder(where, weights, sparsity)
    _, input, writes = site(settings.feature_input_hook, settings.feature_output_hook, where)
    recorded = settings.provenance  # a list, by block
    provenance = recorded[number] if isinstance(recorded, list) and number < len(recorded) else None
    notes = (TOPK_NOTE,) if settings.activation == "topk" else ()
    return Incoming(
        where, config, tensors, settings.model_name, number, input, writes, provenance=provenance, notes=notes
    )


def write(layers: Sequence[Outgoing], out: Path, base: FrozenModel) -> list[Path]:
    """Write a set.

    Args:
        layers: one for each block from 0 on.
        out: the folder.
        base: their base model.

    Raises:
        MxdError: not one layer for each block from 0 on, several widths or sparsities, or a folder that exists.
    """
    only_one_per_block(layers, "circuit-tracer")
    by_block = {item.provenance.block: item for item in layers}
    numbers = sorted(by_block)
    if numbers != list(range(len(layers))):
        raise MxdError(f"circuit-tracer needs one layer for each block from 0 on; these replace {numbers}.")
    shapes = {(item.layer.config.d_in, item.layer.config.d_out, item.layer.config.num_units) for item in layers}
    forms = {(item.layer.config.skip, _activation(item.layer)) for item in layers}
    if len(shapes) > 1 or len(forms) > 1:
        raise MxdError(
            f"a set of circuit-tracer has one width, one activation, and skips everywhere or nowhere; these have "
            f"(d_in, d_out, units) {sorted(shapes)} and (skip, activation) {sorted(forms)}."
        )
    if out.exists():
        raise MxdError(f"{out} exists; choose another folder.")
    skip, (activation, k) = forms.pop()
    settings = {
        "model_name": layers[0].provenance.model,
        "model_kind": "transcoder_set",
        "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": output_hook(base, 0),
        "activation": activation,
        "k": k,
        "mxd": {name: [by_block[i].note[name] for i in numbers] for name in ("provenance", "loss")},
    }
    with atomic_folder(out) as partial:
        for number in numbers:
            weights = weights_of(by_block[number].layer)
            if skip:
                weights["skip"] = weights["skip"].T.contiguous()
            tensors = {name: weights[ours] for name, ours in NAMES.items() if ours in weights}
            save_file(tensors, partial / f"layer_{number}.safetensors")
        text = yaml.safe_dump({k: v for k, v in settings.items() if v is not None}, sort_keys=False)
        (partial / "config.yaml").write_text(text, encoding="utf-8")
    return [out / f"layer_{item.provenance.block}.safetensors" for item in layers]


def _activation(layer: Transcoder) -> tuple[str, int | None]:
    sparsity = layer.config.sparsity
    if isinstance(sparsity, TopKConfig | RandomKConfig):
        return "topk", sparsity.k
    return ("jumprelu" if isinstance(sparsity, JumpReLUConfig) else "relu"), None


def topk_without_relu(layer: Transcoder, x: Float[Tensor, "tokens d_in"]) -> tuple[Code, Float[Tensor, "tokens d_out"]]:
    """Return the code and output that circuit-tracer computes for a TopK layer."""
    sparsity = layer.config.sparsity
    assert isinstance(sparsity, TopKConfig | RandomKConfig)
    code = Code(*torch.topk(layer.pre_activations(x), sparsity.k, dim=-1))
    return code, layer.decode(x, code)


FORMAT = Format(read, write, kinds=("topk", "random_k", "relu_l1", "jumprelu"), forward=topk_without_relu)

"""The reference code's files, import only: the MxD paper's (james-oldfield/MxD) and, before it, Dunefsky et al.'s.

A pickle ``{"cfg", "state_dict"}``, read by torch's weights-only loader: tensors, numbers, strings, containers, and an
inert class in place of the config's. Anything else in the file is refused, and nothing in it is run.

    Dunefsky et al.:  y = relu((x - b_dec) W_enc + b_enc) W_dec + b_dec_out
    MxD's:            y = TopK(relu(x W_enc + b_enc)) W_dec + b_dec_out + x W_skip^T                 (transcoders)
                      y = (act(x W_enc + b_enc) * (x W_glu^T + b_glu)) W_dec * (a W_cond^T) + b_dec_out        (MxD)
                      a = TopK(relu(x gate^T + gate_bias))

with ``W_enc [d, n]``, ``W_dec [n, o]``, ``gate [N, d]``, ``W_cond [o, N]``. Both train on TransformerLens's processed
weights: ``x`` comes before the affine part of the layer norm, and ``y`` is centred where that norm is a LayerNorm.
"""

import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from mxd.common.errors import MxdError, told
from mxd.layers.config import Activation, ReplacementConfig
from mxd.layers.mxd import MxDConfig
from mxd.layers.sparsity import AnySparsity, ReLUL1Config, TopKConfig
from mxd.share.formats.base import DTYPES, Format, Incoming, as_transcoder, site, take
from mxd.share.formats.conventions import shift_input

CONFIG_CLASS = "sae_training.config.LanguageModelSAERunnerConfig"
TRANSCODER = {"W_enc": "encoder", "b_enc": "encoder_bias", "W_dec": "decoder", "b_dec_out": "bias"}
SKIP = {"W_skip.weight": "skip"}
MXD = {
    "W_enc": "encoder.weight",
    "b_enc": "encoder.bias",
    "W_dec": "decoder",
    "b_dec_out": "bias",
    "gate": "gate",
    "gate_bias": "gate_bias",
    "W_cond": "expert_scale",
}
# The reference applies its activation to W_enc; in mxd's GLU encoder that half is ``encoder.glu_weight``.
MXD_GLU = MXD | {
    "W_enc": "encoder.glu_weight",
    "b_enc": "encoder.glu_bias",
    "W_glu.weight": "encoder.weight",
    "W_glu.bias": "encoder.bias",
}
ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}

KINDS = {
    "mlp_activation_fn": str,
    "hook_point": str,
    "out_hook_point": str,
    "model_name": str,
    "dataset_path": str,
    "context_size": int,
    "total_training_tokens": int,
    "seed": int,
}
"""Types of the settings, except those that only serve as truth values; any may be missing."""


class InertConfig:
    """Takes the place of the reference's config class: unpickling fills its ``__dict__`` and calls nothing."""


def read(path: Path) -> list[Incoming]:
    """Read one file.

    Raises:
        MxdError: no such file, contents beyond weights and a plain config, an autoencoder, or a form that mxd lacks.
    """
    cfg, state = _load(path)
    where = str(path)
    for name, kind in KINDS.items():
        if not isinstance(cfg.get(name), kind | None):
            raise MxdError(f"{where}: {name} of its cfg is a {type(cfg[name]).__name__}, expected {kind.__name__}.")
    if not cfg.get("is_transcoder"):
        raise MxdError(f"{where} is an autoencoder (is_transcoder is false): it does not replace an MLP.")
    if "use_conditional" not in cfg:
        config, tensors = _dunefsky(where, state)
    elif cfg["use_conditional"]:
        config, tensors = _mxd(where, cfg, state)
    else:
        config, tensors = _transcoder(where, cfg, state)
    block, input, _ = site(cfg.get("hook_point"), cfg.get("out_hook_point"), where)
    data = {"source": cfg.get("dataset_path"), "context": cfg.get("context_size")}
    record = {
        "data": {name: value for name, value in data.items() if value is not None},
        "training": {name: cfg[name] for name in ("lr", "l1_coefficient", "train_batch_size") if name in cfg},
        "tokens": cfg.get("total_training_tokens") or 0,
        "seed": cfg.get("seed") or 0,
    }
    return [Incoming(where, config, tensors, cfg.get("model_name"), block, input or "normalized", "centred", record)]


def _load(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read config and tensors without running anything in the file."""
    if not path.is_file():
        raise MxdError(f"no file at {str(path)!r}; the reference code writes NAME.pt.")
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([(InertConfig, CONFIG_CLASS)]):
            warnings.simplefilter("ignore")  # about pickle protocols, which it refuses anyway if they are unknown
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it needs {name[1]}" if name else "it is not a file that torch.save wrote"
        raise MxdError(
            f"{path} is refused: {reason}, and mxd reads tensors, plain values and the reference's config class only, "
            "since a pickle can run any code. Load it where you trust it, and torch.save a dict of cfg (vars(cfg)) and "
            "state_dict."
        ) from error
    except Exception as error:  # a damaged file can make the loader raise anything
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise MxdError(f"cannot read {path}, expected a file that torch.save wrote: {reason}.") from error
    cfg = content.get("cfg") if isinstance(content, dict) else None
    state = content.get("state_dict") if isinstance(content, dict) else None
    cfg = vars(cfg) if isinstance(cfg, InertConfig) else cfg
    if not isinstance(cfg, dict) or not isinstance(state, dict):
        raise MxdError(f"{path}: expected a mapping with cfg and state_dict.")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
            raise MxdError(f"{path}: {name} is not a tensor of float32, bfloat16 or float16.")
    return cfg, {name: tensor.detach().float() for name, tensor in state.items()}


def _dunefsky(where: str, state: dict[str, Tensor]) -> tuple[ReplacementConfig, dict[str, Tensor]]:
    shift = state.pop("b_dec", None)
    if shift is None or "W_enc" not in state or shift.shape != state["W_enc"].shape[:1]:
        raise MxdError(f"{where}: b_dec is missing or not as wide as the input.")
    config, tensors = as_transcoder(where, _transposed(take(state, TRANSCODER, where)), ReLUL1Config(l1=0.0))
    return config, shift_input(tensors, torch.ones_like(shift), shift)


def _transcoder(where: str, cfg: Mapping[str, Any], state: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    if cfg.get("use_glu") or cfg.get("mlp_activation_fn") != "relu":
        raise MxdError(
            f"{where} is a transcoder with use_glu {cfg.get('use_glu')} and activation "
            f"{cfg.get('mlp_activation_fn')!r}; mxd's have ReLU and no GLU."
        )
    state.pop("b_dec", None)  # in the file, but not used by transcoders
    return as_transcoder(where, _transposed(take(state, TRANSCODER | SKIP, where)), _sparsity(cfg))


def _mxd(where: str, cfg: Mapping[str, Any], state: dict[str, Tensor]) -> tuple[MxDConfig, dict[str, Tensor]]:
    activation, glu = cfg.get("mlp_activation_fn"), bool(cfg.get("use_glu"))
    if activation not in ACTIVATIONS or cfg.get("use_skip"):
        raise MxdError(
            f"{where} is an MxD with activation {activation!r} and use_skip {cfg.get('use_skip')}; mxd reads "
            f"{', '.join(ACTIVATIONS)} and no skip."
        )
    state.pop("b_dec", None)
    tensors = take(state, MXD_GLU if glu else MXD, where)
    for name in ("encoder.glu_weight" if glu else "encoder.weight", "expert_scale"):
        if name not in tensors or tensors[name].ndim != 2:
            raise MxdError(f"{where}: the {name} is missing or not a matrix.")
        tensors[name] = tensors[name].T.contiguous()
    hidden, d_in = tensors["encoder.glu_weight" if glu else "encoder.weight"].shape
    units, d_out = tensors["expert_scale"].shape
    fields: dict[str, Any] = {"d_in": d_in, "d_out": d_out, "num_units": units, "hidden": hidden, "glu": glu}
    try:
        config = MxDConfig(activation=ACTIVATIONS[activation], sparsity=_sparsity(cfg), **fields)
    except ValidationError as error:
        raise MxdError(f"{where}: {told(error)}.") from error
    return config, tensors


def _sparsity(cfg: Mapping[str, Any]) -> AnySparsity:
    k = cfg.get("topk")
    return TopKConfig(k=k) if isinstance(k, int) and k > 0 else ReLUL1Config(l1=0.0)


def _transposed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.T if name in ("encoder", "skip") else t for name, t in weights.items()}


FORMAT = Format(read)

"""Base models from anywhere: a bundled name, the Hub, a folder, a GGUF file, or a model that is loaded already."""

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from mxd.common.bundled import MODELS as BUNDLED
from mxd.common.bundled import bundled, check_model
from mxd.common.errors import MxdError, first_line, unknown
from mxd.common.hardware import amount, free_memory
from mxd.common.network import asking_hub
from mxd.model.families import find_blocks
from mxd.model.frozen import FrozenModel
from mxd.model.plain import PlainModel
from mxd.model.vetting import ModelFiles, WeightCounts, bounded, find_weights, read_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.float16}
"""Dtypes of a base model's activations. ``int8``: weights of linear maps in 8 bits (LLM.int8()), all else float16."""


def load_frozen(
    source: Any,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    tokenizer: Any = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    allow_pickle: bool = False,
) -> FrozenModel:
    """Load a base model and freeze it.

    Its files are not trusted: docs/security.md says what is checked before transformers reads them.

    Args:
        source: a bundled name (``tiny-gpt2``), a Hub id, a local folder, a ``.gguf`` file, a loaded Hugging Face
            model, a TransformerLens bridge, or a module of one's own (``PlainModel``).
        revision: branch, tag or commit on the Hub.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``int8`` (needs bitsandbytes: ``pip install 'mxd[bnb]'``);
            loaded objects keep their dtype.
        device: ``auto`` (the best available), ``cpu``, ``cuda``, ``cuda:1``; loaded objects stay where they are.
        tokenizer: used for loaded objects; otherwise the source's own is loaded.
        trust_remote_code: run model code from the repository, and kernels that its config names.
        local_files_only: never ask the Hub.
        allow_pickle: read ``pytorch_model.bin`` where there is no safetensors file, by torch's weights-only loader.

    Raises:
        MxdError: nothing is found under that name, the Hub cannot be reached, its files are damaged or ask for
            something that is not allowed, or the blocks have no usable MLP.
    """
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if isinstance(source, str | Path):
        name = str(source)
        target = pick_device(device)
        with _explained(name):
            files = _find_model(name, revision, trust_remote_code, local_files_only)
            module, tokenizer = _load(name, files, dtype, target, allow_pickle, tokenizer)
        frozen = _wrap(module, tokenizer, name, files.revision)
    else:
        frozen = wrap(source, tokenizer)
    frozen.module.eval().requires_grad_(False)
    return frozen


def load_classifier(source: str, device: str = "auto") -> tuple[nn.Module, Any]:
    """Load a sequence-classification model and its tokenizer; its files are looked at as a base model's.

    Args:
        source: a local folder or a Hub id.
        device: as for ``load_frozen``.

    Raises:
        MxdError: as ``load_frozen``.
    """
    from transformers import AutoModelForSequenceClassification

    target = pick_device(device)
    with _explained(source):
        files = _find_model(source, None, False, False)
        module = _pretrained(AutoModelForSequenceClassification, files, "float32", False, {})
        return module.to(target).eval().requires_grad_(False), _tokenizer(source, files)


def wrap(source: Any, tokenizer: Any = None) -> FrozenModel:
    """Return a loaded Hugging Face model, a bridge or a module as a ``FrozenModel``, without changing it.

    Raises:
        MxdError: its blocks have no usable MLP, or its weights lie on several devices.
    """
    if isinstance(source, FrozenModel):
        return source if tokenizer is None else replace(source, tokenizer=tokenizer)
    module = getattr(source, "original_model", source)
    if not isinstance(module, nn.Module):
        raise MxdError(f"a {type(module).__name__} is not a base model; give a name, a path or a loaded causal LM.")
    if not hasattr(getattr(module, "config", None), "to_dict"):  # not one of transformers'
        module = PlainModel(module)
    tokenizer = tokenizer if tokenizer is not None else getattr(source, "tokenizer", None)
    return _wrap(module, tokenizer, getattr(module.config, "_name_or_path", "") or type(module).__name__, None)


def _wrap(module: nn.Module, tokenizer: Any, name: str, revision: str | None) -> FrozenModel:
    commit = getattr(module.config, "_commit_hash", None) or revision
    frozen = FrozenModel(module, tokenizer, name, commit, find_blocks(module, name))
    frozen.mlp_widths(0)  # refuses MLPs that cannot be replaced
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    if len(devices) > 1:  # replacements and activations are kept on one
        raise MxdError(
            f"the weights of {name} lie on several devices ({', '.join(devices)}); mxd runs a base model on one. Load "
            "it without device_map, or with device_map={'': 'cuda:0'}; where it does not fit, in bfloat16."
        )
    return frozen


def pick_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is CUDA, else the CPU.

    Raises:
        MxdError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = "" if "Expected one of" in str(error) else f" ({first_line(error)})"
        raise MxdError(f"device {name!r} is not available{reason}; choose auto, cpu or cuda.") from error
    return device


def outline(
    source: Any, revision: str | None = None, trust_remote_code: bool = False, local_files_only: bool = False
) -> FrozenModel:
    """Return a base model on the meta device: every module and shape, no weights and no tokenizer.

    Args:
        source: as for ``load_frozen``; of a name, a path or a GGUF file only the configuration is read.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run model code from the Hub repository.
        local_files_only: never ask the Hub.

    Raises:
        MxdError: as ``load_frozen``.
    """
    if not isinstance(source, str | Path):
        loaded = wrap(source)
        module: nn.Module
        if isinstance(loaded.module, PlainModel):
            module = loaded.module.on_meta()
        else:
            with torch.device("meta"):
                module = type(loaded.module)(loaded.config)
        name, revision = loaded.source, loaded.revision
    else:
        from transformers import AutoModelForCausalLM

        name = str(source)
        with _explained(name):
            files = _find_model(name, revision, trust_remote_code, local_files_only)
            config = read_config(files)
            code = {"trust_remote_code": trust_remote_code} if trust_remote_code else {}
            with bounded(), torch.device("meta"):
                module = AutoModelForCausalLM.from_config(config, **code)
        revision = files.revision
    module.eval().requires_grad_(False)
    return _wrap(module, None, name, revision)


def _load(
    name: str, files: ModelFiles, dtype: str, device: torch.device, allow_pickle: bool, tokenizer: Any
) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM

    quantized = _eight_bits(name, device) if dtype == "int8" else _unpacked() if files.gguf else {}
    module = _pretrained(AutoModelForCausalLM, files, dtype, allow_pickle, quantized)
    if dtype != "int8":  # int8 models are put on their device as they are read
        module.to(device)
    if device.type != "cpu":
        _fuse_gelu(module)
    tokenizer = tokenizer or _tokenizer(name, files)
    _try_out(module, tokenizer)
    return module, tokenizer


def _fuse_gelu(module: nn.Module) -> None:
    """Let torch's one kernel compute GELU's tanh form where transformers takes eight: the same function up to rounding.

    Eight kernels a block are a third of GPT-2's forward on a GPU, by the bytes that they move.
    """
    from transformers.activations import FastGELUActivation, NewGELUActivation

    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, NewGELUActivation | FastGELUActivation):
                setattr(parent, name, nn.GELU(approximate="tanh"))


def _pretrained(auto: Any, files: ModelFiles, dtype: str, allow_pickle: bool, quantized: dict[str, Any]) -> nn.Module:
    """Return a model of one of transformers' automatic classes, its files looked at first."""
    config = read_config(files)
    weights = find_weights(files, getattr(config, "transformers_weights", None), allow_pickle)
    _check_memory(weights, dtype)
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # else transformers has the Hub convert pickles
    with bounded(weights):
        loaded: Any = auto.from_pretrained(
            files.where,
            config=config,
            dtype=DTYPES[dtype],
            output_loading_info=True,
            use_safetensors=None if allow_pickle else True,
            ignore_mismatched_sizes=True,  # refused below, with their names
            **files.options,
            **quantized,
        )
    module: nn.Module
    module, info = loaded
    if info["missing_keys"]:
        raise ValueError(f"its weights lack {', '.join(sorted(info['missing_keys'])[:3])}; they would be random")
    for key, stored, expected in sorted(info["mismatched_keys"]):
        raise ValueError(f"its weights hold {key} as {list(stored)}, its config asks for {list(expected)}")
    return module


def _tokenizer(name: str, files: ModelFiles) -> Any:
    from transformers import AutoTokenizer

    with _explained(name, "its tokenizer: "):
        tokenizer = AutoTokenizer.from_pretrained(files.where, **files.options)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("files of it are missing, so its vocabulary is empty")
    return tokenizer


def _check_memory(weights: WeightCounts, dtype: str) -> None:
    """Refuse weights that do not fit into the machine's memory, which they pass through on their way to any device."""
    size = weights.values * (1 if dtype == "int8" else DTYPES[dtype].itemsize)
    free = free_memory(torch.device("cpu"))
    if size > free:
        raise ValueError(
            f"its {weights.values:,} values need {amount(size)} in {dtype}, and {amount(free)} of "
            "memory are free; choose bfloat16 (model.dtype), or a smaller model"
        )


@torch.no_grad()
def _try_out(module: Any, tokenizer: Any) -> None:
    """Run a model on a few words: many faults of its files show only then."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = [*begin, *tokenizer("The President", add_special_tokens=False)["input_ids"]][:8]
    known = module.get_input_embeddings().weight.shape[0]
    if not ids:
        raise ValueError("its tokenizer finds no token in a few words")
    if max(ids) >= known:
        raise ValueError(
            f"its tokenizer gives token {max(ids)}, and it knows {known:,}: they belong to different models"
        )
    inputs = torch.tensor([ids], device=next(module.parameters()).device)
    if module(input_ids=inputs, use_cache=False).logits.isnan().any():
        raise ValueError("its logits are NaN: its weights or its config are damaged, or its dtype is too narrow for it")


def _find_model(name: str, revision: str | None, trust: bool, local: bool) -> ModelFiles:
    """Return where a model's files are, and at which commit."""
    path = Path(name)
    check_model(name)
    if name in BUNDLED:
        return ModelFiles(str(bundled(name)))
    if name.endswith(".gguf") and path.is_file():
        _need_gguf()
        return ModelFiles(str(path.parent), gguf=path, trust_remote_code=trust)
    if path.is_dir():
        return ModelFiles(name, trust_remote_code=trust, local_files_only=local)
    if path.exists():
        raise ValueError("it is a file; give the folder that it lies in, or a .gguf file")
    from transformers.utils import cached_file

    config = cached_file(name, "config.json", revision=revision, local_files_only=local)
    commit = Path(config).parent.name if config else revision
    return ModelFiles(name, commit, trust_remote_code=trust, local_files_only=local)


@contextmanager
def _explained(name: str, part: str = "") -> Iterator[None]:
    """Turn what transformers raises while it loads a model, or a part of it, into one clear error."""
    from transformers.utils import logging

    hidden = name in BUNDLED and logging.is_progress_bar_enabled()  # loaded before anybody could read a bar
    if hidden:
        logging.disable_progress_bar()
    try:
        with asking_hub() if not os.path.exists(name) and name not in BUNDLED else nullcontext():
            yield
    except MxdError:
        raise
    except BaseException as error:  # malformed files make transformers raise anything, even non-Exceptions
        if not isinstance(error, Exception) and type(error).__name__ not in ("PanicException", "CheckpointException"):
            raise
        if not isinstance(error, _EXPECTED) and _is_ours(error):
            raise
        reason = first_line(error).rstrip(".")
        if not isinstance(error, _EXPECTED):
            reason = f"transformers cannot read its files ({type(error).__name__}: {reason})"
        hint = _CHOICES if isinstance(error, OSError) else "."
        here = "" if os.path.exists(name) or name in BUNDLED else "there is no folder of that name here, and the Hub: "
        raise MxdError(f"cannot load base model {name!r}: {here}{part}{reason}{hint}") from error
    finally:
        if hidden:
            logging.enable_progress_bar()


_CHOICES = (
    f"; expected a bundled name ({', '.join(BUNDLED)}), a local folder with a config.json, a .gguf file, or a "
    "Hub id that is cached or reachable (for private or gated models: `hf auth login`)."
)
_EXPECTED = (OSError, ValueError, RuntimeError, MemoryError, SafetensorError)
"""Errors whose messages explain by themselves what is wrong with a file."""


def _is_ours(error: BaseException) -> bool:
    """Return whether this package's own code raised it: then the mistake is here, and not in the model's files."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(last).is_relative_to(Path(__file__).parents[1])


def _unpacked() -> dict[str, Any]:
    """Return the options that make transformers dequantize a GGUF file, which needs no kernels from the Hub."""
    try:
        from transformers import GgufConfig
    except ImportError:  # earlier versions always dequantize
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _eight_bits(name: str, device: torch.device) -> dict[str, Any]:
    """Return the options that make transformers read a model's linear maps in 8 bits.

    Raises:
        MxdError: bitsandbytes is not installed or does not support the device, or the file is quantized already.
    """
    if name.endswith(".gguf"):
        raise MxdError(f"{name!r} is quantized already; model.dtype int8 needs a Hub id or a folder of float weights.")
    try:
        import bitsandbytes
    except ImportError as error:
        raise MxdError("model.dtype int8 needs the package bitsandbytes: pip install 'mxd[bnb]'") from error
    supported = getattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    if device.type not in supported:
        raise MxdError(f"bitsandbytes does not run on {device.type!r}, but on {', '.join(sorted(supported))}.")
    from transformers import BitsAndBytesConfig

    return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": {"": device}}


def _need_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MxdError("reading GGUF files needs the package gguf: pip install 'mxd[gguf]'") from error

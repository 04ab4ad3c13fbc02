"""Frozen base models: load one from anywhere, find its MLPs, read their form, record what flows through them.

The site is the block's ``mlp`` module of the unmodified Hugging Face model: its input is the pre-MLP activation
(after the layer norm with its affine part), its output the post-MLP activation, before the residual sum.
"""

import hashlib
import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn

from mxd.common.errors import MxdError, unknown
from mxd.common.hardware import free_memory
from mxd.common.parsing import file_sha256, parse_json, read_text
from mxd.layers import MLPShape, MLPWeights
from mxd.layers.base import Activation
from mxd.vetting import Held, Place, bounded, find_weights, read_config

BUNDLED = ("tiny-gpt2", "tiny-neox", "tiny-llama")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.float16}
"""What a base model's activations are in. ``int8``: weights of linear maps in 8 bits (LLM.int8()), all else float16."""
_BESIDE = re.compile(
    r"_name_or_path|architectures|transformers_version|(torch_)?dtype|quantization_config|use_cache|return_dict|"
    r"problem_type|id2label|label2id|output_.*|summary_.*|.*_token_id|.*drop.*|initializer_range"
)
"""Settings of a model that no activation depends on. Nor are those counted that are off: later versions add such."""


@dataclass(frozen=True)
class Family:
    """Where a model family keeps its blocks, and what the linear maps of its MLP are called."""

    blocks: str
    encoder: str
    decoder: str
    encoder_glu: str | None = None


FAMILIES = {
    "gpt2": Family("transformer.h", "c_fc", "c_proj"),
    "gpt_neox": Family("gpt_neox.layers", "dense_h_to_4h", "dense_4h_to_h"),
    "llama": Family("model.layers", "up_proj", "down_proj", encoder_glu="gate_proj"),
}

_ACTIVATION_NAMES: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class FrozenModel:
    """A causal language model in evaluation mode whose parameters take no gradient."""

    module: nn.Module
    """The Hugging Face model."""
    tokenizer: Any
    """Its tokenizer, or ``None``."""
    source: str
    """Hub id, path or bundled name."""
    revision: str | None
    """The commit it was loaded at, where known."""
    blocks: nn.ModuleList
    """Its transformer blocks."""

    @property
    def config(self) -> Any:
        """The Hugging Face config."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> str:
        """What it runs in, as ``load_frozen`` names it."""
        if getattr(self.module, "is_loaded_in_8bit", False):
            return "int8"
        return str(next(self.module.parameters()).dtype).removeprefix("torch.")

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def check_layer(self, layer: int) -> None:
        """Check that a block exists.

        Raises:
            MxdError: the layer is out of range.
        """
        if not 0 <= layer < self.num_layers:
            raise MxdError(f"layer {layer} is out of range: {self.source} has layers 0 ... {self.num_layers - 1}.")

    def slot(self, layer: int) -> tuple[nn.Module, str]:
        """Return the module and attribute that hold the block's MLP, so that ``setattr`` replaces it.

        On a TransformerLens bridge that is the inside of the MLP's bridge: its ``hook_in`` and ``hook_out`` stay.
        """
        self.check_layer(layer)
        block = _unwrap(self.blocks[layer])
        if _wrapped(block.mlp):
            return cast(nn.Module, block.mlp), "_original_component"
        return block, "mlp"

    def mlp(self, layer: int) -> nn.Module:
        """Return the block's MLP module, or what is spliced in its place."""
        parent, name = self.slot(layer)
        return cast(nn.Module, getattr(parent, name))

    def mlp_shape(self, layer: int) -> MLPShape:
        """Return the form of the block's MLP, with ``None`` where it cannot be read."""
        mlp = self.mlp(layer)
        d_in, d_out = _probe(self, layer)
        family = _family_of(mlp)
        if family is None:
            return MLPShape(d_in, d_out)
        return MLPShape(
            d_in,
            d_out,
            hidden=_read(mlp, family.encoder)[0].shape[0],
            activation=_activation(self.config),
            glu=family.encoder_glu is not None,
        )

    def mlp_weights(self, layer: int) -> MLPWeights:
        """Return the MLP's weights in this project's layout.

        Raises:
            MxdError: the MLP's form is not one of ``FAMILIES``, its gate has a bias, or its weights are in 8 bits.
        """
        mlp = self.mlp(layer)
        if self.dtype == "int8":
            raise MxdError(f"{self.source} is loaded in 8 bits; load it in float32 to copy the weights of an MLP.")
        family = _family_of(mlp)
        if family is None:
            raise MxdError(f"the weights of {type(mlp).__name__} cannot be read; known forms: {', '.join(FAMILIES)}.")
        encoder, encoder_bias = _read(mlp, family.encoder)
        decoder, decoder_bias = _read(mlp, family.decoder)
        glu, glu_bias = _read(mlp, family.encoder_glu) if family.encoder_glu else (None, None)
        if glu_bias is not None:
            raise MxdError(f"{type(mlp).__name__} has a bias on its gate; such GLU weights cannot be copied.")
        return MLPWeights(encoder, encoder_bias, glu, decoder.T, decoder_bias)

    def fingerprint(self, layer: int) -> str:
        """Return a short hash of the block's MLP weights; the same in float32, bfloat16 and where copied.

        A strided sample of each tensor, rounded to bfloat16, is hashed: replacements carry it, so that splicing
        into another model or another layer is noticed whatever the model is called.
        """
        digest = hashlib.sha256()
        _sample(digest, self.mlp(layer).parameters())
        return digest.hexdigest()[:16]

    def base_fingerprint(self) -> str:
        """Return a short hash of the whole model: its settings, and all its weights as ``fingerprint`` samples them.

        Whatever changes what the model computes changes it: embeddings, norms, any block, the base of its rotary
        embedding. Where it was loaded from, and in which dtype, does not. A TransformerLens bridge, which splits the
        weights of attention, has another.
        """
        settings = {k: v for k, v in self.config.to_dict().items() if v and not _BESIDE.fullmatch(k)}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
        _sample(digest, self.module.parameters())
        return digest.hexdigest()[:16]

    @property
    def vocabulary(self) -> int:
        """How many token ids it has embeddings for."""
        return len(cast(Any, self.module).get_input_embeddings().weight)

    @torch.no_grad()
    def logits(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq vocab"]:
        """Return the next-token logits, in float32."""
        return self.module(input_ids=ids.to(self.device), use_cache=False).logits.float()

    @torch.no_grad()
    def record(
        self, ids: Int[Tensor, "batch seq"], layers: Sequence[int]
    ) -> dict[int, tuple[Float[Tensor, "batch seq d_in"], Float[Tensor, "batch seq d_out"]]]:
        """Return the MLPs' inputs and outputs at some layers; the forward stops after the last of them."""
        with self.watched(layers, stop=True) as found:
            self.module(input_ids=ids.to(self.device), use_cache=False)
        return found

    @contextmanager
    def watched(self, layers: Sequence[int], stop: bool = False) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
        """Collect ``layer -> (MLP input, MLP output)`` of the forwards of this context.

        With ``stop``, a forward ends after the last of the layers, and the context ends with it.
        """
        found: dict[int, tuple[Tensor, Tensor]] = {}

        def keep(layer: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                found[layer] = (args[0], output)
                if stop and layer == max(layers):
                    raise _StopForward

            return hook

        handles = [self.mlp(layer).register_forward_hook(keep(layer)) for layer in sorted(set(layers))]
        try:
            yield found
        except _StopForward:
            pass
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def resumed(self, layer: int, hidden: Any) -> Iterator[None]:
        """Run forwards from block ``layer`` on: the blocks below hand on ``hidden`` without computing anything.

        Args:
            layer: the first block that runs.
            hidden: what block ``layer - 1`` returned for the same input (``block_outputs``); unused for layer 0.
        """
        below = [_unwrap(block) for block in self.blocks[:layer]]  # a bridge around it hands on what it is given
        own = [block.__dict__.get("forward") for block in below]  # set where accelerate has hooked a block
        for block in below:
            block.forward = lambda *args, **kwargs: hidden
        try:
            yield
        finally:
            for block, forward in zip(below, own, strict=True):
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward

    @contextmanager
    def block_outputs(self, layers: Sequence[int]) -> Iterator[dict[int, Any]]:
        """Collect, for each given layer, what the block below it returns in the forwards of this context."""
        found: dict[int, Any] = {}

        def keep(layer: int) -> Callable[..., None]:
            return lambda module, args, output: found.__setitem__(layer, output)

        handles = [_unwrap(self.blocks[layer - 1]).register_forward_hook(keep(layer)) for layer in layers if layer > 0]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _sample(digest: Any, parameters: Iterable[Tensor]) -> None:
    """Add shapes and samples of some weights to a hash."""
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 65536)].to("cpu", torch.bfloat16)
        digest.update(str(tuple(parameter.shape)).encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())


class _StopForward(Exception):
    """Ends a forward whose remaining blocks nobody needs."""


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

    Its files are taken for anybody's: see docs/security.md for what is looked at before transformers reads them.

    Args:
        source: a bundled name (``tiny-gpt2``), a Hub id, a local folder, a ``.gguf`` file, a loaded Hugging Face
            model, or a TransformerLens bridge.
        revision: branch, tag or commit on the Hub.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``int8`` (needs bitsandbytes: ``pip install 'mxd[bnb]'``); for
            loaded objects their own dtype stays.
        device: ``auto`` (the best there is), ``cpu``, ``cuda``, ``cuda:1``; loaded objects stay where
            they are.
        tokenizer: used for loaded objects; otherwise the source's own is loaded.
        trust_remote_code: run model code from the repository, and kernels that its config names. Off unless asked for
            by name.
        local_files_only: never ask the Hub.
        allow_pickle: read ``pytorch_model.bin`` where there is no safetensors file, by torch's weights-only loader.

    Raises:
        MxdError: nothing is found under that name, the Hub cannot be reached, its files are damaged or ask for what
            they may not, or the blocks have no usable MLP.
    """
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if isinstance(source, str | Path):
        name = str(source)
        on = pick_device(device)
        with _explained(name):
            place = _place(name, revision, trust_remote_code, local_files_only)
            module, tokenizer = _load(name, place, dtype, on, allow_pickle, tokenizer)
        frozen = _wrap(module, tokenizer, name, place.revision)
    else:
        frozen = wrap(source, tokenizer)
    frozen.module.eval().requires_grad_(False)
    return frozen


def wrap(source: Any, tokenizer: Any = None) -> FrozenModel:
    """Return a loaded Hugging Face model or a TransformerLens bridge in this project's terms, without changing it.

    Raises:
        MxdError: its blocks have no usable MLP.
    """
    if isinstance(source, FrozenModel):
        return source
    module = getattr(source, "original_model", source)
    if not isinstance(module, nn.Module) or not hasattr(module, "config"):
        raise MxdError(f"a {type(module).__name__} is not a base model; give a name, a path or a loaded causal LM.")
    tokenizer = tokenizer if tokenizer is not None else getattr(source, "tokenizer", None)
    return _wrap(module, tokenizer, getattr(module.config, "_name_or_path", "") or type(module).__name__, None)


def _wrap(module: nn.Module, tokenizer: Any, name: str, revision: str | None) -> FrozenModel:
    commit = getattr(module.config, "_commit_hash", None) or revision
    found = FrozenModel(module, tokenizer, name, commit, _find_blocks(module, name))
    _probe(found, 0)
    return found


def pick_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` is CUDA, else the CPU.

    Raises:
        MxdError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise MxdError(f"device {name!r} is not there ({_first_line(error)}); choose auto, cpu or cuda.") from error
    return device


def bundled_path(name: str) -> Path:
    """Return where a bundled file or folder lies."""
    return Path(str(resources.files("mxd") / "assets" / name))


@cache
def bundled(name: str) -> Path:
    """Return a bundled file, or a folder, whose files were compared with their SHA-256 in ``assets.json``.

    Once in a process: about 4 ms for a model, 3 ms for the text.

    Raises:
        MxdError: a file is not what was bundled, or cannot be read.
    """
    try:
        known = parse_json(read_text(bundled_path("assets.json")))["files"]
        files = [file for file in known if file == name or file.startswith(f"{name}/")]
        if not files:
            raise LookupError(f"assets.json names no {name}")
        for file in files:
            if (found := file_sha256(bundled_path(file))) != known[file]["sha256"]:
                raise MxdError(
                    f"{bundled_path(file)} is not what mxd came with: its SHA-256 is {found}, assets.json names "
                    f"{known[file]['sha256']}. Install mxd again."
                )
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise MxdError(f"cannot read the files that mxd came with: {error}. Install mxd again.") from error
    return bundled_path(name)


def outline(
    source: Any, revision: str | None = None, trust_remote_code: bool = False, local_files_only: bool = False
) -> FrozenModel:
    """Return a base model on the meta device: every module and shape, no weights and no tokenizer.

    Args:
        source: as ``load_frozen``; of a name, a path or a GGUF file only the configuration is read.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run model code from the Hub repository.
        local_files_only: never ask the Hub.

    Raises:
        MxdError: as ``load_frozen``.
    """
    if not isinstance(source, str | Path):
        whole = wrap(source)
        with torch.device("meta"):
            module = type(whole.module)(whole.config)
        name, revision = whole.source, whole.revision
    else:
        from transformers import AutoModelForCausalLM

        name = str(source)
        with _explained(name):
            place = _place(name, revision, trust_remote_code, local_files_only)
            config = read_config(place)
            code = {"trust_remote_code": trust_remote_code} if trust_remote_code else {}
            with bounded(), torch.device("meta"):
                module = AutoModelForCausalLM.from_config(config, **code)
        revision = place.revision
    module.eval().requires_grad_(False)
    return _wrap(module, None, name, revision)


def _load(
    name: str, place: Place, dtype: str, device: torch.device, allow_pickle: bool, tokenizer: Any
) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = _eight_bits(name, device) if dtype == "int8" else _unpacked() if place.gguf else {}
    config = read_config(place)
    held = find_weights(place, getattr(config, "transformers_weights", None), allow_pickle)
    _check_memory(held, dtype)
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # else transformers has the Hub convert pickles
    with bounded(held):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place.where,
            config=config,
            dtype=DTYPES[dtype],
            output_loading_info=True,
            use_safetensors=None if allow_pickle else True,
            ignore_mismatched_sizes=True,  # refused below, where they can be named
            **place.options,
            **quantized,
        )
    module, info = loaded
    if dtype != "int8":  # such models are put in place as they are read
        module.to(device)
    if info["missing_keys"]:
        raise ValueError(f"its weights lack {', '.join(sorted(info['missing_keys'])[:3])}; they would be random")
    for key, held_shape, shape in sorted(info["mismatched_keys"]):
        raise ValueError(f"its weights hold {key} as {list(held_shape)}, its config asks for {list(shape)}")
    with _explained(name, "its tokenizer: "):
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(place.where, **place.options)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("files of it are missing, so its vocabulary is empty")
    _try_out(module, tokenizer)
    return module, tokenizer


def _check_memory(held: Held, dtype: str) -> None:
    """Refuse weights that do not fit into the machine's memory, which they go through on their way to any device."""
    size = held.values * (1 if dtype == "int8" else DTYPES[dtype].itemsize)
    free = free_memory(torch.device("cpu"))
    if size > free:
        raise ValueError(
            f"its {held.values:,} values need {size / 2**30:.1f} GiB in {dtype}, and {free / 2**30:.1f} GiB of memory "
            "are free; choose bfloat16 (model.dtype), or a smaller model"
        )


@torch.no_grad()
def _try_out(module: Any, tokenizer: Any) -> None:
    """Let a model read a few words: much that is wrong with its files shows only then."""
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


def _place(name: str, revision: str | None, trust: bool, local: bool) -> Place:
    """Find out where a model is, and at which commit."""
    path = Path(name)
    if name in BUNDLED:
        return Place(str(bundled(name)))
    if name.endswith(".gguf"):
        if not path.is_file():
            raise MxdError(f"no GGUF file at {name!r}; `python scripts/fetch_models.py` fetches SmolLM2-135M.")
        _need_gguf()
        return Place(str(path.parent), gguf=path, trust_remote_code=trust)
    if path.is_dir():
        return Place(name, trust_remote_code=trust, local_files_only=local)
    if path.exists():
        raise ValueError("it is a file; give the folder that it lies in, or a .gguf file")
    from transformers.utils import cached_file

    config = cached_file(name, "config.json", revision=revision, local_files_only=local)
    commit = Path(config).parent.name if config else revision
    return Place(name, commit, trust_remote_code=trust, local_files_only=local)


@contextmanager
def _explained(name: str, part: str = "") -> Iterator[None]:
    """Turn what transformers raises while it loads a model, or a part of it, into one clear error."""
    from transformers.utils import logging

    if name in BUNDLED:  # over before a bar could be read
        logging.disable_progress_bar()
    try:
        yield
    except MxdError:
        raise
    except BaseException as error:  # malformed files make transformers raise anything, also what is no Exception
        if not isinstance(error, Exception) and type(error).__name__ not in ("PanicException", "CheckpointException"):
            raise
        if not isinstance(error, _EXPECTED) and _is_ours(error):
            raise
        reason = _first_line(error)
        if not isinstance(error, _EXPECTED):
            reason = f"transformers can make nothing of its files ({type(error).__name__}: {reason})"
        hint = _CHOICES if isinstance(error, OSError) else ""
        raise MxdError(f"cannot load base model {name!r}: {part}{reason}{hint}") from error
    finally:
        logging.enable_progress_bar()


_CHOICES = (
    f"\nExpected a bundled name ({', '.join(BUNDLED)}), a local folder with a config.json, a .gguf file, or a "
    "Hub id that is cached or reachable (for private or gated models: `hf auth login`)."
)
_EXPECTED = (OSError, ValueError, RuntimeError, MemoryError, SafetensorError)
"""What says by itself that something is wrong with a file."""


def _is_ours(error: BaseException) -> bool:
    """Return whether this package's own code raised it: a mistake here, which must not be laid on the model."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(last).is_relative_to(Path(__file__).parent)


def _unpacked() -> dict[str, Any]:
    """Return the options that make transformers unpack a GGUF file, which needs no kernels from the Hub."""
    try:
        from transformers import GgufConfig
    except ImportError:  # earlier versions do nothing else
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _eight_bits(name: str, device: torch.device) -> dict[str, Any]:
    """Return the options that make transformers read a model's linear maps in 8 bits.

    Raises:
        MxdError: bitsandbytes is not installed or does not know the device, or the file has a quantization of its own.
    """
    if name.endswith(".gguf"):
        raise MxdError(f"{name!r} is quantized already; model.dtype int8 needs a Hub id or a folder of float weights.")
    try:
        import bitsandbytes
    except ImportError as error:
        raise MxdError("model.dtype int8 needs the package bitsandbytes: pip install 'mxd[bnb]'") from error
    known = getattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    if device.type not in known:
        raise MxdError(f"bitsandbytes does not run on {device.type!r}, but on {', '.join(sorted(known))}.")
    from transformers import BitsAndBytesConfig

    return {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": {"": device}}


def _need_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MxdError("reading GGUF files needs the package gguf: pip install 'mxd[gguf]'") from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _find_blocks(module: nn.Module, name: str) -> nn.ModuleList:
    """Find the blocks: by the table for known families, else the one list whose members all carry an ``mlp``."""
    family = FAMILIES.get(getattr(module.config, "model_type", ""))
    if family is not None:
        try:
            return cast(nn.ModuleList, module.get_submodule(family.blocks))
        except AttributeError as error:
            raise MxdError(f"{name}: a {type(module).__name__} has no {family.blocks}; give the causal LM.") from error
    lists = [
        child
        for child in module.modules()
        if isinstance(child, nn.ModuleList) and len(child) and all(hasattr(_unwrap(b), "mlp") for b in child)
    ]
    if len(lists) != 1:
        found = "no list" if not lists else f"{len(lists)} lists"
        raise MxdError(
            f"{name}: model type {getattr(module.config, 'model_type', '?')!r} has {found} of blocks that carry an "
            f"`mlp` module. Known families: {', '.join(FAMILIES)}, and any other with exactly one such list."
        )
    return lists[0]


def _probe(model: FrozenModel, layer: int) -> tuple[int, int]:
    """Return the widths of a block's MLP; refuse one that does not map one tensor to one tensor of the same shape."""
    mlp = getattr(model.mlp(layer), "base", model.mlp(layer))  # of a spliced block: the MLP it had
    parameter = next(mlp.parameters(), None)
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    refusal = (
        f"{model.source}: the MLP of layer {layer} ({type(mlp).__name__}) does not map one tensor to one tensor, so it "
        "cannot be replaced. Supported: GPT-2, GPT-NeoX, Llama and families whose `mlp` has that form."
    )
    if parameter is None or width is None:
        raise MxdError(refusal)
    try:
        with torch.no_grad():
            dtype = parameter.dtype if parameter.is_floating_point() else getattr(model.module, "dtype", torch.float16)
            out = mlp(torch.zeros(1, 2, width, dtype=dtype, device=parameter.device))
    except (TypeError, RuntimeError, ValueError) as error:
        raise MxdError(f"{refusal} ({_first_line(error)})") from error
    if not isinstance(out, Tensor) or out.shape[:2] != (1, 2):
        raise MxdError(refusal)
    return width, out.shape[-1]


def _wrapped(module: Any) -> bool:
    return "_original_component" in getattr(module, "_modules", {})


def _unwrap(module: Any) -> Any:
    """Return the Hugging Face module inside TransformerLens wrappers."""
    while _wrapped(module):
        module = module._original_component
    return module


def _family_of(mlp: nn.Module) -> Family | None:
    """Return the table's entry whose linear maps this MLP has, and has alone."""
    for family in FAMILIES.values():
        names = {n for n in (family.encoder, family.decoder, family.encoder_glu) if n}
        with_weights = {n for n, child in mlp.named_children() if any(True for _ in child.parameters())}
        if names == with_weights:
            return family
    return None


def _read(mlp: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Return weight ``[out, in]`` and bias of one of the MLP's linear maps (GPT-2's Conv1D stores ``[in, out]``)."""
    linear = _unwrap(getattr(mlp, name))
    weight = linear.weight.detach()
    bias = linear.bias.detach() if linear.bias is not None else None
    return (weight.T if type(linear).__name__ == "Conv1D" else weight), bias


def _activation(config: Any) -> Activation | None:
    text = config.get_text_config()
    for name in ("hidden_activation", "activation_function", "hidden_act", "activation"):
        if getattr(text, name, None):
            return _ACTIVATION_NAMES.get(getattr(text, name))
    return None

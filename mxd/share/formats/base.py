"""What the formats share: what a reader hands back and a writer is given, hook names, and careful reading of files.

read:   files -> Found        tensors in mxd's layout, and which tensors of the model the tool says they read and write
write:  Outgoing -> files
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mxd.artifacts.provenance import Provenance
from mxd.artifacts.tensors import fit_tensors
from mxd.common.errors import MxdError, unknown
from mxd.common.files import read_text, regular
from mxd.common.parsing import parse_json, parse_yaml
from mxd.layers import Code, ReplacementConfig
from mxd.layers.sparsity import AnySparsity
from mxd.layers.transcoder import Transcoder, TranscoderConfig
from mxd.model.frozen import FrozenModel

Input = Literal["mlp_in", "normalized"]
"""``mlp_in``: the mlp module's input. ``normalized``: the same before the layer norm's affine part."""
Writes = Literal["mlp_out", "centred", "added"]
"""``mlp_out``: the mlp module's output. ``centred``: the same less its mean over the width. ``added``: what the block
adds to the residual stream, which in some families is a norm of the MLP's output."""

MAX_CONFIG_BYTES = 1_000_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOOKS_IN: dict[str, Input | None] = {
    "mlp.hook_in": "mlp_in",
    "ln2.hook_out": "mlp_in",
    "mlp.input": "mlp_in",
    "pre_feedforward_layernorm.output": "mlp_in",
    "ln2.hook_normalized": None,  # before the affine part, but for LayerNorms in TransformerLens 2
}
HOOKS_OUT: dict[str, Writes] = {
    "mlp.hook_out": "mlp_out",
    "mlp.output": "mlp_out",
    "hook_mlp_out": "added",
    "post_feedforward_layernorm.output": "added",
}

S = TypeVar("S", bound="Settings")


@dataclass(frozen=True)
class Found:
    """A layer as a tool's files give it, in mxd's layout."""

    where: str
    """The file or folder, for messages."""
    config: ReplacementConfig
    """The layer's config, sizes from the tensors."""
    tensors: Mapping[str, Tensor]
    """The layer's state dict, for the input that ``input`` names."""
    model: str | None = None
    """Base model, as the tool calls it."""
    block: int | None = None
    """Block number."""
    input: Input | None = "mlp_in"
    """What it reads; ``None`` where the files leave that open."""
    writes: Writes = "mlp_out"
    """What it predicts."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``Provenance`` that the files know: data, training, tokens, seed."""
    provenance: Any = None
    """The provenance that mxd left there when it wrote these files, unchecked."""
    notes: tuple[str, ...] = ()
    """What a person should know of this import."""

    @property
    def base_model(self) -> str | None:
        """The base model as the tool calls it, or as mxd did when it wrote the files."""
        return self.model or (self.provenance.get("model") if isinstance(self.provenance, dict) else None)


@dataclass(frozen=True)
class Outgoing:
    """A transcoder to write."""

    layer: Transcoder
    provenance: Provenance
    loss: Mapping[str, Any] = field(default_factory=dict)
    """What the tool's own forward pass loses against the layer's; empty where it is the same."""

    @property
    def note(self) -> dict[str, Any]:
        """What mxd leaves in the tool's config, for people and for its own reader."""
        return {"provenance": self.provenance.model_dump(mode="json"), "loss": dict(self.loss)}


@dataclass(frozen=True)
class Format:
    """One tool's files."""

    read: Callable[[Path], list[Found]]
    """Every layer at a path."""
    write: Callable[[Sequence[Outgoing], Path, FrozenModel], list[Path]] | None = None
    """Write layers under a folder that does not hold them yet; returns one path for each, in their order."""
    kinds: tuple[str, ...] = ()
    """Kinds of sparsity it can hold."""
    forward: Callable[[Transcoder, Tensor], tuple[Code, Tensor]] | None = None
    """The tool's code and output for a TopK layer, where they are not mxd's."""


class Settings(BaseModel):
    """Base of the tools' configs: the fields that matter here, typed; others are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    mxd: dict[str, Any] | None = None
    """What mxd left there."""

    @property
    def provenance(self) -> Any:
        """The provenance that mxd left there, unchecked."""
        return (self.mxd or {}).get("provenance")


def read_settings(path: Path, kind: type[S]) -> S:
    """Read a tool's JSON or YAML config.

    Raises:
        MxdError: no such file, too large, not JSON or YAML, or a field of the wrong type.
    """
    try:
        text = read_text(path, MAX_CONFIG_BYTES)
        return kind.model_validate(parse_yaml(text) if path.suffix == ".yaml" else parse_json(text))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise MxdError(f"{path}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}.") from error
    except (OSError, ValueError) as error:
        raise MxdError(f"cannot read {path}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file as float32.

    Raises:
        MxdError: no such file, a damaged one, or a dtype that float32 does not hold exactly.
    """
    try:
        tensors = load_file(regular(path))
    except (OSError, SafetensorError) as error:
        raise MxdError(f"cannot read {path}: {error}. Copy or download it again.") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise MxdError(f"{path}: {name} is {tensor.dtype}; save it as float32 in the tool it comes from.")
    return {name: tensor.float() for name, tensor in tensors.items()}


def take(tensors: dict[str, Tensor], names: Mapping[str, str], where: str) -> dict[str, Tensor]:
    """Return tensors under mxd's names; every one of the file's tensors must be known.

    Args:
        tensors: as read.
        names: the tool's name -> mxd's name.
        where: for messages.

    Raises:
        MxdError: a tensor that is not in ``names``.
    """
    extra = sorted(tensors.keys() - names.keys())
    if extra:
        raise MxdError(f"{where}: unexpected tensors {', '.join(extra)}; expected {', '.join(names)}.")
    return {names[name]: tensor for name, tensor in tensors.items()}


def as_transcoder(
    where: str,
    weights: Mapping[str, Tensor],
    sparsity: AnySparsity,
    stated: Mapping[str, tuple[int | None, str, int]] = {},
) -> tuple[TranscoderConfig, dict[str, Tensor]]:
    """Check a transcoder's tensors against one another and against its config; return config and state dict.

    Args:
        where: for messages.
        weights: ``encoder [n, d]``, ``encoder_bias [n]``, ``decoder [n, o]``, ``bias [o]``, and where there are any
            ``skip [d, o]`` and ``sparsity.threshold [n]``.
        sparsity: how units are chosen.
        stated: field of the tool's config -> (its value, tensor, dimension) that must agree.

    Raises:
        MxdError: a tensor is missing or of the wrong shape, or the config says something else.
    """
    for name in ("encoder", "decoder"):
        if name not in weights or weights[name].ndim != 2:
            raise MxdError(f"{where}: the {name} is missing or not a matrix.")
    (n, d), o = weights["encoder"].shape, weights["decoder"].shape[1]
    shapes = {"encoder": (n, d), "encoder_bias": (n,), "decoder": (n, o), "bias": (o,)}
    if "skip" in weights:
        shapes["skip"] = (d, o)
    if sparsity.kind == "jumprelu":
        shapes["sparsity.threshold"] = (n,)
    fit_tensors({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}, weights, where)
    for label, (value, name, dimension) in stated.items():
        if value is not None and value != weights[name].shape[dimension]:
            raise MxdError(f"{where}: the config says {label} = {value}, the tensors {weights[name].shape[dimension]}.")
    try:
        config = TranscoderConfig(d_in=d, d_out=o, num_units=n, skip="skip" in weights, sparsity=sparsity)
    except ValidationError as error:
        raise MxdError(f"{where}: {error.errors(include_url=False)[0]['msg']}.") from error
    return config, {name: tensor.contiguous() for name, tensor in weights.items()}


def positive_thresholds(where: str, weights: Mapping[str, Tensor]) -> None:
    """Check that no threshold is negative: such a unit would hand on negative values, which mxd's never do.

    Raises:
        MxdError: one is.
    """
    if "sparsity.threshold" in weights and bool((weights["sparsity.threshold"] < 0).any()):
        raise MxdError(f"{where}: some thresholds are negative, so units hand on negative values; mxd's cannot.")


def site(hook_in: str | None, hook_out: str | None, where: str) -> tuple[int | None, Input | None, Writes]:
    """Return block, input and output of a pair of hook names of TransformerLens or of Hugging Face modules.

    Raises:
        MxdError: another place than a block's MLP, or two blocks.
    """
    block_in, input = _hook(hook_in or "mlp.hook_in", HOOKS_IN, "input", where)
    block_out, writes = _hook(hook_out or "mlp.hook_out", HOOKS_OUT, "output", where)
    if None not in (block_in, block_out) and block_in != block_out:
        raise MxdError(f"{where}: it reads block {block_in} and writes block {block_out}; mxd's layers stay in one.")
    return block_in if block_in is not None else block_out, input, writes


def _hook(name: str, known: Mapping[str, Any], kind: str, where: str) -> tuple[int | None, Any]:
    match = re.fullmatch(r"(?:.*\.)?(\d+)\.(.+)", name)
    block, rest = (int(match[1]), match[2]) if match else (None, name)
    if rest not in known:
        raise unknown(
            f"{kind} of {where}:",
            name,
            known,
            "A place before the norm, or outside a block's MLP, is another function than the MLP's.",
        )
    return block, known[rest]


def only_one_per_block(layers: Sequence[Outgoing], tool: str) -> None:
    """Check that no two layers replace the same block.

    Raises:
        MxdError: two do.
    """
    numbers = [item.provenance.block for item in layers]
    twice = sorted({n for n in numbers if numbers.count(n) > 1})
    if twice:
        slugs = [f"{item.layer.config.slug}" for item in layers if item.provenance.block == twice[0]]
        raise MxdError(
            f"{len(slugs)} layers replace block {twice[0]} ({', '.join(slugs)}), and {tool} keeps one for each block; "
            "convert them one at a time, each into a folder of its own."
        )


def weights_of(layer: Transcoder) -> dict[str, Float[Tensor, "..."]]:
    """Return a transcoder's state dict as float32 on the CPU, without its constant at BOS, which no format holds."""
    held = {name: tensor for name, tensor in layer.state_dict().items() if not name.startswith("bos_")}
    return {name: tensor.detach().to("cpu", torch.float32) for name, tensor in held.items()}

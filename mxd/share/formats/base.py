"""What the formats share: what readers return and writers take, hook names, and careful reading of files.

read:   files -> Incoming     tensors in mxd's layout, and what the tool says the layer reads and predicts
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
from mxd.common.errors import MxdError, told, unknown
from mxd.common.files import read_text, regular
from mxd.common.parsing import parse_json, parse_yaml
from mxd.layers import Code, ReplacementConfig
from mxd.layers.sparsity import AnySparsity
from mxd.layers.transcoder import Transcoder, TranscoderConfig
from mxd.model.frozen import FrozenModel

Input = Literal["mlp_in", "normalized"]
"""``mlp_in``: the mlp module's input. ``normalized``: that input before the layer norm's affine part."""
Writes = Literal["mlp_out", "centred", "added"]
"""``mlp_out``: the mlp module's output. ``centred``: that output minus its mean over the width. ``added``: what the
block adds to the residual stream, which in some families is a norm of the MLP's output."""

MAX_CONFIG_BYTES = 1_000_000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOOKS_IN: dict[str, Input | None] = {
    "mlp.hook_in": "mlp_in",
    "ln2.hook_out": "mlp_in",
    "mlp.input": "mlp_in",
    "pre_feedforward_layernorm.output": "mlp_in",
    "ln2.hook_normalized": None,  # before the affine part, except for LayerNorms in TransformerLens 2
}
HOOKS_OUT: dict[str, Writes] = {
    "mlp.hook_out": "mlp_out",
    "mlp.output": "mlp_out",
    "hook_mlp_out": "added",
    "post_feedforward_layernorm.output": "added",
}

C = TypeVar("C", bound="ToolConfig")


@dataclass(frozen=True)
class Incoming:
    """A layer that was read, in mxd's layout."""

    where: str
    """The file or folder, for messages."""
    config: ReplacementConfig
    """The layer's config, with sizes taken from the tensors."""
    tensors: Mapping[str, Tensor]
    """The layer's state dict, for inputs as ``input`` says."""
    model: str | None = None
    """Base model, as the tool calls it."""
    block: int | None = None
    """Block number."""
    input: Input | None = "mlp_in"
    """What it reads; ``None`` if the files leave that open."""
    writes: Writes = "mlp_out"
    """What it predicts."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``Provenance`` that the files hold: data, training, tokens, seed."""
    provenance: Any = None
    """The provenance that mxd left in these files when it wrote them, unchecked."""
    notes: tuple[str, ...] = ()
    """What a person should know about this import."""

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
    """What the tool's own forward pass loses against the layer's; empty if it is the same."""

    @property
    def note(self) -> dict[str, Any]:
        """What mxd leaves in the tool's config, for people and for its own importer."""
        groups = self.layer.config.groups  # of a Matryoshka transcoder: its function is that of any other
        nested = {"groups": list(groups)} if groups else {}
        return {"provenance": self.provenance.model_dump(mode="json"), "loss": dict(self.loss), **nested}


@dataclass(frozen=True)
class Format:
    """One tool's files."""

    read: Callable[[Path], list[Incoming]]
    """Read every layer at a path."""
    write: Callable[[Sequence[Outgoing], Path, FrozenModel], list[Path]] | None = None
    """Write layers under a folder that does not hold them yet; return a path for each, in order."""
    kinds: tuple[str, ...] = ()
    """Kinds of sparsity that can be written."""
    forward: Callable[[Transcoder, Tensor], tuple[Code, Tensor]] | None = None
    """The tool's code and output for a TopK layer, if they differ from mxd's."""


class ToolConfig(BaseModel):
    """Base of the tools' configs: the fields that matter here, typed; others are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    mxd: dict[str, Any] | None = None
    """``Outgoing.note``, where mxd wrote the file."""

    @property
    def provenance(self) -> Any:
        """The provenance that mxd left in the file, unchecked."""
        return (self.mxd or {}).get("provenance")


def read_tool_config(path: Path, kind: type[C]) -> C:
    """Read a tool's JSON or YAML config.

    Raises:
        MxdError: no such file, too large, not JSON or YAML, or a field of the wrong type.
    """
    try:
        text = read_text(path, MAX_CONFIG_BYTES)
        return kind.model_validate(parse_yaml(text) if path.suffix == ".yaml" else parse_json(text))
    except ValidationError as error:
        raise MxdError(f"{path}: {told(error)}.") from error
    except (OSError, ValueError) as error:
        raise MxdError(f"cannot read {path}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file as float32.

    Raises:
        MxdError: no such file, a damaged one, or a dtype that float32 cannot represent exactly.
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
    """Return tensors under mxd's names; no tensor of the file may be unknown.

    Args:
        tensors: the file's.
        names: the tool's name -> mxd's name.
        where: the file, for messages.

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
        where: the file, for messages.
        weights: ``encoder [n, d]``, ``encoder_bias [n]``, ``decoder [n, o]``, ``bias [o]``, and optionally
            ``skip [d, o]`` and ``sparsity.threshold [n]``.
        sparsity: how units are chosen.
        stated: field of the tool's config -> (its value, the tensor and the dimension that must be that long).

    Raises:
        MxdError: a tensor is missing or of the wrong shape, or contradicts the config.
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
        raise MxdError(f"{where}: {told(error)}.") from error
    return config, {name: tensor.contiguous() for name, tensor in weights.items()}


def config_folders(path: Path, kind: str) -> list[Path]:
    """Return a folder with ``cfg.json``, or those in a folder of such folders.

    Raises:
        MxdError: there are none; ``kind`` says of what.
    """
    folders = [path] if (path / "cfg.json").is_file() else sorted(file.parent for file in path.glob("*/cfg.json"))
    if not folders:
        raise MxdError(f"no {kind} at {str(path)!r}: expected a folder with cfg.json, or a folder of such folders.")
    return folders


def positive_thresholds(where: str, weights: Mapping[str, Tensor]) -> None:
    """Check that no threshold is negative, since activations would be, too, which mxd's never are.

    Raises:
        MxdError: a threshold is negative.
    """
    if "sparsity.threshold" in weights and bool((weights["sparsity.threshold"] < 0).any()):
        raise MxdError(f"{where}: some thresholds are negative, so that activations can be negative; mxd's cannot.")


def site(hook_in: str | None, hook_out: str | None, where: str) -> tuple[int | None, Input | None, Writes]:
    """Return block, input and output for hook names of TransformerLens or module names of Hugging Face.

    Args:
        hook_in: what the layer reads; by default the MLP's input.
        hook_out: what it predicts; by default the MLP's output.
        where: the file, for messages.

    Raises:
        MxdError: another site than a block's MLP, or two blocks.
    """
    block_in, input = _hook(hook_in or "mlp.hook_in", HOOKS_IN, "input", where)
    block_out, writes = _hook(hook_out or "mlp.hook_out", HOOKS_OUT, "output", where)
    if None not in (block_in, block_out) and block_in != block_out:
        raise MxdError(f"{where}: it reads block {block_in} and writes block {block_out}; mxd's layers stay in one.")
    return block_in if block_in is not None else block_out, input, writes


def _hook(name: str, known: Mapping[str, Any], kind: str, where: str) -> tuple[int | None, Any]:
    match = re.fullmatch(r"(?:.*\.)?(\d+)\.(.+)", name)  # blocks.3.mlp.hook_in, model.layers.3.mlp.input
    block, rest = (int(match[1]), match[2]) if match else (None, name)
    if rest not in known:
        raise unknown(
            f"{kind} of {where}:",
            name,
            known,
            "A site before the norm, or outside a block's MLP, makes it another function than the MLP.",
        )
    return block, known[rest]


def only_one_per_block(layers: Sequence[Outgoing], tool: str) -> None:
    """Check that no two layers replace the same block.

    Raises:
        MxdError: two of them do.
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
    weights = {name: tensor for name, tensor in layer.state_dict().items() if not name.startswith("bos_")}
    return {name: tensor.detach().to("cpu", torch.float32) for name, tensor in weights.items()}

"""Checkpoints: a trained layer as a self-describing folder, and the state of a run under way. Never a pickle.

config.json          the layer's config, and its provenance
model.safetensors    its parameters
metrics.json         what was measured when training ended
README.md            the same for people
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mxd.errors import MxdError
from mxd.layers import ReplacementLayer, parse_layer

FORMAT = 1


class Provenance(BaseModel):
    """What a layer replaces and how it was trained."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str
    """Base model: Hub id, path or bundled name."""
    revision: str | None
    """The base model's commit, where known."""
    layer: int
    """Block number, from 0."""
    fingerprint: str
    """Hash of the replaced MLP's weights (``FrozenModel.fingerprint``)."""
    site: str = "mlp"
    """The module whose input and output were matched."""
    input_convention: str = "input of the mlp module: after the layer norm with its affine part; nothing folded"
    """Which tensor the layer reads."""
    model_dtype: str = "float32"
    """Dtype the base model ran in."""
    masked_ids: tuple[int, ...] = ()
    """Tokens left out in training; the base MLP answers there when spliced."""
    data: dict[str, Any] = {}
    """The training text: source, split, column, context, BOS."""
    training: dict[str, Any] = {}
    """The recipe: steps, learning rate, warm-up, batch."""
    tokens: int = 0
    """Token activations trained on."""
    seed: int = 0
    """Seed of the run."""
    versions: dict[str, str] = {}
    """Versions of mxd, torch, transformers, safetensors."""


@dataclass(frozen=True)
class Trained:
    """A layer together with its provenance, as loaded from a checkpoint."""

    layer: ReplacementLayer
    provenance: Provenance
    path: Path


def versions() -> dict[str, str]:
    """Return the versions of the packages a result depends on."""
    from importlib.metadata import version

    return {name: version(name) for name in ("mxd", "torch", "transformers", "safetensors")}


def save_layer(
    folder: str | Path,
    layer: ReplacementLayer,
    provenance: Provenance,
    metrics: Mapping[str, Any] | None = None,
) -> Path:
    """Write a layer as a self-describing folder; it appears whole or not at all.

    Raises:
        MxdError: the folder exists and is not a layer's, or cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and not _replaceable(folder):
        raise MxdError(f"{folder} exists and holds something else; choose another folder.")
    with atomic_folder(folder) as partial:
        config = {"format": FORMAT, "layer": layer.config.model_dump(), "provenance": provenance.model_dump()}
        write_json(partial / "config.json", config)
        write_json(partial / "metrics.json", dict(metrics or {}))
        save_file({k: v.detach().contiguous() for k, v in layer.state_dict().items()}, partial / "model.safetensors")
        (partial / "README.md").write_text(_card(layer, provenance), encoding="utf-8")
    return folder


def load_layer(folder: str | Path) -> Trained:
    """Load a layer strictly: every tensor present, none extra, every shape right.

    Raises:
        MxdError: no checkpoint there, or one that is damaged or of another format.
    """
    folder = Path(folder)
    config = read_config(folder)
    try:
        provenance = Provenance.model_validate(config.get("provenance"))
    except ValidationError as error:
        raise MxdError(f"{folder}/config.json: bad provenance: {error}") from error
    fields = config.get("layer")
    layer = parse_layer(fields if isinstance(fields, dict) else {}).build()
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise MxdError(
            f"cannot read {folder}/model.safetensors: {error}. Copy or download the checkpoint again."
        ) from error
    fit_tensors(layer.state_dict(), tensors, str(folder))
    layer.load_state_dict(tensors)
    return Trained(layer.eval().requires_grad_(False), provenance, folder)


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check a layer folder's ``config.json``.

    Raises:
        MxdError: there is none, or it is not this format.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise MxdError(f"no checkpoint at {str(folder)!r}: expected a folder with config.json and model.safetensors.")
    config = read_json(path)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise MxdError(f"{path} is not an mxd layer of format {FORMAT}.")
    return config


def find_layers(path: str | Path) -> list[Path]:
    """Return the layer folders at a path: the path itself, or those directly inside a run's folder.

    Raises:
        MxdError: there is none.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        return [path]
    children = path.iterdir() if path.is_dir() else ()  # dot folders: what a killed save left behind
    found = sorted(c for c in children if (c / "config.json").is_file() and not c.name.startswith("."))
    if not found:
        raise MxdError(f"no checkpoint at {str(path)!r}: expected a layer's folder, or a run's folder that holds some.")
    return found


def fit_tensors(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], where: str) -> None:
    """Check names and shapes of loaded tensors.

    Raises:
        MxdError: a tensor is missing, extra or of the wrong shape.
    """
    missing, extra = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or extra:
        raise MxdError(f"{where}: missing tensors: {missing or 'none'}; unexpected tensors: {extra or 'none'}.")
    for name, tensor in expected.items():
        if got[name].shape != tensor.shape:
            raise MxdError(f"{where}: {name} has shape {tuple(got[name].shape)}, expected {tuple(tensor.shape)}.")


def save_state(folder: Path, step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any], keep: int = 2) -> Path:
    """Write the state of a run after a step, and remove all but the newest ``keep``."""
    target = folder / f"step-{step:09d}"
    with atomic_folder(target) as partial:
        save_file({k: v.detach().contiguous() for k, v in tensors.items()}, partial / "state.safetensors")
        write_json(partial / "state.json", {"format": FORMAT, "step": step, **info})
    for old in _states(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Load the newest state of a run, or ``None`` where there is none.

    Raises:
        MxdError: the newest state is damaged.
    """
    states = _states(folder)
    if not states:
        return None
    try:
        return load_file(states[-1] / "state.safetensors"), read_json(states[-1] / "state.json")
    except (OSError, SafetensorError) as error:
        raise MxdError(f"cannot read {states[-1]}: {error}. Delete it to continue from the state before it.") from error


def _replaceable(folder: Path) -> bool:
    """Whether saving may replace a folder: it is empty, or holds a layer."""
    if not folder.is_dir():
        return False
    try:
        return not any(folder.iterdir()) or bool(read_config(folder))
    except MxdError:
        return False


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder that takes the target's place when the block ends well, and vanishes when it does not.

    Raises:
        MxdError: the disk is full or the place cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.parent / f".{target.name}.{uuid4().hex[:8]}"
        partial.mkdir()
    except OSError as error:
        raise MxdError(f"cannot write to {target.parent}: {error}.") from error
    try:
        yield partial
        for file in partial.iterdir():
            file.chmod(partial.stat().st_mode & 0o666)  # safetensors files are otherwise their owner's alone
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise MxdError(
            f"cannot write {target}: {error}. Free space or choose another folder; nothing was lost."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON that a person can read."""
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        MxdError: the file is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MxdError(f"cannot read {path}: {error}") from error


def _card(layer: ReplacementLayer, provenance: Provenance) -> str:
    config = layer.config
    return f"""# {config.label} for layer {provenance.layer} of {provenance.model}

A replacement for the MLP of block {provenance.layer} (counted from 0) of `{provenance.model}`, trained with mxd on
{provenance.tokens:,} token activations.

| | |
|---|---|
| method | {config.label} |
| sparsity | {config.sparsity.slug} |
| units | {config.num_units:,} |
| parameters | {config.num_params:,} |
| base model | {provenance.model} (revision {provenance.revision}) |
| reads | {provenance.input_convention} |

```python
import mxd

model = mxd.load_frozen("{provenance.model}")
with mxd.spliced(model, {{{provenance.layer}: mxd.load_layer("path/to/this/folder")}}):
    ...
```

`metrics.json` holds what was measured; `config.json` the full configuration and provenance.
"""

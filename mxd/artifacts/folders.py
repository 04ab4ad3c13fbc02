"""Layers' folders: finding them, locally or on the Hub, and reading them strictly."""

from glob import escape
from pathlib import Path
from typing import Any
from warnings import warn

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from mxd.artifacts import hub
from mxd.artifacts.card import FIGURE
from mxd.artifacts.listing import layers_in
from mxd.artifacts.provenance import Provenance
from mxd.artifacts.tensors import fit_tensors
from mxd.common.errors import MxdError, MxdWarning, told
from mxd.common.files import file_sha256, read_json, regular
from mxd.layers import ReplacementConfig, ReplacementLayer, parse_layer

FORMAT = 2
LAYER = ("config.json", "model.safetensors")
"""Files that make a layer; the others say what was measured of it."""
LAYER_FILES = (*LAYER, "metrics.json", "faithfulness.json", "README.md")
"""The files of a layer's folder; no others are ever uploaded or downloaded."""
SET_FILES = ("faithfulness.json", "whole.json", FIGURE, "README.md")
"""Files that may lie beside the layers of a set."""


class UnhashedWarning(MxdWarning):
    """A layer was saved before configs named the SHA-256 of the tensors, so that they cannot be verified."""


def load_strictly(folder: Path, verify: bool = True) -> tuple[ReplacementLayer, Provenance]:
    """Load the layer in a folder: every tensor as it was saved, none missing or extra; in evaluation mode.

    Args:
        folder: a layer's folder.
        verify: compare the tensors with the SHA-256 that ``config.json`` names.

    Raises:
        MxdError: there is no checkpoint, or it is damaged.
    """
    config, provenance = read_layer(folder)
    try:
        if verify:
            _compare(folder)
        tensors = load_file(regular(folder / "model.safetensors"))
    except (OSError, SafetensorError) as error:
        raise MxdError(
            f"cannot read {folder}/model.safetensors: {error}. Copy or download the checkpoint again."
        ) from error
    stored = sum(tensor.numel() for tensor in tensors.values())
    if config.num_params > 2 * stored + 2**20:  # before memory is allocated for whatever size config.json names
        raise MxdError(
            f"{folder}: config.json describes {config.num_params:,} parameters, model.safetensors holds {stored:,}. "
            "Copy or download the checkpoint again."
        )
    layer = config.build()
    fit_tensors(layer.state_dict(), tensors, str(folder))
    layer.load_state_dict(tensors)
    for name, tensor in layer.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise MxdError(f"{folder}: {name} holds values that are not finite. Copy or download it again.")
    return layer.eval().requires_grad_(False), provenance


def _compare(folder: Path) -> None:
    """Compare a layer's tensors with the SHA-256 that its config names.

    Raises:
        MxdError: they differ.
        OSError: the tensors cannot be read.
    """
    config, file = read_config(folder), folder / "model.safetensors"
    if "tensors_sha256" not in config:
        warn(
            f"{folder}/config.json, saved by an earlier version of mxd, names no SHA-256 of model.safetensors, so that "
            "the tensors cannot be verified.",
            UnhashedWarning,
            stacklevel=5,
        )
        return
    digest = file_sha256(file)
    if digest != config["tensors_sha256"]:
        cached = hub.cached_reference(folder) is not None
        remedy = f"Delete {file.resolve()} and download it" if cached else "Copy or download the checkpoint"
        raise MxdError(
            f"{file} is not what was saved: its SHA-256 is {digest}, config.json names {config['tensors_sha256']}. "
            f"{remedy} again."
        )


def read_layer(folder: Path) -> tuple[ReplacementConfig, Provenance]:
    """Read a layer's config and provenance, without its tensors.

    Raises:
        MxdError: there is no checkpoint, or its ``config.json`` is wrong.
    """
    config = read_config(folder)
    try:
        provenance = Provenance.model_validate(config.get("provenance"))
    except ValidationError as error:
        raise MxdError(f"{folder}/config.json: bad provenance: {told(error)}") from error
    return parse_layer(config.get("layer")), provenance


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check a layer folder's ``config.json``.

    Raises:
        MxdError: there is none, or it has another format.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise MxdError(f"no checkpoint at {str(folder)!r}: expected a folder with config.json and model.safetensors.")
    found = read_json(path)
    config = found if isinstance(found, dict) else {}
    if "model_type" in config:
        raise MxdError(f"{str(folder)!r} is a language model; expected a layer's folder, or a run's that holds some.")
    if (got := config.get("format")) != FORMAT:
        raise MxdError(
            f"{path} is not an mxd layer of format {FORMAT} (its format is {got!r}); use the version of mxd that "
            "wrote it, or train the layer again."
        )
    return config


def find_layers(
    path: str | Path,
    pattern: str = "*",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    weights: bool = True,
) -> list[Path]:
    """Return the layer folders at a path or a Hub reference: the folder itself, or those directly inside.

    From the Hub the configs are downloaded first, then the folders that they show to be layers, and nothing else.

    Args:
        path: a layer's folder, a run's folder, or a Hub reference to either.
        pattern: selects folders of a set by name.
        revision: as in ``load_layer``.
        token: as in ``load_layer``.
        cache_dir: as in ``load_layer``.
        local_files_only: as in ``load_layer``.
        weights: also download the other files, tensors included.

    Raises:
        MxdError: there is none, or the Hub cannot be reached.
    """
    reference = hub.reference_of(path, revision)
    if reference is None:
        return layers_in(Path(path), pattern, str(path))
    access = (token, cache_dir, local_files_only)
    folder = hub.download(reference, ("config.json", "*/config.json"), *access)
    layers = layers_in(folder, pattern, str(reference))
    for layer in layers:
        if layer != folder and not hub.is_name(layer.name):
            raise MxdError(
                f"{reference} holds a layer in a folder called {layer.name!r}; a name consists of letters, digits, "
                "'.', '_', '+', '=' and '-' and begins with a letter, a digit or '_'. Choose the others with a "
                "pattern, or ask the author to rename it."
            )
    for layer in layers:
        read_config(layer)
    if weights:
        prefixes = ["" if layer == folder else f"{escape(layer.name)}/" for layer in layers]
        files = [f"{prefix}{file}" for prefix in prefixes for file in LAYER_FILES]
        hub.download(hub.cached_reference(folder) or reference, [*files, *SET_FILES], *access)
    return layers


def layer_name(folder: Path) -> str:
    """Return a layer's name: its folder's, or its repository's where that is a single layer."""
    reference = hub.cached_reference(folder)
    return reference.name if reference else folder.resolve().name


def is_replaceable(folder: Path) -> bool:
    """Return whether saving may replace a folder: it is empty, or holds a layer."""
    if not folder.is_dir():
        return False
    try:
        return not any(folder.iterdir()) or bool(read_config(folder))
    except MxdError:
        return False

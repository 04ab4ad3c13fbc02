"""Checkpoints: a trained layer as a self-describing folder. Never a pickle.

config.json          the layer's config, its provenance, and the SHA-256 of model.safetensors
model.safetensors    its parameters
metrics.json         metrics at the end of training
README.md            a card, for people

A set is a folder of such folders. Both can be local or on the Hub: a Hub reference is accepted wherever a path is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from mxd.artifacts import hub
from mxd.artifacts.card import Member, layer_card
from mxd.artifacts.folders import FORMAT, find_layers, is_replaceable, layer_name, load_strictly
from mxd.artifacts.provenance import Provenance
from mxd.artifacts.transfer import push
from mxd.common.errors import MxdError
from mxd.common.files import atomic_folder, file_sha256, write_json
from mxd.layers import ReplacementLayer


@dataclass(frozen=True, repr=False)
class Trained:
    """A layer together with its provenance, as loaded from a checkpoint; called, it is its layer."""

    layer: ReplacementLayer
    provenance: Provenance
    path: Path = Path()
    """Where it was loaded from; of a layer that was not saved, the empty path."""

    def __call__(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return the prediction of the MLP's output from its input (an autoencoder reads the output itself)."""
        return self.layer(x)

    def __repr__(self) -> str:
        return f"Trained {self.layer.config.summary}, for block {self.provenance.block} of {self.provenance.model}"

    def push_to_hub(
        self,
        repo: str,
        private: bool = False,
        revision: str | None = None,
        create_pr: bool = False,
        token: str | bool | None = None,
        license: str | None = None,
    ) -> hub.Pushed:
        """Push the checkpoint that this was loaded from, as it is on disk; save a changed layer first.

        Arguments and errors as ``mxd.artifacts.transfer.push``; a layer that was never saved is refused, too.
        """
        if self.path == Path():
            raise MxdError("this layer was never saved; mxd.save_layer(folder, layer, provenance) first.")
        return push(self.path, repo, private, revision, create_pr, token, license)


def save_layer(
    folder: str | Path,
    layer: ReplacementLayer,
    provenance: Provenance,
    metrics: Mapping[str, Any] | None = None,
) -> Path:
    """Write a layer as a self-describing folder, atomically.

    Args:
        folder: where; a layer that is there already is replaced.
        layer: the layer.
        provenance: what it replaces and how it was trained; of a layer from a loop of your own, at least
            ``Provenance.of(model, block)``.
        metrics: metrics at the end of training.

    Returns:
        The folder.

    Raises:
        MxdError: the folder exists and is not a layer's, or cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and not is_replaceable(folder):
        raise MxdError(f"{folder} exists and holds something else; choose another folder.")
    with atomic_folder(folder) as partial:
        tensors = partial / "model.safetensors"
        save_file({k: v.detach().contiguous() for k, v in layer.state_dict().items()}, tensors)
        config = {"format": FORMAT, "tensors_sha256": file_sha256(tensors)}
        config |= {"layer": layer.config.model_dump(), "provenance": provenance.model_dump()}
        write_json(partial / "config.json", config)
        write_json(partial / "metrics.json", dict(metrics or {}))
        (partial / "README.md").write_text(layer_card(Member("", layer.config, provenance)), encoding="utf-8")
    return folder


def load_layer(
    path: str | Path,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    verify: bool = True,
) -> Trained:
    """Load a layer strictly: every bit as it was saved, every tensor present, none extra, every shape right.

    Args:
        path: a layer's folder, or a Hub reference ``org/name[/subfolder][@revision]`` to one.
        revision: branch, tag or commit on the Hub; the reference may name it instead.
        token: access token for the Hub; by default the one of ``hf auth login`` or ``HF_TOKEN``.
        cache_dir: where downloads are kept; by default the Hub's usual cache.
        local_files_only: never ask the Hub; files missing from the cache are an error.
        verify: compare the tensors with the SHA-256 in ``config.json``; without one there is an ``UnhashedWarning``.
            docs/reliability.md says what it costs.

    Raises:
        MxdError: there is no checkpoint, it is damaged or of another format, there are several, or the Hub cannot be
            reached.
    """
    folders = find_layers(path, "*", revision, token, cache_dir, local_files_only)
    if len(folders) > 1:
        names = ", ".join(map(layer_name, folders))
        raise MxdError(f"{str(path)!r} holds {len(folders)} layers; add the name of one, or use load_layers: {names}.")
    return _trained(folders[0], verify)


from_pretrained = load_layer
"""``load_layer``, by the name that Hub users look for."""


def load_layers(
    path: str | Path,
    pattern: str = "*",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    verify: bool = True,
) -> dict[str, Trained]:
    """Load a set of layers, whole or by a pattern of their folders' names (``*-k32``), strictly: name -> layer.

    Arguments and errors as ``load_layer``.
    """
    folders = find_layers(path, pattern, revision, token, cache_dir, local_files_only)
    return {layer_name(folder): _trained(folder, verify) for folder in folders}


def _trained(folder: Path, verify: bool) -> Trained:
    return Trained(*load_strictly(folder, verify), folder)

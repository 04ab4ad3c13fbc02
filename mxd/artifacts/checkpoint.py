"""Checkpoints: a trained layer as a self-describing folder. Never a pickle.

config.json          the layer's config, its provenance, and the SHA-256 of model.safetensors
model.safetensors    its parameters
metrics.json         what was measured when training ended
README.md            the same for people

A set is a folder of such folders. Both lie on this machine or on the Hub; a reference stands wherever a path does.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from filecmp import cmp
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any
from uuid import uuid4
from warnings import warn

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mxd.artifacts import hub
from mxd.artifacts.card import FIGURE, Evaluation, Member, layer_card, license_of, set_card
from mxd.artifacts.hub import HubReference
from mxd.common.errors import MxdError, MxdWarning
from mxd.common.parsing import file_sha256, parse_json, read_text, regular
from mxd.layers import ReplacementConfig, ReplacementLayer, parse_layer

FORMAT = 1
LAYER_FILES = ("config.json", "model.safetensors", "metrics.json", "evaluation.json", "README.md")
"""What a layer's folder holds; only these are ever sent or fetched."""
SET_FILES = ("evaluation.json", FIGURE, "README.md")
"""What may lie beside the layers of a set."""


class UnhashedWarning(MxdWarning):
    """A layer was saved before configs named the SHA-256 of the tensors, so nothing tells whether they are whole."""


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
    base_fingerprint: str = ""
    """Hash of the whole base model (``FrozenModel.base_fingerprint``); "" where it was not recorded."""
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
    text_hash: str = ""
    """Hash of the text's token ids, of a stream up to where training ended; of a mixed cache, of its shards."""
    training: dict[str, Any] = {}
    """The recipe: steps, learning rate, warm-up, batch."""
    tokens: int = 0
    """Token activations trained on."""
    seed: int = 0
    """Seed of the run."""
    config_hash: str = ""
    """Hash of the run's whole config but its name and place."""
    versions: dict[str, str] = {}
    """Versions of mxd, torch, transformers, safetensors."""


@dataclass(frozen=True)
class Trained:
    """A layer together with its provenance, as loaded from a checkpoint."""

    layer: ReplacementLayer
    provenance: Provenance
    path: Path

    def push_to_hub(
        self,
        repo: str,
        private: bool = False,
        revision: str | None = None,
        create_pr: bool = False,
        token: str | bool | None = None,
        license: str | None = None,
    ) -> hub.Pushed:
        """Push the checkpoint that this was loaded from, as it is on disk (``push``); save a changed layer first."""
        return push(self.path, repo, private, revision, create_pr, token, license)


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
        local_files_only: never ask the Hub; what is not in the cache is an error.
        verify: compare the tensors with the SHA-256 that ``config.json`` names; where it names none there is an
            ``UnhashedWarning``. docs/reliability.md has what it costs.

    Raises:
        MxdError: no checkpoint there, one that is damaged or of another format, several, or the Hub cannot be reached.
    """
    found = find_layers(path, "*", revision, token, cache_dir, local_files_only)
    if len(found) > 1:
        names = ", ".join(map(layer_name, found))
        raise MxdError(f"{str(path)!r} holds {len(found)} layers; add the name of one, or use load_layers: {names}.")
    return _load(found[0], verify)


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
    found = find_layers(path, pattern, revision, token, cache_dir, local_files_only)
    return {layer_name(folder): _load(folder, verify) for folder in found}


def _load(folder: Path, verify: bool = True) -> Trained:
    config, provenance = read_layer(folder)
    try:
        if verify:
            _compare(folder)
        tensors = load_file(regular(folder / "model.safetensors"))
    except (OSError, SafetensorError) as error:
        raise MxdError(
            f"cannot read {folder}/model.safetensors: {error}. Copy or download the checkpoint again."
        ) from error
    numbers = sum(tensor.numel() for tensor in tensors.values())
    if config.num_params > 2 * numbers + 2**20:  # before a layer of whatever size config.json names is made
        raise MxdError(
            f"{folder}: config.json describes {config.num_params:,} parameters, model.safetensors holds {numbers:,}. "
            "Copy or download the checkpoint again."
        )
    layer = config.build()
    fit_tensors(layer.state_dict(), tensors, str(folder))
    layer.load_state_dict(tensors)
    for name, parameter in layer.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise MxdError(f"{folder}: {name} holds values that are no finite numbers. Copy or download it again.")
    return Trained(layer.eval().requires_grad_(False), provenance, folder)


def _compare(folder: Path) -> None:
    """Compare a layer's tensors with the SHA-256 that its config names.

    Raises:
        MxdError: it is another.
        OSError: the tensors cannot be read.
    """
    config, file = read_config(folder), folder / "model.safetensors"
    if "tensors_sha256" not in config:
        warn(
            f"{folder}/config.json, saved by an earlier version of mxd, names no SHA-256 of model.safetensors: whether "
            "that is as it was saved cannot be told.",
            UnhashedWarning,
            stacklevel=4,
        )
        return
    found = file_sha256(file)
    if found != config["tensors_sha256"]:
        cached = hub.cached_reference(folder) is not None
        remedy = f"Delete {file.resolve()} and download it" if cached else "Copy or download the checkpoint"
        raise MxdError(
            f"{file} is not what was saved: its SHA-256 is {found}, config.json names {config['tensors_sha256']}. "
            f"{remedy} again."
        )


def read_layer(folder: Path) -> tuple[ReplacementConfig, Provenance]:
    """Read what a layer's folder says of it, without its tensors.

    Raises:
        MxdError: no checkpoint there, or its ``config.json`` is wrong.
    """
    config = read_config(folder)
    try:
        provenance = Provenance.model_validate(config.get("provenance"))
    except ValidationError as error:
        raise MxdError(f"{folder}/config.json: bad provenance: {error}") from error
    return parse_layer(config.get("layer")), provenance


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

    From the Hub come first the configs, and what they show to be layers then: nothing else is ever downloaded.

    Args:
        path: a layer's folder, a run's folder, or a Hub reference to either.
        pattern: of a set only the folders whose names match.
        revision: as in ``load_layer``.
        token: as in ``load_layer``.
        cache_dir: as in ``load_layer``.
        local_files_only: as in ``load_layer``.
        weights: from the Hub bring the tensors, too.

    Raises:
        MxdError: there is none, or the Hub cannot be reached.
    """
    reference = hub.reference_of(path, revision)
    if reference is None:
        return _layers_in(Path(path), pattern, str(path))
    access = (token, cache_dir, local_files_only)
    folder = hub.download(reference, ("config.json", "*/config.json"), *access)
    found = _layers_in(folder, pattern, str(reference))
    for layer in found:
        if layer != folder and not hub.is_name(layer.name):
            raise MxdError(
                f"{reference} holds a layer in a folder called {layer.name!r}; a name is made of letters, digits, '.', "
                "'_', '+', '=' and '-' and begins with one of the first two. Choose the others with a pattern, or ask "
                "the author to rename it."
            )
    for layer in found:
        read_config(layer)
    if weights:
        places = ["" if layer == folder else f"{escape(layer.name)}/" for layer in found]
        files = [f"{place}{file}" for place in places for file in LAYER_FILES]
        hub.download(hub.cached_reference(folder) or reference, [*files, *SET_FILES], *access)
    return found


def _layers_in(folder: Path, pattern: str, shown: str) -> list[Path]:
    try:
        return _matching(folder, pattern, shown)
    except OSError as error:
        raise MxdError(f"cannot read {shown!r}: {error.strerror}.") from error


def _matching(folder: Path, pattern: str, shown: str) -> list[Path]:
    if (folder / "config.json").is_file():
        if pattern != "*":
            raise MxdError(f"{shown!r} is one layer, from which pattern {pattern!r} cannot choose; leave it out.")
        return [folder]
    children = folder.iterdir() if folder.is_dir() else ()  # dot folders: what a killed save left behind
    layers = sorted(c for c in children if (c / "config.json").is_file() and not c.name.startswith("."))
    if not layers:
        raise MxdError(
            f"no checkpoint at {shown!r}: expected a folder with config.json and model.safetensors, a run's folder "
            "that holds some, or a Hub reference org/name[/subfolder][@revision] to either."
        )
    found = [layer for layer in layers if fnmatchcase(layer.name, pattern)]
    if not found:
        names = ", ".join(layer.name for layer in layers)
        raise MxdError(f"no layer at {shown!r} matches {pattern!r}; there are: {names}.")
    return found


def layer_name(folder: Path) -> str:
    """Return a layer's name: its folder's, or its repository's where that is one layer."""
    reference = hub.cached_reference(folder)
    return reference.name if reference else folder.resolve().name


def push(
    path: str | Path,
    repo: str,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    license: str | None = None,
    message: str | None = None,
) -> hub.Pushed:
    """Push a layer, or a run's folder as a set, to a model repository on the Hub, with cards written for it.

    Only ``LAYER_FILES`` and ``SET_FILES`` are sent. Files of the repository that are not here stay as they are.

    Args:
        path: a layer's folder or a run's folder.
        repo: ``org/name``; made where it is not there yet.
        private: make the repository private; an error where it is there and public.
        revision: branch to push to, made where it is not there yet.
        create_pr: open a pull request instead.
        token: as in ``load_layer``.
        license: the Hub's name of a license; by default what the card there states, else unknown.
        message: the commit's message.

    Raises:
        MxdError: a damaged checkpoint, a name that cannot be one on the Hub, or the Hub refuses or cannot be reached.
    """
    if create_pr and revision is not None:
        raise MxdError("a pull request goes to main; leave out --revision or --create-pr.")
    folder = Path(path)
    layers = _layers_in(folder, "*", str(path))
    single = layers == [folder]
    places = {layer: "" if single else f"{HubReference.parse(f'{repo}/{layer.name}').name}/" for layer in layers}
    files = {place + name: layer / name for layer, place in places.items() for name in LAYER_FILES}
    files |= {} if single else {name: folder / name for name in SET_FILES}
    files = {name: file for name, file in files.items() if file.is_file() and file.name != "README.md"}
    links = [str(file) for file in files.values() if file.is_symlink() and hub.cached_reference(file.parent) is None]
    if links:
        raise MxdError(
            f"{links[0]} is a link, which could lead to anything; put the file itself there before you push."
        )
    members = [_member(layer, places[layer]) for layer in layers]
    remote = hub.prepare(repo, private, revision, token)
    _check_same_kind(repo, single, remote.files)
    license = license or license_of(remote.readme)

    title = HubReference.parse(repo).name

    def cards(pin: str | None) -> dict[str, str]:
        found = {}
        for member in members:
            address = str(HubReference(repo, member.name, pin))
            found[f"{member.name}/README.md".lstrip("/")] = layer_card(member, address, license, title)
        if not single:
            found["README.md"] = set_card(members, str(HubReference(repo, "", pin)), license, title, FIGURE in files)
        return found

    what = f"{members[0].config.label} layer" if single else f"{len(members)} layers"
    return hub.push(repo, files, cards, remote, revision, create_pr, token, message or f"Upload {what} with mxd")


def _member(folder: Path, place: str) -> Member:
    """Load a layer strictly, so that nothing damaged is shared, and say what its card needs."""
    trained = _load(folder)
    beside = [Evaluation.read(f / "evaluation.json") for f in (folder, folder.resolve().parent)]
    name, called = place.rstrip("/"), layer_name(folder)
    found = [Member(name, trained.layer.config, trained.provenance, e, called) for e in beside]
    return next((member for member in found if member.result), found[0])


def _check_same_kind(repo: str, single: bool, there: Collection[str]) -> None:
    """Refuse to lay a layer over a set, or a set over a layer: only the layer would be found."""
    holds_layer = "config.json" in there
    holds_set = any(path.count("/") == 1 and path.endswith("/config.json") for path in there)
    if (single and holds_set and not holds_layer) or (not single and holds_layer):
        kind = "one layer" if holds_layer else "a set of layers"
        raise MxdError(f"{repo} holds {kind}, so this {'layer' if single else 'set'} needs a repository of its own.")


def pull(
    reference: str,
    folder: str | Path | None = None,
    pattern: str = "*",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> list[Path]:
    """Copy a layer, or a set whole or by pattern, from the Hub into a folder; each layer appears whole or not at all.

    What is in the folder already is never changed: the same again is fine, anything else an error.

    Args:
        reference: ``org/name[/subfolder][@revision]``.
        folder: where the layer goes, or the layers of a set; by default ``checkpoints/<name>``.
        pattern: of a set only the folders whose names match.
        revision: as in ``load_layer``.
        token: as in ``load_layer``.
        cache_dir: as in ``load_layer``.
        local_files_only: as in ``load_layer``.

    Returns:
        The layers' folders.

    Raises:
        MxdError: as ``load_layer``; or the folder holds something else, or cannot be written.
    """
    wanted = hub.reference_of(reference, revision)
    if wanted is None:
        raise MxdError(f"{reference!r} is not on the Hub; expected org/name[/subfolder][@revision].")
    found = find_layers(reference, pattern, revision, token, cache_dir, local_files_only)
    for source in found:
        _load(source)
    target = Path(folder) if folder is not None else Path("checkpoints", wanted.name)
    at = hub.cached_reference(found[0])
    single = at is not None and at.subfolder == wanted.subfolder
    copies = {target if single else target / layer.name: layer for layer in found}
    beside = {} if single else {target / name: found[0].parent / name for name in SET_FILES}
    beside = {copy: source for copy, source in beside.items() if source.is_file()}
    missing = {copy: source for copy, source in copies.items() if not _holds(copy, source)}
    for copy, source in beside.items():
        if copy.exists() and not cmp(source, copy, shallow=False):
            raise _taken(copy)
    for copy, source in missing.items():
        with atomic_folder(copy) as partial:
            for name in _layer_files(source):
                shutil.copyfile(source / name, partial / name)
    for copy, source in beside.items():
        with atomic_file(copy) as partial:
            shutil.copyfile(source, partial)
    return list(copies)


def _layer_files(folder: Path) -> list[str]:
    return [name for name in LAYER_FILES if (folder / name).is_file()]


def _holds(place: Path, source: Path) -> bool:
    """Whether a folder holds this layer already.

    Raises:
        MxdError: it holds something else.
    """
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return False
    if any(not (place / n).is_file() or not cmp(source / n, place / n, shallow=False) for n in _layer_files(source)):
        raise _taken(place)
    return True


def _taken(place: Path) -> MxdError:
    return MxdError(f"{place} exists and holds something else; choose another folder, or move it away.")


def fit_tensors(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], where: str) -> None:
    """Check names, shapes and kinds of loaded tensors.

    Raises:
        MxdError: a tensor is missing, extra, of the wrong shape, or holds whole numbers where others belong.
    """
    missing, extra = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or extra:
        raise MxdError(f"{where}: missing tensors: {missing or 'none'}; unexpected tensors: {extra or 'none'}.")
    for name, tensor in expected.items():
        if got[name].shape != tensor.shape:
            raise MxdError(f"{where}: {name} has shape {tuple(got[name].shape)}, expected {tuple(tensor.shape)}.")
        if got[name].dtype.is_floating_point != tensor.dtype.is_floating_point:
            raise MxdError(f"{where}: {name} is {got[name].dtype}, expected {tensor.dtype}.")


def _replaceable(folder: Path) -> bool:
    """Whether saving may replace a folder: it is empty, or holds a layer."""
    if not folder.is_dir():
        return False
    try:
        return not any(folder.iterdir()) or bool(read_config(folder))
    except MxdError:
        return False


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder that takes the target's place when the block ends well, and vanishes when it does not.

    Whatever happens, a power cut included, a reader finds the target whole or not at all.

    Raises:
        MxdError: the disk is full or the place cannot be written.
    """
    partial = partial_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise MxdError(f"cannot write to {target.parent}: {error}.") from error
    try:
        with writing(target):
            yield partial
            for path in partial.rglob("*"):
                settle(path)
            publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Give a name for a new file that takes the target's place when the block ends well; as ``atomic_folder``.

    Raises:
        MxdError: it cannot be written.
    """
    partial = partial_name(target)
    with writing(target):
        try:
            yield partial
            settle(partial)
            partial.replace(target)
            settle(target.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Give a name for a file at a place that a person chose; as ``atomic_file``, but what is no file stays what it is.

    Folders above are made, links are followed, and a pipe or device is written to directly.

    Raises:
        MxdError: it cannot be written.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():
        with writing(target):
            yield target
    else:
        with atomic_file(target.resolve()) as file:
            yield file


def partial_name(target: Path) -> Path:
    """Return a new name beside the target for what is not finished; ``clear_partials`` knows it."""
    return target.with_name(f".{target.name}.{uuid4().hex[:8]}")


def is_partial(path: Path) -> bool:
    """Whether a file or folder has a name that ``partial_name`` gives."""
    return re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name) is not None


def clear_partials(folder: Path) -> None:
    """Remove the unfinished files and folders that killed saves left in a folder that nobody else is writing to."""
    for path in filter(is_partial, folder.glob(".*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Say in one line why something could not be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise MxdError(
            f"cannot write {target}: {error}. Free space or choose another folder; nothing was lost."
        ) from error


def settle(path: Path) -> None:
    """Give a new file the mode that any new file has, and wait until it is on the disk; a folder likewise."""
    if path.is_file():
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors files are otherwise their owner's alone
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system syncs folders
            raise
    finally:
        os.close(handle)


def publish(partial: Path, target: Path) -> None:
    """Give a finished folder, whose files are settled, its name; what had it before goes when that is done.

    Raises:
        OSError: it could not; the target is as it was.
    """
    settle(partial)
    before = partial_name(target) if target.is_dir() else None
    if before is not None:
        target.rename(before)
    try:
        partial.rename(target)
    except BaseException:
        if before is not None:
            before.rename(target)
        raise
    settle(target.parent)
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON that a person can read."""
    path.write_text(json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        MxdError: the file is not JSON.
    """
    try:
        return parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise MxdError(f"cannot read {path}: {error}") from error

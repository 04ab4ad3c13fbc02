"""Push layers to the Hugging Face Hub, and pull them from there."""

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from filecmp import cmp
from functools import cache
from pathlib import Path

from mxd.artifacts import hub
from mxd.artifacts.card import FIGURE, Member, layer_card, license_of, set_card
from mxd.artifacts.folders import LAYER, LAYER_FILES, SET_FILES, find_layers, load_strictly
from mxd.artifacts.hub import HubReference
from mxd.artifacts.listing import layers_in
from mxd.artifacts.measured import Evaluation, Whole
from mxd.artifacts.readme import member_of
from mxd.common.errors import MxdError
from mxd.common.files import atomic_file, atomic_folder
from mxd.common.numbers import plural


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

    Only ``LAYER_FILES`` and ``SET_FILES`` are uploaded. Other files in the repository stay as they are.

    Args:
        path: a layer's folder or a run's folder.
        repo: ``org/name``; created if necessary.
        private: create the repository as private; an error if it exists and is public.
        revision: branch to push to, created if necessary.
        create_pr: open a pull request instead.
        token: as in ``load_layer``.
        license: the Hub's name of a license; by default the one that the repository's card states, else unknown.
        message: the commit's message.

    Raises:
        MxdError: a checkpoint is damaged, its name is not valid on the Hub, or the Hub refuses or cannot be reached.
    """
    if create_pr and revision is not None:
        raise MxdError("a pull request goes to main; leave out --revision or --create-pr.")
    folder = Path(path)
    layers = layers_in(folder, "*", str(path))
    single = layers == [folder]
    prefixes = {layer: "" if single else f"{HubReference.parse(f'{repo}/{layer.name}').name}/" for layer in layers}
    files = {prefix + name: layer / name for layer, prefix in prefixes.items() for name in LAYER_FILES}
    files |= {} if single else {name: folder / name for name in SET_FILES}
    files = {name: file for name, file in files.items() if file.is_file() and file.name != "README.md"}
    links = [str(file) for file in files.values() if file.is_symlink() and hub.cached_reference(file.parent) is None]
    if links:
        raise MxdError(
            f"{links[0]} is a link, which could lead to anything; put the file itself there before you push."
        )
    shown = _Shown.read(folder, prefixes, FIGURE in files)
    remote = hub.prepare(repo, private, revision, token)
    _check_same_kind(repo, single, remote.files)
    license = license or license_of(remote.readme)

    def cards(pin: str | None) -> dict[str, str]:
        return shown.cards(license, HubReference.parse(repo).name, repo, pin)

    what = f"{shown.members[0].config.label} layer" if single else plural(len(shown.members), "layer")
    return hub.push(repo, files, cards, remote, revision, create_pr, token, message or f"Upload {what} with mxd")


def write_cards(path: str | Path, license: str | None = None) -> list[Path]:
    """Write the cards of a layer or a run into their folders as ``push`` would: with what has been measured since.

    Args:
        path: a layer's folder or a run's folder.
        license: the Hub's name of a license.

    Returns:
        The cards.

    Raises:
        MxdError: a checkpoint is damaged.
    """
    folder = Path(path)
    layers = layers_in(folder, "*", str(path))
    prefixes = {layer: "" if layer == folder else f"{layer.name}/" for layer in layers}
    cards = _Shown.read(folder, prefixes, (folder / FIGURE).is_file()).cards(license, folder.resolve().name)
    for name, text in cards.items():
        with atomic_file(folder / name) as file:
            file.write_text(text, encoding="utf-8")
    return [folder / name for name in cards]


@dataclass(frozen=True)
class _Shown:
    """What the cards of a layer, or of a set, show."""

    members: list[Member]
    single: bool
    figure: bool
    whole: Whole | None

    @classmethod
    def read(cls, folder: Path, prefixes: Mapping[Path, str], figure: bool) -> "_Shown":
        """Read layers, by their folders, and what was measured of them."""
        evaluation = cache(Evaluation.read)
        members = []
        for layer, prefix in prefixes.items():
            module, provenance = load_strictly(layer)  # so that nothing damaged is shared
            members.append(member_of(layer, prefix.rstrip("/"), module.config, provenance, evaluation))
        return cls(members, list(prefixes) == [folder], figure, Whole.read(folder / "whole.json"))

    def cards(self, license: str | None, title: str, repo: str | None = None, pin: str | None = None) -> dict[str, str]:
        """Return each card's file and text; without a repository they name a folder in place of an address."""

        def address(name: str) -> str | None:
            return str(HubReference(repo, name, pin)) if repo else None

        texts = {
            f"{member.name}/README.md".lstrip("/"): layer_card(member, address(member.name), license, title)
            for member in self.members
        }
        if not self.single:
            texts["README.md"] = set_card(self.members, address(""), license, title, self.figure, self.whole)
        return texts


def _check_same_kind(repo: str, single: bool, paths: Collection[str]) -> None:
    """Refuse to push a layer into a repository with a set, or a set into one with a layer: only the layer is found."""
    holds_layer = "config.json" in paths
    holds_set = any(path.count("/") == 1 and path.endswith("/config.json") for path in paths)
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
    """Copy a layer, a set, or part of a set from the Hub into a folder; each layer is written atomically.

    Existing files are never changed. A layer that is there already stays, with its card and what was measured of it
    here; another one in its place is an error.

    Args:
        reference: ``org/name[/subfolder][@revision]``.
        folder: the folder of the layer, or the folder for the layers of a set; by default ``checkpoints/<name>``.
        pattern: selects folders of a set by name.
        revision: as in ``load_layer``.
        token: as in ``load_layer``.
        cache_dir: as in ``load_layer``.
        local_files_only: as in ``load_layer``.

    Returns:
        The layers' folders.

    Raises:
        MxdError: as ``load_layer``; or the folder holds something else, or cannot be written.
    """
    parsed = hub.reference_of(reference, revision)
    if parsed is None:
        raise MxdError(f"{reference!r} is not on the Hub; expected org/name[/subfolder][@revision].")
    layers = find_layers(reference, pattern, revision, token, cache_dir, local_files_only)
    for layer in layers:
        load_strictly(layer)
    target = Path(folder) if folder is not None else Path("checkpoints", parsed.name)
    cached = hub.cached_reference(layers[0])
    single = cached is not None and cached.subfolder == parsed.subfolder
    copies = {target if single else target / layer.name: layer for layer in layers}
    beside = {} if single else {target / name: layers[0].parent / name for name in SET_FILES}
    beside = {copy: source for copy, source in beside.items() if source.is_file()}
    missing = {copy: source for copy, source in copies.items() if not _holds(copy, source)}
    for copy, source in beside.items():
        if len(missing) == len(copies) and copy.exists() and not cmp(source, copy, shallow=False):
            raise _taken(copy)  # where layers of the set are there already, what stands beside them may have changed
    for copy, source in missing.items():
        with atomic_folder(copy) as partial:
            for name in _layer_files(source):
                shutil.copyfile(source / name, partial / name)
    for copy, source in beside.items():
        if not copy.exists():
            with atomic_file(copy) as partial:
                shutil.copyfile(source, partial)
    return list(copies)


def _layer_files(folder: Path) -> list[str]:
    return [name for name in LAYER_FILES if (folder / name).is_file()]


def _holds(folder: Path, source: Path) -> bool:
    """Return whether a folder holds this layer already.

    Raises:
        MxdError: it holds something else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    if any(not (folder / n).is_file() or not cmp(source / n, folder / n, shallow=False) for n in LAYER):
        raise _taken(folder)
    return True


def _taken(path: Path) -> MxdError:
    return MxdError(f"{path} exists and holds something else; choose another folder, or move it away.")

"""Sets: layers of different blocks that are spliced in together. A run holds one for each kind of layer it trains."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from mxd.artifacts.checkpoint import Trained, load_layer
from mxd.artifacts.folders import find_layers
from mxd.artifacts.hub import cached_reference
from mxd.common.errors import MxdError
from mxd.layers import ReplacementConfig
from mxd.model.frozen import FrozenModel

MIXED = "together"
"""The name of a set of layers of several kinds, one for each block."""

Set = dict[int, Trained]
"""Block number -> layer."""


def named_layers(paths: Sequence[str | PathLike[str] | Trained]) -> dict[str, Trained]:
    """Load checkpoints; name -> layer.

    Args:
        paths: layer folders, run folders (every layer in them), Hub references to either, or layers that are loaded.

    Raises:
        MxdError: a damaged checkpoint, or two of one name.
    """
    loaded: dict[str, Trained] = {}
    for item in paths:
        if isinstance(item, str | PathLike):
            found: dict[str, Any] = {name_of(path): path for path in find_layers(_path(item))}
        else:
            found = {_own_name(as_trained(item)): item}
        for name, layer in found.items():
            if name in loaded:
                raise MxdError(f"two checkpoints are called {name}; give one, or each apart.")
            loaded[name] = as_trained(layer)
    return loaded


def as_trained(item: Any) -> Trained:
    """Return a layer with its provenance, loaded if it is a path or a Hub reference.

    Raises:
        MxdError: it is something else, or as ``load_layer``.
    """
    if isinstance(item, str | PathLike):
        return load_layer(_path(item))
    if not isinstance(item, Trained):
        raise MxdError(
            f"a {type(item).__name__} does not say what it replaces; give a path, or a layer with its provenance: "
            "mxd.Trained(layer, mxd.Provenance.of(model, block))."
        )
    return item


def _path(item: str | PathLike[str]) -> str | Path:
    """Return a path as such; a string may be a Hub reference."""
    return item if isinstance(item, str) else Path(item)


def _own_name(trained: Trained) -> str:
    """Return the name of a loaded layer: its checkpoint's, or its block and kind where it was never saved."""
    if trained.path != Path():
        return name_of(trained.path)
    return f"block{trained.provenance.block}-{trained.layer.config.slug}"


def name_of(path: Path) -> str:
    """Return a checkpoint's name in tables: run and folder, or its name on the Hub."""
    reference = cached_reference(path)
    if reference is not None:
        return str(replace(reference, revision=None))
    resolved = path.resolve()
    return f"{resolved.parent.name}/{resolved.name}"


def sets_of(layers: Mapping[str, Trained]) -> dict[str, Set]:
    """Return the sets that layers make, by name (``set_names``); a set's blocks are in order.

    Args:
        layers: name -> layer, where a name is ``RUN/FOLDER``.

    Raises:
        MxdError: two layers of one kind and run replace the same MLP.
    """
    named = set_names({name: (own.provenance.block, own.layer.config) for name, own in layers.items()})
    return {key: {block: layers[name] for block, name in members.items()} for key, members in named.items()}


def set_names(layers: Mapping[str, tuple[int, ReplacementConfig]]) -> dict[str, dict[int, str]]:
    """Return set -> block -> name of a layer; a set's blocks are in order.

    Where each layer has a block of its own they are one set. Otherwise layers of one kind are: of one method and form
    with one sparsity, as ``ReplacementConfig.slug`` says (``mxd-k32``). Layers of one kind for the same block are told
    apart by their runs, ``RUN/mxd-k32``.

    Args:
        layers: name -> block and config, where a name is ``RUN/FOLDER`` or, for layers of one run, ``FOLDER``.

    Raises:
        MxdError: two layers of one kind and run replace the same MLP.
    """
    kinds = {name: config.slug for name, (_, config) in layers.items()}
    distinct = sorted(set(kinds.values()))
    if len({block for block, _ in layers.values()}) == len(layers):
        return _grouped(layers, dict.fromkeys(layers, distinct[0] if len(distinct) == 1 else MIXED))
    try:
        return _grouped(layers, kinds)
    except MxdError:
        return _grouped(layers, {name: f"{name.rpartition('/')[0]}/{kind}" for name, kind in kinds.items()})


def base_model(layers: Mapping[str, Trained]) -> tuple[str, str | None, str]:
    """Return the source, revision and dtype of the base model whose MLPs all of some layers replace.

    Args:
        layers: name -> layer.

    Raises:
        MxdError: they are of several base models; the message names a layer of each.
    """
    found: dict[tuple[str, str | None, str], str] = {}
    for name, trained in layers.items():
        about = trained.provenance
        found.setdefault((about.model, about.revision, about.model_dtype), name)
    if len(found) > 1:
        listed = ", ".join(
            f"{name} {model}{f' at {revision}' if revision else ''} in {dtype}"
            for (model, revision, dtype), name in found.items()
        )
        raise MxdError(f"the layers replace MLPs of different base models: {listed}; give those of one.")
    return next(iter(found))


def check_base(base: FrozenModel, layers: Mapping[str, Trained], option: str) -> None:
    """Refuse a base model that a command names in place of the one that layers were trained on, unless it is a copy.

    Args:
        base: the base model.
        layers: name -> layer.
        option: what names the model on the command line.

    Raises:
        MxdError: an MLP that one of them replaces has other weights there, or there is none.
    """
    for name, trained in layers.items():
        about = trained.provenance
        missing = about.block >= base.num_blocks
        if missing or about.fingerprint != base.fingerprint(about.block):
            instead = f"only {base.num_blocks} blocks" if missing else "other weights there"
            raise MxdError(
                f"{name} was trained for block {about.block} of {about.model!r}, and {option} {base.source} has "
                f"{instead}; give {about.model}, or a copy of it."
            )


def only_set(sets: Mapping[str, Set], name: str | None = None) -> Set:
    """Return the set of a name, or the only one there is.

    Raises:
        MxdError: there is none of that name, or there are several and none is named.
    """
    named = [key for key in sets if name in (key, None)]
    if len(named) != 1:
        said = f"there is no set of layers {name!r}" if name else "there are several sets of layers"
        raise MxdError(f"{said}; choose one with --set: {', '.join(sets)}.")
    return sets[named[0]]


def _grouped(layers: Mapping[str, tuple[int, ReplacementConfig]], keys: Mapping[str, str]) -> dict[str, dict[int, str]]:
    groups: dict[str, dict[int, str]] = {}
    for name, (block, _) in layers.items():
        first = groups.setdefault(keys[name], {}).setdefault(block, name)
        if first != name:
            raise MxdError(f"two checkpoints replace block {block}, {first} and {name}; give one.")
    return {group: dict(sorted(members.items())) for group, members in groups.items()}

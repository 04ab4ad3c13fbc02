"""Sets: layers of different blocks that are spliced in together. A run holds one for each kind of layer it trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mxd.artifacts.checkpoint import Trained, load_layer
from mxd.artifacts.folders import find_layers
from mxd.artifacts.hub import cached_reference
from mxd.common.errors import MxdError

MIXED = "together"
"""The name of a set of layers of several kinds, one for each block."""

Set = dict[int, Trained]
"""Block number -> layer."""


def named_layers(paths: Sequence[str | Path]) -> dict[str, Trained]:
    """Load checkpoints: layer folders, run folders (every layer in them), or Hub references to either; name -> layer.

    Raises:
        MxdError: a damaged checkpoint, or two of one name.
    """
    loaded: dict[str, Trained] = {}
    for path in (path for reference in paths for path in find_layers(reference)):
        if (name := name_of(path)) in loaded:
            raise MxdError(f"two checkpoints are called {name}; give one, or each apart.")
        loaded[name] = load_layer(path)
    return loaded


def name_of(path: Path) -> str:
    """Return a checkpoint's name in tables: run and folder, or its name on the Hub."""
    reference = cached_reference(path)
    if reference is not None:
        return str(replace(reference, revision=None))
    resolved = path.resolve()
    return f"{resolved.parent.name}/{resolved.name}"


def sets_of(layers: Mapping[str, Trained]) -> dict[str, Set]:
    """Return the sets that layers make, by name; a set's blocks are in order.

    Where each layer has a block of its own they are one set. Otherwise layers of one kind are: of one method and form
    with one sparsity, as ``ReplacementConfig.slug`` says (``mxd-k32``). Layers of one kind for the same block are told
    apart by their runs, ``RUN/mxd-k32``.

    Args:
        layers: name -> layer, where a name is ``RUN/FOLDER``.

    Raises:
        MxdError: two layers of one kind and run replace the same MLP.
    """
    kinds = sorted({_kind(name, trained) for name, trained in layers.items()})
    blocks = {trained.provenance.block for trained in layers.values()}
    if len(blocks) == len(layers):
        return _grouped(layers, lambda *_: kinds[0] if len(kinds) == 1 else MIXED)
    try:
        return _grouped(layers, _kind)
    except MxdError:
        return _grouped(layers, lambda name, trained: f"{name.rpartition('/')[0]}/{_kind(name, trained)}")


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


def _kind(name: str, trained: Trained) -> str:
    return trained.layer.config.slug


def _grouped(layers: Mapping[str, Trained], key: Callable[[str, Trained], str]) -> dict[str, Set]:
    groups: dict[str, Set] = {}
    named: dict[tuple[str, int], str] = {}
    for name, trained in layers.items():
        group, block = key(name, trained), trained.provenance.block
        if (first := named.setdefault((group, block), name)) != name:
            raise MxdError(f"two checkpoints replace block {block}, {first} and {name}; give one.")
        groups.setdefault(group, {})[block] = trained
    return {group: dict(sorted(members.items())) for group, members in groups.items()}

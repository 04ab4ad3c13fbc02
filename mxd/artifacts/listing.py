"""Which layers a local folder holds; nothing heavy is imported to say that there is none."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from mxd.common.errors import MxdError
from mxd.common.files import read_json


def layers_in(folder: Path, pattern: str, shown: str) -> list[Path]:
    """Return the layer folders in a local folder: itself, or those directly inside.

    Args:
        folder: where to look.
        pattern: selects folders of a set by name.
        shown: the folder's name in messages.

    Raises:
        MxdError: there is none.
    """
    try:
        return _matching(folder, pattern, shown)
    except OSError as error:
        raise MxdError(f"cannot read {shown!r}: {error.strerror}.") from error


def _matching(folder: Path, pattern: str, shown: str) -> list[Path]:
    if (folder / "config.json").is_file():
        if pattern != "*":
            raise MxdError(f"{shown!r} is one layer, from which pattern {pattern!r} cannot choose; leave it out.")
        return [folder]
    children = folder.iterdir() if folder.is_dir() else ()
    # Hidden folders are unfinished: a killed save left them behind.
    layers = [c for c in children if not c.name.startswith(".") and (c / "config.json").is_file()]
    layers = sorted((layer for layer in layers if not _is_model(layer / "config.json")), key=_numbered)
    if not layers:
        raise MxdError(
            f"no checkpoint at {shown!r}: expected a folder with config.json and model.safetensors, a run's folder "
            "that holds some, or a Hub reference org/name[/subfolder][@revision] to either."
        )
    matching = [layer for layer in layers if fnmatchcase(layer.name, pattern)]
    if not matching:
        names = ", ".join(layer.name for layer in layers)
        raise MxdError(f"no layer at {shown!r} matches {pattern!r}; there are: {names}.")
    return matching


def _is_model(config: Path) -> bool:
    """Return whether a config is that of a language model, such as `mxd export-model` writes."""
    try:
        found = read_json(config)
    except MxdError:
        return False  # a damaged layer, which is to be heard of
    return isinstance(found, dict) and "model_type" in found


def _numbered(layer: Path) -> list[tuple[int, str]]:
    """Return what folders are sorted by: names, with numbers in them as numbers, so that k4 is before k16."""
    parts = re.split(r"(\d+)", layer.name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]

"""The fields of a YAML file with a command line's overrides, as plain data: nothing heavy is imported to read them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxd.common.errors import MxdError
from mxd.common.files import read_text
from mxd.common.parsing import MOST_YAML_BYTES, parse_yaml


def read_fields(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a YAML file and set the fields that a command line names.

    Args:
        path: the YAML file.
        overrides: command-line words, ``--training.tokens 100000`` or ``--training.tokens=100000``; values are YAML;
            numbers index lists (``--replacements.0.sparsity.k [8,16]``).

    Raises:
        MxdError: no such file, not YAML, or an override that fits nowhere.
    """
    path = Path(path)
    try:
        raw = parse_yaml(read_text(path, MOST_YAML_BYTES))
    except OSError as error:
        remedy = "" if path.exists() else " `mxd init` writes one, with every line explained."
        raise MxdError(f"cannot read config {str(path)!r}: {error.strerror}.{remedy}") from error
    except ValueError as error:
        raise MxdError(f"{path} is not YAML that can be used: {error}") from error
    if not isinstance(raw, dict):
        raise MxdError(f"{path}: expected a mapping of fields at the top, got {type(raw).__name__}.")
    for name, value in _pairs(overrides):
        _set(raw, name.split("."), value, name)
    return raw


def _pairs(words: Sequence[str]) -> list[tuple[str, Any]]:
    """Parse ``--name value`` and ``--name=value``."""
    pairs, remaining = [], list(words)
    while remaining:
        word = remaining.pop(0)
        if not word.startswith("--"):
            raise MxdError(f"expected an override like --training.tokens 100000, got {word!r}.")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not remaining:
                raise MxdError(f"override --{name} has no value.")
            text = remaining.pop(0)
        try:
            pairs.append((name.replace("-", "_"), parse_yaml(text)))
        except ValueError as error:
            raise MxdError(f"override --{name}: {text!r} is not a YAML value.") from error
    return pairs


def _set(target: Any, path: list[str], value: Any, name: str) -> None:
    """Set a value inside nested mappings and lists; mappings that are missing are made, lists are not."""
    for part in path[:-1]:
        target = target[_index(target, part, name)] if isinstance(target, list) else target.setdefault(part, {})
        if not isinstance(target, dict | list):
            raise MxdError(f"override --{name}: {part!r} holds {target!r}, not a section.")
    if isinstance(target, list):
        target[_index(target, path[-1], name)] = value
    else:
        target[path[-1]] = value


def _index(items: list[Any], part: str, name: str) -> int:
    if not part.isdecimal() or len(part) > 9 or int(part) >= len(items):
        raise MxdError(f"override --{name}: {part!r} is not one of the indices 0 ... {len(items) - 1}.")
    return int(part)

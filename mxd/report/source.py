"""Values of JSON files that know where they are in the file, so that every number on a page can be traced."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxd.common.arrays import unpacked
from mxd.common.errors import MxdError
from mxd.common.files import read_text
from mxd.common.parsing import parse_json


@dataclass(frozen=True)
class Node:
    """A value of a JSON file, with its position there as a JSON pointer (RFC 6901).

    Looking up what is missing, or reading a value as another type, raises an ``MxdError`` with file and pointer.
    """

    value: Any
    file: str
    pointer: str = ""

    @property
    def source(self) -> str:
        """Where the value is, for example ``units.json#/results/a~1b/dead``."""
        return f"{self.file}#{self.pointer}"

    def __getitem__(self, key: str | int) -> "Node":
        value = self.get(key)
        if value is None:
            raise self._wrong(f"has no {key!r}")
        return value

    def get(self, key: str | int) -> "Node | None":
        """Return the value of a key or an index, ``None`` where there is none."""
        known = isinstance(self.value, list) and isinstance(key, int) and -1 < key < len(self.value)
        if not known and not (isinstance(self.value, dict) and key in self.value):
            return None
        token = str(key).replace("~", "~0").replace("/", "~1")
        return Node(self.value[key], self.file, f"{self.pointer}/{token}")

    def follow(self, path: str) -> "Node | None":
        """Return the value at the end of a path, names and places in lists separated by dots; ``None`` without one."""
        node: Node | None = self
        for name in path.split("."):
            listed = node is not None and isinstance(node.value, list) and name.isdecimal()
            node = node.get(int(name) if listed else name) if node is not None else None
        return node

    def items(self) -> Iterator[tuple[str, "Node"]]:
        """Yield the entries of an object; raises an ``MxdError`` for anything else."""
        if not isinstance(self.value, dict):
            raise self._wrong("is not an object")
        return ((key, self[key]) for key in self.value)

    def __iter__(self) -> Iterator["Node"]:
        if not isinstance(self.value, list):
            raise self._wrong("is not a list")
        return (self[i] for i in range(len(self.value)))

    def number(self) -> float:
        """Return a number, ``nan`` for null; raises an ``MxdError`` for anything else."""
        if self.value is None:
            return math.nan
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self._wrong("is not a number")
        return float(self.value)

    def numbers(self) -> list[float]:
        """Return a list or an array of numbers."""
        if isinstance(self.value, np.ndarray):
            return self.value.astype(float).tolist()
        if isinstance(self.value, list) and all(type(value) in (float, int) for value in self.value):
            return [float(value) for value in self.value]
        return [value.number() for value in self]

    def text(self) -> str:
        """Return a text; raises an ``MxdError`` for anything else."""
        if not isinstance(self.value, str):
            raise self._wrong("is not a text")
        return self.value

    def texts(self) -> list[str]:
        """Return a list of texts."""
        if isinstance(self.value, list) and all(isinstance(value, str) for value in self.value):
            return list(self.value)
        return [value.text() for value in self]

    def _wrong(self, problem: str) -> MxdError:
        return MxdError(f"{self.source} {problem}; measure again with this version of mxd, or delete the file.")


def read_document(path: Path, name: str) -> Node:
    """Read a JSON file that holds an object.

    Args:
        path: the file.
        name: what the page calls it: its path in the run's folder.

    Raises:
        MxdError: it cannot be read, or holds something else.
    """
    try:
        value = parse_json(read_text(path), unpacked)
    except (OSError, ValueError) as error:
        raise MxdError(f"cannot read {path}: {error}. Measure again, or delete the file.") from error
    if not isinstance(value, dict):
        raise MxdError(f"{path} does not hold a JSON object; measure again, or delete the file.")
    return Node(value, name)

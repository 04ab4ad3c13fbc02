"""The header of a GGUF file (versions 2 and 3): its settings, and the sizes of its tensors.

The layout, all numbers little-endian:

magic "GGUF", version (u32), number of tensors (u64), number of settings (u64)
each setting: name, kind (u32), value
each tensor: name, rank (u32), its sizes (rank x u64), kind (u32), offset (u64)

where a text is its length (u64) and UTF-8 bytes, and a list the kind of its items (u32), their number (u64) and the
items. Whatever is wrong with a header is a ``ValueError`` that says so in one line.
"""

import math
import mmap
import struct
from typing import Any

MOST_RANK = 8
_WIDTHS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
"""GGUF's kinds of numbers -> struct's codes; kind 8 is a text, 9 a list."""


class GGUFHeader:
    """Reads everything before the tensors' data, from front to back; ``at`` is the position in the file.

    Args:
        data: the file.

    Raises:
        ValueError: it is not a GGUF file, or cut off.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0
        magic, version, self.tensors, pairs = self.take("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}, expected GGUF, version 2 or 3")
        self.settings = {self.name(): self.value(*self.take("I")) for _ in range(pairs)}
        """Name -> its number or text, or ``None`` for a list."""

    def weights(self) -> tuple[int, int]:
        """Return the number of values and of tensors.

        Raises:
            ValueError: the file is cut off, or its parts do not fit together.
        """
        family = self.settings.get("general.architecture")
        if not isinstance(family, bytes):
            raise ValueError("its header has no general.architecture")
        sizes = [(self.name(), self.size()) for _ in range(self.tensors)]
        values = sum(size for _, size in sizes)
        if values > 8 * len(self.data):  # GGUF's smallest weights have 1.6 bits, so 8 per byte are never reached
            raise ValueError("it is cut off: its header promises more weights than it has room for")
        blocks = len({name.split(".")[1] for name, _ in sizes if name.startswith("blk.")})
        counted = self.settings.get(f"{family.decode('utf-8', 'replace')}.block_count", 0)
        if counted != blocks or not blocks:  # transformers would assume its default, and search all tensors for each
            raise ValueError(f"its header counts {counted!r} blocks, its tensors belong to {blocks}")
        return values, self.tensors

    def size(self) -> int:
        """Return the number of values of the next tensor.

        Raises:
            ValueError: it has more than ``MOST_RANK`` dimensions, or the file is cut off.
        """
        (rank,) = self.take("I")
        if rank > MOST_RANK:
            raise ValueError(f"its header gives a tensor {rank:,} dimensions, expected at most {MOST_RANK}")
        size = math.prod(self.take(f"{rank}Q"))
        self.take("IQ")  # its kind and offset
        return size

    def name(self) -> str:
        """Return the next name."""
        return self.text().decode("utf-8", "replace")

    def take(self, form: str) -> tuple[Any, ...]:
        """Return the next numbers, of struct's format ``form``.

        Raises:
            ValueError: the file ends before.
        """
        try:
            numbers = struct.unpack_from(f"<{form}", self.data, self.at)
        except struct.error as error:
            raise ValueError("it is cut off, or no GGUF file: its header does not end within it") from error
        self.at += struct.calcsize(f"<{form}")
        return numbers

    def text(self) -> bytes:
        """Return the next text."""
        (length,) = self.take("Q")
        return self.take(f"{length}s")[0]

    def value(self, kind: int) -> int | float | bytes | None:
        """Return the next value of a kind; ``None`` for a list, which is skipped.

        Raises:
            ValueError: GGUF has no such kind, or the file is cut off.
        """
        if kind in _WIDTHS:
            return self.take(_WIDTHS[kind])[0]
        if kind == 8:
            return self.text()
        inner, count = self.take("IQ")
        if kind != 9 or inner not in (8, *_WIDTHS):
            raise ValueError(f"its header holds a value of kind {kind} ({inner}), which GGUF does not have")
        if inner == 8:
            for _ in range(count):
                self.text()
        else:
            self.take(f"{count * struct.calcsize(_WIDTHS[inner])}s")
        return None

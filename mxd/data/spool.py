"""Documents that are read one by one: kept in a temporary file where they are too many for memory."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from tempfile import SpooledTemporaryFile, gettempdir
from typing import overload
from weakref import finalize

from mxd.common.errors import MxdError

MOST_IN_MEMORY = 2**25
"""Bytes of text that are kept in memory; more goes to a file in the temporary folder (``TMPDIR``)."""


class Documents(Sequence[str]):
    """Documents in their order, any of which can be read again, in memory that does not depend on their number.

    (But for 8 bytes a document.) The temporary file has no name and is gone with the object.

    Args:
        texts: the documents, which are taken one by one.

    Raises:
        MxdError: the temporary folder is full.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._file = SpooledTemporaryFile(MOST_IN_MEMORY)  # noqa: SIM115 (it lives as long as this object)
        finalize(self, self._file.close)
        self._ends = array("Q", [0])
        for text in texts:
            raw = text.encode("utf-8", "surrogatepass")
            try:
                self._file.write(raw)
            except OSError as error:
                raise MxdError(
                    f"cannot keep the text in the temporary folder {gettempdir()}: {error.strerror}. Free space there, "
                    "or set TMPDIR to another folder."
                ) from error
            self._ends.append(self._ends[-1] + len(raw))

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Return one document, or a list of some."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = range(len(self))[index]
        begin, end = self._ends[number], self._ends[number + 1]
        self._file.seek(begin)
        return self._file.read(end - begin).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        """Yield every document."""
        return (self[i] for i in range(len(self)))

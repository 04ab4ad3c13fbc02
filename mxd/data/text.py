"""Documents: the bundled text, local files, folders and patterns, datasets on the Hub, and text in memory."""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

from mxd.common.bundled import bundled
from mxd.common.errors import MxdError, unknown
from mxd.common.files import file_sha256, regular
from mxd.common.parsing import without_surrogates
from mxd.data.streams import TextStream
from mxd.data.tables import (
    DOCUMENTS,
    Located,
    check_columns,
    file_rows,
    find_files,
    hub_rows,
    hub_table,
    local_files,
    stem_of,
)

SPLITS = ("train", "validation", "test")
IN_MEMORY = "memory"
"""The source that records say of text which Python code holds, and which no file can name."""
BUNDLED = {"bundled": None, "bundled:sotu": "sotu", "bundled:factbook": "factbook"}
"""Name of bundled text -> the source whose documents it holds, or ``None`` for all."""
HELD_OUT_PERCENT = 5
"""Of a local source without its own splits, this percentage of documents is validation, and as much again test."""


def documents(
    source: str,
    split: str = "train",
    column: str = "text",
    streaming: bool = False,
    seed: int = 0,
    part: str = "all",
) -> Iterable[str]:
    """Return the documents of a text source.

    Args:
        source: ``bundled``, or one of its sources, ``bundled:sotu`` (speeches) or ``bundled:factbook``; a local
            ``.txt`` (one document), ``.csv``, ``.json``, ``.jsonl`` or ``.parquet`` file, the middle three also with
            ``.gz`` after it; a folder of such files, or a pattern (``folder/*.jsonl.gz``), which are read in the order
            of their names; or a Hub dataset, ``org/name[:config][@revision]``.
        split: for a folder that has a file of that name (``train.jsonl``), that file; for other local sources a
            split by document, drawn from a hash of its text; for Hub datasets the dataset's own split.
        column: the field that holds the text.
        streaming: read a Hub dataset without downloading it whole.
        seed: determines the order of a streamed dataset.
        part: only those documents of a Hub dataset's split whose hash falls to ``train``, ``validation`` or ``test``
            (for datasets without held-out splits of their own), or ``all``.

    Raises:
        MxdError: nothing is there, no such column or split, a file is damaged, or the Hub cannot be reached.
    """
    if source == IN_MEMORY:
        raise MxdError(
            f"this text was held by Python code, so nothing else can read it (source: {IN_MEMORY}). Give it again in "
            "Python, mxd.train(..., text=...) or mxd.evaluate(..., text), or name another source."
        )
    if source.partition(":")[0] == "bundled":
        rows = file_rows([_bundled(source, split)])
        only = BUNDLED[source]
        return list(_texts((located for located in rows if only in (None, located[1]["source"])), column))
    if files := local_files(source, "text", DOCUMENTS):
        return list(_local(source, files, split, column))
    return _hub(source, split, column, streaming, seed, part)


def in_memory(text: Any, column: str = "text", seed: int = 0, part: str = "all") -> Iterable[str]:
    """Return the documents of a text that Python code holds.

    Args:
        text: documents as strings: anything with a length (a list, a tuple, a column of a table), a
            ``datasets.Dataset`` or ``IterableDataset``, or any other iterable, which is read once and as it comes; an
            iterator can be read only once.
        column: the field of a dataset that holds the text.
        seed: determines the order of an ``IterableDataset``.
        part: only those documents whose hash falls to ``train``, ``validation`` or ``test``, or ``all``.

    Returns:
        A list where the number of documents is known, else what yields them.

    Raises:
        MxdError: something else, or a dataset without that column.
    """
    name = "the text in memory"
    datasets = sys.modules.get("datasets")  # whoever holds a dataset has imported it
    if datasets is not None and isinstance(text, datasets.Dataset | datasets.IterableDataset):
        return _of_table(name, text, column, isinstance(text, datasets.IterableDataset), seed, part)
    if isinstance(text, Mapping) or hasattr(text, "columns"):  # whose elements are the names of splits or columns
        raise MxdError(f"text has parts, {', '.join(map(repr, text))}; give the documents of one of them.")
    if isinstance(text, str | bytes) or not isinstance(text, Iterable):
        raise MxdError(
            f"text is of type {type(text).__name__}; expected documents: a list or another iterable of strings, or a "
            "datasets.Dataset."
        )
    chosen = _Documents(text, part)
    return list(chosen) if isinstance(text, Sized) else chosen


class _Documents:
    """The documents of an iterable; an iterator is refused where it is read a second time."""

    def __init__(self, text: Iterable[Any], part: str) -> None:
        self.text, self.part = text, part
        self.read = False

    def __iter__(self) -> Iterator[str]:
        if self.read and iter(self.text) is self.text:
            raise MxdError(
                "the text is an iterator, which can be read only once, and it is read again: for covariances of the "
                "first window (linear, low_rank, jumprelu), or by blocks that train one after the other. Give a list, "
                "or an iterable that begins anew."
            )
        self.read = True
        return self._checked()

    def _checked(self) -> Iterator[str]:
        for number, document in enumerate(self.text):
            if not isinstance(document, str):
                kind = type(document).__name__
                raise MxdError(f"document {number} of the text is of type {kind}; expected a string.")
            if self.part in ("all", _hash_split(document)):
                yield without_surrogates(document)


def text_hash(source: str, split: str = "train") -> str | None:
    """Return a hash of the local files that a text is read from: the size and SHA-256 of each, in order.

    Returns:
        The hash; ``None`` where there are no local files: a Hub dataset is identified by its token ids only.

    Raises:
        MxdError: a file cannot be read.
    """
    if source.partition(":")[0] == "bundled":
        files = [_bundled(source, split)]
    else:
        files, _ = _of_split(find_files(source, DOCUMENTS), split)
    try:
        sizes = [f"{regular(file).stat().st_size} {file_sha256(file)}" for file in files]
    except OSError as error:
        raise MxdError(f"cannot read text from {source!r}: {error.strerror}.") from error
    return hashlib.sha256("\n".join(sizes).encode()).hexdigest()[:32] if sizes else None


def _bundled(source: str, split: str) -> Path:
    if source not in BUNDLED:
        raise unknown("bundled text", source, BUNDLED)
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    return bundled(f"text/{split}.parquet")


def _of_split(files: list[Path], split: str) -> tuple[list[Path], bool]:
    """Return the files that a split is read from, and whether they hold that split alone."""
    named = [file for file in files if stem_of(file) == split]
    return named or files, bool(named)


def _local(source: str, files: list[Path], split: str, column: str) -> Iterator[str]:
    files, named = _of_split(files, split)
    if not named and split not in SPLITS:
        raise unknown("split", split, SPLITS)
    empty = True
    for text in _texts(file_rows(files, column), column):
        if named or _hash_split(text) == split:
            empty = False
            yield text
    if empty:
        raise MxdError(
            f"{source!r} has no document in split {split!r}. A local source without a file named {split!r} is split "
            f"by document ({HELD_OUT_PERCENT}% validation, {HELD_OUT_PERCENT}% test), so it needs many documents."
        )


def _hub(source: str, split: str, column: str, streaming: bool, seed: int, part: str) -> Iterable[str]:
    return _of_table(source, hub_table(source, split, "`bundled`", streaming), column, streaming, seed, part)


def _of_table(source: str, table: Any, column: str, streaming: bool, seed: int, part: str) -> Iterable[str]:
    if table.column_names is not None:
        check_columns(source, table.column_names, {"data.column": column})

    def read(rows: Iterable[Located]) -> Iterator[str]:
        return (text for text in _texts(rows, column) if part == "all" or _hash_split(text) == part)

    return TextStream(source, table, read, seed) if streaming else list(read(hub_rows(source, table)))


def _texts(rows: Iterable[Located], column: str) -> Iterator[str]:
    for where, row in rows:
        check_columns(where, row, {"data.column": column})
        yield "" if row[column] is None else without_surrogates(str(row[column]))


def _hash_split(text: str) -> str:
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
    if bucket < HELD_OUT_PERCENT:
        return "validation"
    return "test" if bucket < 2 * HELD_OUT_PERCENT else "train"

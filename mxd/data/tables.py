"""Rows of text, wherever they stand: files of this machine, folders of them, patterns for them, datasets of the Hub.

Files are decoded here, row by row. The readers of `datasets` guess a type for whole blocks of rows: the text
"2024-01-01" becomes a date, the text "NA" nothing, a missing field ``None``, a row that is a list cells of its
neighbours, and one half character fails a file. So `datasets` reads what only it can: the Hub.
"""

import csv
import gzip
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from glob import glob, has_magic
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, AnyStr

from mxd.common.errors import MxdError
from mxd.common.files import read_text, regular
from mxd.common.parsing import parse_json

Row = dict[str, Any]
Unpacked = BufferedReader | gzip.GzipFile
Located = tuple[str, Row]
"""Which row it is, for messages, and the row."""

TABLES = (".csv", ".csv.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz", ".parquet")
"""How the names of tables end."""
DOCUMENTS = (".txt", *TABLES)
"""How the names of files of documents end; a ``.txt`` file is one document."""
LONGEST = 2**30
"""Bytes of one line, or of a JSON array, once unpacked: a small file that unpacks to more is no table."""


def find_files(source: str | Path, suffixes: Sequence[str] = TABLES) -> list[Path]:
    """Return the files that a path, a folder or a pattern (``folder/*.jsonl.gz``, ``**/*.csv``) names, sorted.

    Args:
        source: a file is returned whatever its name; of a folder and of what a pattern matches, those with a suffix.
        suffixes: how their names may end.

    Returns:
        No files where nothing of that name is on this machine: it may be a dataset of the Hub.

    Raises:
        MxdError: a folder cannot be read.
    """
    path = os.fspath(source)
    try:
        if os.path.isdir(path):
            found = sorted(Path(path).iterdir())
        elif os.path.exists(path):
            return [Path(path)]
        else:
            found = sorted(map(Path, glob(path, recursive=True))) if has_magic(path) else []
    except (OSError, ValueError) as error:  # no right to read it; a NUL in a pattern
        raise MxdError(f"cannot read text from {path!r}: {error}") from error
    return [file for file in found if suffix_of(file, suffixes)]


def local_files(source: str | Path, what: str, suffixes: Sequence[str] = TABLES) -> list[Path]:
    """Return the files that a source names, as ``find_files``, or none where it can only be a dataset of the Hub.

    Raises:
        MxdError: it names a place of this machine, and ``what`` is looked for is not there.
    """
    files = find_files(source, suffixes)
    path = os.fspath(source)
    on_this_machine = os.path.lexists(path) or has_magic(path) or suffix_of(path, suffixes)
    if on_this_machine and not (files and all(suffix_of(file, suffixes) for file in files)):
        raise MxdError(
            f"no {what} at {path!r}; expected a file, a folder, or a pattern such as 'folder/*.jsonl.gz', of "
            f"{', '.join(suffixes)}."
        )
    return files


def suffix_of(file: str | Path, suffixes: Sequence[str] = DOCUMENTS) -> str:
    """Return the suffix with which a file's name ends, "" if none: of ``a.jsonl.gz`` ``.jsonl.gz``."""
    name = os.path.basename(file)
    return next((suffix for suffix in suffixes if name.endswith(suffix)), "")


def stem_of(file: str | Path) -> str:
    """Return a file's name without its suffix: of ``a.jsonl.gz`` ``a``."""
    return os.path.basename(file).removesuffix(suffix_of(file))


def file_rows(files: Iterable[Path], column: str | None = None) -> Iterator[Located]:
    """Yield the rows of files, one file after another; a CSV's cells are text, and a ``.txt`` file is one row.

    Args:
        files: their suffixes say what they are.
        column: the one field that is wanted, if it is one: a Parquet file's others are not read, and a ``.txt`` file's
            text gets this name.

    Raises:
        MxdError: a file cannot be read, is damaged, or holds something else than rows.
    """
    for file in files:
        try:
            for number, row in enumerate(_rows(file, column), 1):
                yield f"{file}, row {number}", row
        except (OSError, EOFError, zlib.error, ValueError, OverflowError, csv.Error) as error:
            raise MxdError(f"cannot read text from {str(file)!r}: {error}") from error


def hub_table(source: str, split: str, instead: str, streaming: bool = False) -> Any:
    """Load a split of a dataset of the Hub: ``datasets.Dataset``, or ``datasets.IterableDataset`` with ``streaming``.

    Args:
        source: ``org/name[:config][@revision]``.
        split: one that the dataset has.
        instead: what else could have been given, for the message.
        streaming: read it as it comes, without downloading it whole.

    Raises:
        MxdError: no such dataset or split, or the Hub cannot be reached.
    """
    import datasets

    address, _, revision = source.partition("@")
    name, _, subset = address.partition(":")
    options = {"revision": revision} if revision else {}
    try:
        return datasets.load_dataset(name, subset or None, split=split, streaming=streaming, **options)
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such dataset or split, needs a script
        raise MxdError(
            f"cannot load dataset {source!r}, split {split!r}: {_reason(error)}\n"
            f"Expected {instead}, a file, a folder or a pattern of {', '.join(TABLES)}, or a Hub dataset that can be "
            "reached."
        ) from error


def hub_rows(source: str, table: Iterable[Row]) -> Iterator[Located]:
    """Yield the rows of what ``hub_table`` has loaded.

    Raises:
        MxdError: whatever a Hub client raises on the way, as one clear error, so that a run can save.
    """
    try:
        for number, row in enumerate(table, 1):
            yield f"{source}, row {number}", row
    except MxdError:
        raise
    except Exception as error:
        raise MxdError(f"reading {source!r} failed: {_reason(error)}") from error


def check_columns(where: str, row: Collection[str], wanted: Mapping[str, str]) -> None:
    """Refuse a row that lacks a column.

    Args:
        where: the row, for the message.
        row: the row, or the names of its columns.
        wanted: the option that names a column -> the column.

    Raises:
        MxdError: it lacks one.
    """
    for column in wanted.values():
        if column not in row:
            have = ", ".join(map(str, row))
            raise MxdError(f"{where}: no column {column!r}; it has: {have}. Set {', '.join(wanted)}.")


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _rows(file: Path, column: str | None) -> Iterator[Row]:
    suffix = suffix_of(file)
    if suffix == ".txt":
        yield {column or "text": read_text(file)}
    elif suffix == ".parquet":
        yield from _parquet(file, column)
    else:
        opener: Callable[..., Any] = gzip.open if suffix.endswith(".gz") else open
        with opener(regular(file), "rb") as opened:
            yield from READERS[suffix.removesuffix(".gz")](opened)


def _parquet(file: Path, column: str | None) -> Iterator[Row]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(regular(file))
    columns = [column] if column in table.schema_arrow.names else None  # all, so that a message can name them
    for batch in table.iter_batches(columns=columns):
        yield from batch.to_pylist()


def _csv(file: Unpacked) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # by default 131,072 characters, which a long document exceeds
    with TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        yield from csv.DictReader(_lines(text.readline))


def _jsonl(file: Unpacked) -> Iterator[Row]:
    for number, line in enumerate(
        _lines(file.readline), 1
    ):  # ends at newlines only: JSON strings may hold other line ends
        try:
            text = line.decode("utf-8-sig")
            if text.strip():
                yield _object(parse_json(text))
        except ValueError as error:
            raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from error  # JSON's own knows one line


def _json(file: Unpacked) -> Iterator[Row]:
    """Read one array of rows, or, as many files of this name hold, a row in each line."""
    starts = (line.strip(b" \t\r\n\xef\xbb\xbf") for line in _lines(file.readline))  # a byte order mark, too
    is_array = next(filter(None, starts), b"").startswith(b"[")
    file.seek(0)
    if not is_array:
        yield from _jsonl(file)
        return
    text = bytearray()
    for line in _lines(file.readline):  # read(n) would take n bytes at once, however short the file
        text += line
        if len(text) > LONGEST:
            raise ValueError(f"its array is longer than {LONGEST:,} bytes; write a row in each line of a .jsonl file")
    for number, row in enumerate(parse_json(text.decode("utf-8-sig")), 1):
        try:
            yield _object(row)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error


READERS = {".csv": _csv, ".json": _json, ".jsonl": _jsonl}
"""Suffix -> what reads the rows of an open file."""


def _object(row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with fields, got {type(row).__name__}")
    return row


def _lines(readline: Callable[[int], AnyStr]) -> Iterator[AnyStr]:
    while line := readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise ValueError(f"a line is longer than {LONGEST:,} bytes")
        yield line

"""Rows of text from any source: local files, folders and patterns of them, datasets on the Hub.

Files are decoded here, row by row. The readers of `datasets` guess a type for whole groups of rows: the text
"2024-01-01" becomes a date, "NA" nothing, a missing field ``None``, a row that is a list turns into cells of its
neighbours, and a single half character fails a whole file. So `datasets` is used only for the Hub.
"""

import csv
import gzip
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import glob, has_magic
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, AnyStr

from mxd.common.errors import MxdError
from mxd.common.files import read_text, regular
from mxd.common.network import asking_hub
from mxd.common.parsing import parse_json

Row = dict[str, Any]
Unpacked = BufferedReader | gzip.GzipFile
Located = tuple[str, Row]
"""A row's name in messages, and the row."""

TABLES = (".csv", ".csv.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz", ".parquet")
"""Suffixes of tables."""
DOCUMENTS = (".txt", *TABLES)
"""Suffixes of files of documents; a ``.txt`` file is one document."""
LONGEST = 2**30
"""The most bytes of one line, or of a JSON array, once unpacked: a small file that unpacks to more is no table."""


def find_files(source: str | Path, suffixes: Sequence[str] = TABLES) -> list[Path]:
    """Return the files that a path, a folder or a pattern (``folder/*.jsonl.gz``, ``**/*.csv``) names, sorted.

    Args:
        source: a file is returned whatever its name; of a folder's or a pattern's files, those with a suffix.
        suffixes: how their names may end.

    Returns:
        The files; none where there is nothing local of that name: it may be a dataset on the Hub.

    Raises:
        MxdError: a folder cannot be read.
    """
    path = os.fspath(source)
    try:
        if os.path.isdir(path):
            files = sorted(Path(path).iterdir())
        elif os.path.exists(path):
            return [Path(path)]
        else:
            files = sorted(map(Path, glob(path, recursive=True))) if has_magic(path) else []
    except (OSError, ValueError) as error:  # no permission to read it; a NUL in a pattern
        raise MxdError(f"cannot read text from {path!r}: {error}") from error
    return [file for file in files if suffix_of(file, suffixes)]


def local_files(source: str | Path, what: str, suffixes: Sequence[str] = TABLES) -> list[Path]:
    """Return the files that a source names, as ``find_files``, or none where it can only be a dataset on the Hub.

    Args:
        source: a file, a folder, a pattern, or the name of a dataset.
        what: what the files should hold, for the message.
        suffixes: how their names may end.

    Raises:
        MxdError: it names something local that is missing, or that is not such files.
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
    """Return which of the suffixes a file's name has, "" if none: for ``a.jsonl.gz`` it is ``.jsonl.gz``."""
    name = os.path.basename(file)
    return next((suffix for suffix in suffixes if name.endswith(suffix)), "")


def stem_of(file: str | Path) -> str:
    """Return a file's name without its suffix: for ``a.jsonl.gz`` it is ``a``."""
    return os.path.basename(file).removesuffix(suffix_of(file))


def file_rows(files: Iterable[Path], column: str | None = None) -> Iterator[Located]:
    """Yield the rows of files, one file after another; a CSV's cells are text, and a ``.txt`` file is one row.

    Args:
        files: their suffixes say what they are.
        column: the only field that is needed, if it is only one: other columns of a Parquet file are not read, and the
            text of a ``.txt`` file gets this name.

    Raises:
        MxdError: a file cannot be read, is damaged, or holds anything but rows.
    """
    for file in files:
        try:
            for number, row in enumerate(_rows(file, column), 1):
                yield f"{file}, row {number}", row
        except (OSError, EOFError, zlib.error, ValueError, OverflowError, csv.Error) as error:
            raise MxdError(f"cannot read text from {str(file)!r}: {error}") from error


def hub_table(source: str, split: str, instead: str, streaming: bool = False) -> Any:
    """Load a split of a dataset on the Hub: ``datasets.Dataset``, or ``datasets.IterableDataset`` with ``streaming``.

    Args:
        source: ``org/name[:config][@revision]``, or Parquet files of a dataset (``hf://datasets/org/name/*.parquet``).
        split: one of the dataset's splits.
        instead: other valid sources, for the message.
        streaming: read it as it comes, without downloading it whole.

    Raises:
        MxdError: no such dataset or split, or the Hub cannot be reached.
    """
    import datasets

    address, _, revision = source.partition("@")
    name, _, subset = address.partition(":")
    options = {"revision": revision} if revision else {}
    if source.startswith("hf://"):
        name, subset, options = "parquet", "", {"data_files": source}
    try:
        with asking_hub():
            return datasets.load_dataset(name, subset or None, split=split, streaming=streaming, **options)
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such dataset or split, needs a script
        raise MxdError(
            f"cannot load dataset {source!r}, split {split!r}: {_reason(error)}\n"
            f"Expected {instead}, a file, a folder or a pattern of {', '.join(TABLES)}, or a Hub dataset that can be "
            "reached."
        ) from error


def hub_rows(source: str, table: Iterable[Row]) -> Iterator[Located]:
    """Yield the rows of a table that ``hub_table`` has loaded.

    Raises:
        MxdError: in place of anything that a Hub client raises on the way.
    """
    with reading(source):
        for number, row in enumerate(table, 1):
            yield f"{source}, row {number}", row


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn whatever a Hub client raises in the ``with`` block into an ``MxdError``, so that a run can save."""
    try:
        yield
    except MxdError:
        raise
    except Exception as error:
        raise MxdError(f"reading {source!r} failed: {_reason(error)}") from error


def check_columns(where: str, row: Collection[str], columns: Mapping[str, str]) -> None:
    """Refuse a row that lacks a column.

    Args:
        where: the row, for the message.
        row: the row, or the names of its columns.
        columns: option -> the column that it names.

    Raises:
        MxdError: it lacks one.
    """
    for column in columns.values():
        if column not in row:
            names = ", ".join(map(str, row))
            raise MxdError(f"{where}: no column {column!r}; it has: {names}. Set {', '.join(columns)}.")


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
    # Lines of bytes end at newlines only; JSON strings may hold the other line ends of text.
    for number, line in enumerate(_lines(file.readline), 1):
        try:
            text = line.decode("utf-8-sig")
            if text.strip():
                yield _object(parse_json(text))
        except ValueError as error:  # JSON's own message counts lines within this one
            raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from error


def _json(file: Unpacked) -> Iterator[Row]:
    """Read one array of rows, or one row per line, which many ``.json`` files hold."""
    starts = (line.strip(b" \t\r\n\xef\xbb\xbf") for line in _lines(file.readline))  # also strips a byte order mark
    is_array = next(filter(None, starts), b"").startswith(b"[")
    file.seek(0)
    if not is_array:
        yield from _jsonl(file)
        return
    text = bytearray()
    for line in _lines(file.readline):  # read(n) would allocate n bytes at once, however short the file
        text += line
        if len(text) > LONGEST:
            raise ValueError(f"its array is longer than {LONGEST:,} bytes; write a row in each line of a .jsonl file")
    for number, row in enumerate(parse_json(text.decode("utf-8-sig")), 1):
        try:
            yield _object(row)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error


READERS = {".csv": _csv, ".json": _json, ".jsonl": _jsonl}
"""Suffix -> reader of an open file's rows."""


def _object(row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with fields, got {type(row).__name__}")
    return row


def _lines(readline: Callable[[int], AnyStr]) -> Iterator[AnyStr]:
    while line := readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise ValueError(f"a line is longer than {LONGEST:,} bytes")
        yield line

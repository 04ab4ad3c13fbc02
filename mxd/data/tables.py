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
from contextlib import contextmanager, suppress
from glob import glob, has_magic
from io import BufferedReader, TextIOWrapper
from itertools import chain
from json import JSONDecodeError
from pathlib import Path
from typing import Any, AnyStr

from mxd.common.errors import MxdError
from mxd.common.files import read_text, regular
from mxd.common.network import asking_hub
from mxd.common.parsing import parse_json

Row = dict[str, Any]
Unpacked = BufferedReader | gzip.GzipFile
Located = tuple[str, Row]
"""Where a row is, for messages, and the row: in ``file_rows`` file and line, in a reader's results the line alone."""

TABLES = (".csv", ".csv.gz", ".json", ".json.gz", ".jsonl", ".jsonl.gz", ".parquet")
"""Suffixes of tables."""
DOCUMENTS = (".txt", ".txt.gz", ".md", *TABLES)
"""Suffixes of files of documents; a text file is one document."""
NOTES = ".md"
"""The suffix of files that are read only where there are no others: a README beside a table is not its text."""
PARQUET_ROWS = 1024
"""Rows of a Parquet file that are decoded at a time."""
LONGEST = 2**30
"""The most bytes of one line, a JSON array or a packed text, once unpacked: what unpacks to more is none."""


def find_files(source: str | Path, suffixes: Sequence[str] = TABLES) -> list[Path]:
    """Return the files that a path, a folder or a pattern (``folder/*.jsonl.gz``, ``**/*.csv``) names, sorted.

    Args:
        source: a file is returned whatever its name; of a folder's or a pattern's files, those with a suffix, and
            ``.md`` files only where they are all.
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
    files = [file for file in files if suffix_of(file, suffixes)]
    return [file for file in files if file.suffix != NOTES] or files


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
    """Yield the rows of files, one file after another; a CSV's cells are text, and a text file is one row.

    Args:
        files: their suffixes say what they are.
        column: the only field that is needed, if it is only one: other columns of a Parquet file are not read, and the
            text of a text file gets this name.

    Raises:
        MxdError: a file cannot be read, is damaged, or holds anything but rows.
    """
    for file in files:
        try:
            for place, row in _rows(file, column):
                yield f"{file}, {place}", row
        except UnicodeDecodeError as error:
            raise MxdError(f"cannot read text from {str(file)!r}: {_undecodable(file, error)}") from error
        except (OSError, EOFError, zlib.error, ValueError, OverflowError, csv.Error) as error:
            raise MxdError(f"cannot read text from {str(file)!r}: {error}") from error


def hub_table(source: str, split: str, instead: str, streaming: bool = False) -> Any:
    """Load a split of a dataset on the Hub: ``datasets.Dataset``, or ``datasets.IterableDataset`` with ``streaming``.

    Args:
        source: ``org/name[:config][@revision]``, or Parquet files of a dataset (``hf://datasets/org/name/*.parquet``).
        split: one of the dataset's splits.
        instead: other valid sources, for the message, with a comma at the end.
        streaming: read it as it comes, without downloading it whole.

    Raises:
        MxdError: no such dataset or split, or the Hub cannot be reached.
    """
    with _asking_for(source, split, instead) as (datasets, address, options):
        return datasets.load_dataset(*address, split=split, streaming=streaming, **options)


def check_hub_table(source: str, split: str, instead: str) -> None:
    """Refuse a dataset that the Hub, or offline its cache on this machine, does not have; no row is fetched.

    Args:
        source: as for ``hub_table``.
        split: one of the dataset's splits.
        instead: other valid sources, for the message, with a comma at the end.

    Raises:
        MxdError: as ``hub_table``.
    """
    with _asking_for(source, split, instead) as (datasets, address, options):
        splits = datasets.load_dataset_builder(*address, **options).info.splits
        # Slices (``train[:1%]``) and sums of splits are left to the reading; some datasets do not list their splits.
        if splits and split.isidentifier() and split not in splits:
            raise ValueError(f"it has no such split; it has {', '.join(splits)}")


@contextmanager
def _asking_for(source: str, split: str, instead: str) -> Iterator[tuple[Any, Sequence[str | None], dict[str, Any]]]:
    """Give the block the ``datasets`` package, a source's name and config, and its options; say what failed in it."""
    import datasets
    from huggingface_hub import constants

    address, _, revision = source.partition("@")
    name, _, subset = address.partition(":")
    options = {"revision": revision} if revision else {}
    if source.startswith("hf://"):
        name, subset, options = "parquet", "", {"data_files": source}
    try:
        with asking_hub():
            yield datasets, (name, subset or None), options
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such dataset or split, needs a script
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""  # and not only for this question
        reason = _reason(error).replace(" (OfflineModeIsEnabled)", offline)
        raise MxdError(
            f"cannot load dataset {source!r}, split {split!r}: {reason}; expected {instead}a file, a folder, a "
            "pattern, or a Hub dataset that can be reached."
        ) from error


def hub_rows(source: str, table: Iterable[Row]) -> Iterator[Located]:
    """Yield the rows of a table that ``hub_table`` has loaded.

    Raises:
        MxdError: in place of anything that a Hub client raises on the way.
    """
    with reading(source):
        for number, row in enumerate(table, 1):
            yield f"{source}, row {number}", _with_text(row)


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
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _rows(file: Path, column: str | None) -> Iterator[Located]:
    suffix = suffix_of(file)
    if suffix == ".parquet":
        yield from _parquet(file, column)
    elif suffix in (".txt", NOTES):
        yield "line 1", {column or "text": read_text(file)}
    else:
        with _opened(file) as opened:
            if suffix == ".txt.gz":
                yield "line 1", {column or "text": _whole(opened).decode("utf-8-sig")}
            else:
                yield from READERS[suffix.removesuffix(".gz")](opened)


def _opened(file: Path) -> Any:
    opener: Callable[..., Any] = gzip.open if file.suffix == ".gz" else open
    return opener(regular(file), "rb")


def _undecodable(file: Path, error: UnicodeDecodeError) -> str:
    """Return which line of a file is not UTF-8, and why."""
    if suffix_of(file) == ".parquet":  # which has no lines
        return str(error)
    with suppress(OSError, EOFError, zlib.error), _opened(file) as opened:  # a packed file may be damaged further on
        for number, line in enumerate(_lines(opened.readline), 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as found:
                return f"line {number}: {found}; save the file as UTF-8"
    return str(error)


def _parquet(file: Path, column: str | None) -> Iterator[Located]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(regular(file))
    columns = [column] if column in table.schema_arrow.names else None  # all, so that a message can name them
    batches = table.iter_batches(PARQUET_ROWS, columns=columns)
    for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1):
        yield f"row {number}", _with_text(row)


def _with_text(row: Row) -> Row:
    """Return a row, its bytes as text where they are text: some writers of Parquet do not mark it as such."""
    found = dict(row)
    for name, cell in row.items():
        if isinstance(cell, bytes):
            with suppress(UnicodeDecodeError):
                found[name] = cell.decode("utf-8")
    return found


def _csv(file: Unpacked) -> Iterator[Located]:
    csv.field_size_limit(2**31 - 1)  # by default 131,072 characters, which a long document exceeds
    with TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        rows = csv.reader(_lines(text.readline), strict=True)
        names = next(rows, [])
        line = rows.line_num + 1
        for cells in _well_formed(rows):
            if cells and len(cells) != len(names):
                raise ValueError(
                    f"line {line}: {len(cells)} cells, expected {len(names)}; quote texts that hold commas"
                )
            if cells:  # else the line is empty
                yield f"line {line}", dict(zip(names, cells, strict=True))
            line = rows.line_num + 1


def _well_formed(rows: Any) -> Iterator[list[str]]:
    """Yield the rows of a CSV reader; an error names the line where its row begins."""
    begin = rows.line_num + 1
    try:
        for cells in rows:
            yield cells
            begin = rows.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {begin}: {error}; is a quote not closed?") from error


def _jsonl(file: Unpacked) -> Iterator[Located]:
    # Lines of bytes end at newlines only; JSON strings may hold the other line ends of text.
    for number, line in enumerate(_lines(file.readline), 1):
        try:
            text = line.decode("utf-8-sig")
            row = _object(parse_json(text)) if text.strip() else None
        except UnicodeDecodeError:
            raise
        except JSONDecodeError as error:  # whose own message counts lines within this one
            raise ValueError(f"line {number}: {error.msg.removesuffix(' at')}, column {error.colno}") from error
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if row is not None:
            yield f"line {number}", row


def _json(file: Unpacked) -> Iterator[Located]:
    """Read one array of rows, or one row per line, which many ``.json`` files hold."""
    starts = (line.strip(b" \t\r\n\xef\xbb\xbf") for line in _lines(file.readline))  # also strips a byte order mark
    is_array = next(filter(None, starts), b"").startswith(b"[")
    file.seek(0)
    if not is_array:
        yield from _jsonl(file)
        return
    for number, row in enumerate(parse_json(_whole(file).decode("utf-8-sig")), 1):
        try:
            yield f"row {number}", _object(row)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error


def _whole(file: Unpacked) -> bytes:
    text = bytearray()
    for line in _lines(file.readline):  # read(n) would allocate n bytes at once, however short the file
        text += line
        if len(text) > LONGEST:
            raise ValueError(f"it is longer than {LONGEST:,} bytes; write a row in each line of a .jsonl file")
    return bytes(text)


READERS = {".csv": _csv, ".json": _json, ".jsonl": _jsonl}
"""Suffix -> reader of an open file's rows, each with its line, or its number where rows are no lines."""


def _object(row: Any) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with fields, got {type(row).__name__}")
    return row


def _lines(readline: Callable[[int], AnyStr]) -> Iterator[AnyStr]:
    while line := readline(LONGEST + 1):
        if len(line) > LONGEST:
            raise ValueError(f"a line is longer than {LONGEST:,} bytes")
        yield line

"""Labelled texts for probing: the bundled sets, CSV, JSONL and Parquet files, datasets of the Hub."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxd.common.bundled import bundled
from mxd.common.errors import MxdError
from mxd.common.files import regular
from mxd.common.parsing import parse_json, without_surrogates
from mxd.questions import DEFAULTS

BUNDLED_SETS = ("factbook", "languages", "gender")
"""See ``mxd/assets/README.md``."""
SUFFIXES = (".csv", ".jsonl", ".parquet")


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with one label each."""

    name: str
    """What results call the set."""
    texts: list[str]
    """The texts."""
    labels: list[str]
    """The label of each."""
    spans: list[tuple[int, int]] | None = None
    """Where in each text what the label speaks of stands, where that is not the whole text: first character, and the
    one after the last."""

    @property
    def level(self) -> str:
        """What is probed unless something else is asked for: the ``span``, or the whole text, the ``sample``."""
        return "sample" if self.spans is None else "span"

    @property
    def classes(self) -> list[str]:
        """The labels there are, sorted."""
        return sorted(set(self.labels))


def labelled_texts(
    source: str | Path,
    text_column: str = DEFAULTS.probing.text_column,
    label_column: str = DEFAULTS.probing.label_column,
    split: str = DEFAULTS.probing.split,
) -> LabelledTexts:
    """Read a labelled set.

    Labels may be strings, whole numbers or booleans; a Hub dataset's class numbers become their names. Columns
    ``start`` and ``end``, where there are both, say which characters the label speaks of, those of a name for example.

    Args:
        source: a bundled name (``factbook``, ``languages``, ``gender``); a local ``.csv``, ``.jsonl`` or ``.parquet``
            file; or a Hub dataset, ``org/name[:config][@revision]``.
        text_column: the field that holds the text.
        label_column: the field that holds the label.
        split: split of a Hub dataset; files are read whole.

    Raises:
        MxdError: nothing there, no such column or split, a row without text or label, a span that is none of the
            text's, fewer than two classes, or the Hub cannot be reached.
    """
    source = str(source)
    if source in BUNDLED_SETS:
        return _checked(source, read_rows(bundled(f"probing/{source}.parquet")), "text", "label")
    path = Path(source)
    if path.suffix in SUFFIXES or _exists(path):
        if not path.is_file() or path.suffix not in SUFFIXES:
            raise MxdError(f"no labelled texts at {source!r}; expected a file: {', '.join(SUFFIXES)}.")
        return _checked(path.stem, read_rows(path), text_column, label_column)
    if "/" not in source:
        raise MxdError(
            f"no labelled set {source!r}; bundled are: {', '.join(BUNDLED_SETS)}. Or give a {', '.join(SUFFIXES)} file "
            "(`python scripts/fetch_probing.py` fetches some) or a Hub dataset, org/name[:config][@revision]."
        )
    return _checked(source, _hub(source, split, label_column), text_column, label_column)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than a name can be
        return False


def _checked(name: str, rows: Iterator[dict[str, Any]], text_column: str, label_column: str) -> LabelledTexts:
    texts, labels, spans = [], [], []
    for number, row in enumerate(rows, 1):
        check_columns(f"{name}, row {number}", row, {"--text-column": text_column, "--label-column": label_column})
        text, label = row[text_column], row[label_column]
        if not isinstance(text, str):
            raise MxdError(f"{name}, row {number}: {text_column!r} is {text!r}; expected a text.")
        if not isinstance(label, str | int) or label == "":
            raise MxdError(
                f"{name}, row {number}: {label_column!r} is {label!r}; expected the name or number of a class."
            )
        texts.append(without_surrogates(text))
        labels.append(without_surrogates(str(label)))
        if "start" in row and "end" in row:
            spans.append(_span(name, number, row["start"], row["end"], len(text)))
    if spans and len(spans) < len(texts):
        raise MxdError(f"{name}: {len(spans)} of {len(texts)} rows have a span, start and end; give it to all or none.")
    found = LabelledTexts(name, texts, labels, spans or None)
    if len(found.classes) < 2:
        got = f"only {found.classes[0]!r}" if found.classes else "no rows"
        raise MxdError(f"{name}: a probe tells classes apart, so it needs at least two; got {got}.")
    return found


def _span(name: str, number: int, start: Any, end: Any, length: int) -> tuple[int, int]:
    first, last = (int(n) if isinstance(n, str) and n.isdecimal() and len(n) < 10 else n for n in (start, end))
    if type(first) is not int or type(last) is not int or not 0 <= first < last <= length:
        raise MxdError(
            f"{name}, row {number}: start and end are {start!r} and {end!r}; expected the characters of a span of the "
            f"text, 0 <= start < end <= {length}. Rename the columns if they mean something else."
        )
    return first, last


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table in a ``.csv``, ``.jsonl`` or ``.parquet`` file; a CSV's cells are text.

    Raises:
        MxdError: it cannot be read, or a line holds something else than a row.
    """
    try:
        if path.suffix == ".csv":
            csv.field_size_limit(2**31 - 1)  # by default 131,072 characters, which a long document exceeds
            with regular(path).open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(file)
        elif path.suffix == ".jsonl":
            with regular(path).open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _object(parse_json(line), path, number)
        else:
            import pyarrow.parquet as pq

            for batch in pq.ParquetFile(regular(path)).iter_batches():
                yield from batch.to_pylist()
    except (OSError, ValueError, csv.Error) as error:
        raise MxdError(f"cannot read texts from {str(path)!r}: {error}") from error


def check_columns(where: str, row: dict[str, Any], wanted: dict[str, str]) -> None:
    """Refuse a row that lacks a column; ``wanted`` has the option that names each.

    Raises:
        MxdError: so.
    """
    for column in wanted.values():
        if column not in row:
            have = ", ".join(map(str, row))
            raise MxdError(f"{where}: no column {column!r}; it has: {have}. Set {', '.join(wanted)}.")


def _object(row: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise MxdError(f"{path}, line {number}: expected an object with fields, got {type(row).__name__}.")
    return row


def _hub(source: str, split: str, label_column: str) -> Iterator[dict[str, Any]]:
    import datasets

    address, _, revision = source.partition("@")
    name, _, subset = address.partition(":")
    options = {"revision": revision} if revision else {}
    try:
        rows = datasets.load_dataset(name, subset or None, split=split, **options)
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such dataset or split, needs a script
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise MxdError(
            f"cannot load dataset {source!r}, split {split!r}: {reason}\n"
            f"Expected a bundled set ({', '.join(BUNDLED_SETS)}), a file, or a Hub dataset that can be reached."
        ) from error
    names = dict(enumerate(getattr(rows.features.get(label_column), "names", None) or ()))
    for row in rows:
        yield row | {label_column: names.get(row[label_column])} if names else row  # -1 stands for no label

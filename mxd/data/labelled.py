"""Texts with labels or scores: the bundled sets, local tables, datasets on the Hub."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from mxd.common.bundled import bundled
from mxd.common.errors import MxdError, nearest
from mxd.common.files import names_a_path
from mxd.common.parsing import without_surrogates
from mxd.data.presets import PREFIX, check_preset, preset_texts
from mxd.data.tables import TABLES, Located, Row, check_columns, file_rows, hub_rows, hub_table, local_files, stem_of
from mxd.questions import DEFAULTS, PURGING

BUNDLED_SETS = ("factbook", "languages", "gender")
"""See ``mxd/assets/README.md``."""


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with one label each."""

    name: str
    """The set's name in results."""
    texts: list[str]
    """The texts."""
    labels: list[str]
    """The label of each."""
    spans: list[tuple[int, int]] | None = None
    """The part of each text that its label describes, if not the whole text: its first character, and the one after its
    last."""
    side: Literal["first", "last"] | None = None
    """Which tokens of a longer text are read; by default as the level says."""
    groups: list[str] | None = None
    """The group that each text is of, beside its label, where it was asked for."""

    @property
    def level(self) -> str:
        """What is probed by default: the ``span``, or the whole text, the ``sample``."""
        return "sample" if self.spans is None else "span"

    @property
    def classes(self) -> list[str]:
        """The different labels, sorted."""
        return sorted(set(self.labels))


def check_set(source: str) -> None:
    """Refuse a labelled set that can only be on this machine, where there is none; what the Hub holds is not asked.

    Raises:
        MxdError: there is no such set.
    """
    if source in BUNDLED_SETS:
        return
    if source.startswith(PREFIX):
        check_preset(source.removeprefix(PREFIX))
    elif not local_files(source, "labelled texts") and ("/" not in source or names_a_path(source)):
        raise MxdError(
            f"no labelled set {source!r}; bundled are: {', '.join(BUNDLED_SETS)}. Or give one of the MxD "
            "paper's, such as paper:ag_news, a file, folder or pattern of "
            f"{', '.join(TABLES)} (`python scripts/fetch_probing.py` fetches some) or a Hub dataset, "
            f"org/name[:config][@revision].{nearest(source, BUNDLED_SETS)}"
        )


def labelled_texts(
    source: str | Path,
    text_column: str = DEFAULTS.probing.text_column,
    label_column: str = DEFAULTS.probing.label_column,
    split: str = DEFAULTS.probing.split,
    group_column: str | None = None,
) -> LabelledTexts:
    """Read a labelled set.

    Labels may be strings, whole numbers or booleans; a Hub dataset's class numbers become their names. Columns
    ``start`` and ``end``, where there are both, say which characters the label describes, those of a name for example.

    Args:
        source: a bundled name (``factbook``, ``languages``, ``gender``); one of the MxD paper's sets, ``paper:NAME``,
            whose columns and split are known; a local ``.csv``, ``.json``, ``.jsonl`` (each
            also with ``.gz`` after it) or ``.parquet`` file, a folder of them or a pattern (``folder/*.jsonl.gz``); or
            a Hub dataset, ``org/name[:config][@revision]``.
        text_column: the field that holds the text.
        label_column: the field that holds the label.
        split: split of a Hub dataset; files are read whole.
        group_column: the field that holds the group; by default there are no groups.

    Raises:
        MxdError: nothing is there, no such column or split, a row without text, label or group, a span outside the
            text, fewer than two classes, or the Hub cannot be reached.
    """
    source = str(source)
    if source in BUNDLED_SETS:
        return _checked(source, file_rows([bundled(f"probing/{source}.parquet")]), "text", "label", group_column)
    if source.startswith(PREFIX):
        texts, labels, side = preset_texts(source.removeprefix(PREFIX))
        return LabelledTexts(source, [without_surrogates(text) for text in texts], labels, side=side)
    if files := local_files(source, "labelled texts"):
        name = stem_of(files[0]) if len(files) == 1 else source
        return _checked(name, file_rows(files), text_column, label_column, group_column)
    check_set(source)
    table = hub_table(source, split, f"a bundled set ({', '.join(BUNDLED_SETS)}), ")
    rows = hub_rows(source, table)
    for column in dict.fromkeys(filter(None, (label_column, group_column))):
        if names := getattr(table.features.get(column), "names", None):
            rows = _named(rows, column, names)
    return _checked(source, rows, text_column, label_column, group_column)


def scored_texts(
    source: str | Path,
    text_column: str = PURGING.text_column,
    score_column: str = PURGING.score_column,
    split: str = "train",
) -> tuple[list[str], list[float | list[float]]]:
    """Read texts with one score each, or one per token.

    Args:
        source: local files or a Hub dataset, as for ``labelled_texts``.
        text_column: the field that holds the text.
        score_column: the field that holds the score, or the list of them.
        split: split of a Hub dataset; files are read whole.

    Raises:
        MxdError: nothing is there, no such column or split, a row without text or score, or the Hub cannot be reached.
    """
    source = str(source)
    files = local_files(source, "scored texts")
    rows = file_rows(files) if files else hub_rows(source, hub_table(source, split, ""))
    texts: list[str] = []
    scores: list[float | list[float]] = []
    for where, row in rows:
        check_columns(where, row, {"--text-column": text_column, "--score-column": score_column})
        text, score = row[text_column], _numeric(row[score_column])
        numbers = score if isinstance(score, list) and score else [score]
        if not isinstance(text, str) or not all(isinstance(n, int | float) and isfinite(n) for n in numbers):
            raise MxdError(
                f"{where}: got the text {text!r} and the score {score!r}; expected a number, or a list of them, one "
                "for each token."
            )
        texts.append(without_surrogates(text))
        scores.append([float(n) for n in numbers] if isinstance(score, list) else float(score))
    return texts, scores


def _numeric(cell: Any) -> Any:
    """Return the number that a text spells, as in a CSV's cells, and anything else unchanged."""
    try:
        return float({"true": "1", "false": "0"}.get(cell.lower(), cell)) if isinstance(cell, str) else cell
    except ValueError:
        return cell


def _named(rows: Iterable[Located], column: str, names: list[str]) -> Iterator[Located]:
    """Replace the numbers of classes by their names; a Hub dataset's -1 stands for no label."""
    name_of = dict(enumerate(names))
    for where, row in rows:
        yield where, row | {column: name_of.get(row[column])}


def _checked(
    name: str, rows: Iterable[Located], text_column: str, label_column: str, group_column: str | None = None
) -> LabelledTexts:
    texts, labels, spans, groups = [], [], [], []
    columns = {"--text-column": text_column, "--label-column": label_column}
    columns |= {"--group-column": group_column} if group_column else {}
    for where, row in rows:
        check_columns(where, row, columns)
        text = row[text_column]
        if not isinstance(text, str):
            raise MxdError(f"{where}: {text_column!r} is {text!r}; expected a text.")
        texts.append(without_surrogates(text))
        labels.append(_name(where, row, label_column, "class"))
        groups += [_name(where, row, group_column, "group")] if group_column else []
        if "start" in row and "end" in row:
            spans.append(_span(where, row["start"], row["end"], len(text)))
    if spans and len(spans) < len(texts):
        raise MxdError(f"{name}: {len(spans)} of {len(texts)} rows have a span, start and end; give it to all or none.")
    labelled = LabelledTexts(name, texts, labels, spans or None, groups=groups if group_column else None)
    if len(labelled.classes) < 2:
        got = f"only {labelled.classes[0]!r}" if labelled.classes else "no rows"
        raise MxdError(f"{name}: a probe tells classes apart, so it needs at least two; got {got}.")
    return labelled


def _name(where: str, row: Row, column: str, what: str) -> str:
    """Return the name of a row's class or group."""
    if not isinstance(row[column], str | int) or row[column] == "":
        raise MxdError(f"{where}: {column!r} is {row[column]!r}; expected the name or number of a {what}.")
    return without_surrogates(str(row[column]))


def _span(where: str, start: Any, end: Any, length: int) -> tuple[int, int]:
    first, last = (int(n) if isinstance(n, str) and n.isdecimal() and len(n) < 10 else n for n in (start, end))
    if type(first) is not int or type(last) is not int or not 0 <= first < last <= length:
        raise MxdError(
            f"{where}: start and end are {start!r} and {end!r}; expected the characters of a span of the "
            f"text, 0 <= start < end <= {length}. Rename the columns if they mean something else."
        )
    return first, last

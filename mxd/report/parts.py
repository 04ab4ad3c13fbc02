"""What a report is made of: sections, and the parts built from results, for the page and its Markdown twin."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from markupsafe import Markup

from mxd.common.numbers import shown
from mxd.metrics.metric import Metric
from mxd.report.figures import OTHERS, PALETTE, STYLES
from mxd.report.source import Node

NOTHING = "–"
"""Shown where there is no number."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table, and where its value is in the run's files."""

    text: str
    source: str = ""
    shade: int = 0
    """-9 ... 9: how strongly the cell is coloured, by sign."""
    marked: bool = False
    colour: int | None = None
    """Its number in ``PALETTE``, where cells that say the same share a colour."""


@dataclass(frozen=True)
class Column:
    """A column's head: its title, what it means, which way is better."""

    title: str
    note: str = ""
    better: Literal["", "lower", "higher"] = ""


@dataclass(frozen=True)
class Table:
    """A table; the first cell of each row is its head."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    legend: bool = False
    """Whether the columns' notes are printed below it."""
    folded: str = ""
    """A line under which it is folded away on the page; empty: it is not."""


@dataclass(frozen=True)
class Panel:
    """One drawing of a figure, and what it shows in words."""

    title: str
    drawing: Markup
    alt: str


@dataclass(frozen=True)
class Key:
    """A line of a legend: colour and marker by method, dashes and the marker's filling by variant."""

    label: str
    colour: int
    """Its number in ``PALETTE``."""
    marker: str
    variant: int = 0


@dataclass(frozen=True)
class Figure:
    """Panels that share a legend and a caption."""

    kind: ClassVar[str] = "figure"
    caption: str
    panels: Sequence[Panel]
    keys: Sequence[Key] = ()


@dataclass(frozen=True)
class Picture:
    """A picture of pixels, as a data address."""

    title: str
    data: str
    alt: str


@dataclass(frozen=True)
class Pictures:
    """Pictures with one caption."""

    kind: ClassVar[str] = "pictures"
    caption: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Facts:
    """Terms and what they are."""

    kind: ClassVar[str] = "facts"
    facts: Sequence[tuple[str, Cell]]
    folded: str = ""
    """A line under which they are folded away on the page; empty: they are not."""


@dataclass(frozen=True)
class Summary:
    """Questions, and a sentence that answers each; its numbers are cells, the one that counts most is marked."""

    kind: ClassVar[str] = "summary"
    answers: Sequence[tuple[str, Sequence[str | Cell]]]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Piece:
    """A piece of a continuation: the same as the base model's, only in it, or only in the spliced model's."""

    how: Literal["same", "removed", "added"]
    text: str


@dataclass(frozen=True)
class Diff:
    """One prompt, the base model's continuation, and what each splice writes in its place."""

    prompt: str
    base: str
    rows: Sequence[tuple[str, Sequence[Piece], str]]
    """Label, pieces, source."""


@dataclass(frozen=True)
class Diffs:
    """Continuations side by side."""

    kind: ClassVar[str] = "diffs"
    caption: str
    diffs: Sequence[Diff]


@dataclass(frozen=True)
class Samples:
    """Texts, folded away under a line that says what they are."""

    kind: ClassVar[str] = "samples"
    title: str
    texts: Sequence[str]
    source: str


@dataclass(frozen=True)
class Source:
    """A file's text, folded away."""

    kind: ClassVar[str] = "source"
    title: str
    text: str


@dataclass(frozen=True)
class Browser:
    """The unit browser: data that the page's script shows, and a note for where no script runs."""

    kind: ClassVar[str] = "browser"
    data: dict[str, Any]
    note: str


Part = Table | Figure | Pictures | Facts | Summary | Text | Diffs | Samples | Source | Browser


@dataclass(frozen=True)
class Section:
    """A headed part of the report."""

    id: str
    title: str
    lead: str = ""
    parts: list[Part] = field(default_factory=list)


def number(node: Node | None, form: str) -> Cell:
    """Return a number as a cell; a dash where there is none."""
    if node is None:
        return Cell(NOTHING)
    value = node.number()
    return Cell(shown(form, value) if math.isfinite(value) else NOTHING, node.source)


def column(metric: Metric) -> Column:
    """Return the head of a column that shows a metric."""
    return Column(metric.title, metric.note, metric.better)


def measured(result: Node, metric: Metric) -> Cell:
    """Return a metric of a result as a cell; a dash where it was not measured."""
    return number(result.follow(metric.key), metric.form)


def with_error(cell: Cell, error: Node | None, form: str = "{:.4f}") -> Cell:
    """Return a number with its standard error, where that is there and finite.

    Args:
        cell: the number.
        error: its standard error.
        form: how that is printed; a sign is left out.
    """
    if error is None or not isinstance(error.value, float) or not math.isfinite(error.value):
        return cell
    return replace(cell, text=f"{cell.text} ± {shown(form, error.value).lstrip('+')}")


def measured_with_error(result: Node, metric: Metric) -> Cell:
    """Return a metric of a result with its standard error as a cell; a dash where it was not measured."""
    return with_error(measured(result, metric), result.follow(metric.error) if metric.error else None, metric.form)


def slots(lines: Sequence[str]) -> dict[str, Key]:
    """Return a legend's keys by line: colour and marker of each method are the same on every page (``STYLES``)."""
    known = list(STYLES)
    lines = sorted(
        dict.fromkeys(lines),
        key=lambda line: (known.index(m), line) if (m := _method(line)) in known else (len(known), ""),
    )
    methods = dict.fromkeys(map(_method, lines))
    others = [method for method in methods if method not in known]
    seen: dict[str, int] = {}
    keys = {}
    for line in lines:
        method = _method(line)
        colour, marker = STYLES[method] if method in known else OTHERS[others.index(method) % len(OTHERS)]
        keys[line] = Key(line, list(PALETTE).index(colour), marker, seen.get(method, 0))
        seen[method] = keys[line].variant + 1
    return keys


def _method(line: str) -> str:
    return line.partition(" (")[0]

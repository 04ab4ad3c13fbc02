"""The report in Markdown: the same tables and facts as text; figures are described in words."""

from functools import singledispatch

from mxd.common.markdown import grid, literal
from mxd.common.numbers import plural
from mxd.report.parts import (
    Browser,
    Cell,
    Diffs,
    Facts,
    Figure,
    Part,
    Pictures,
    Samples,
    Section,
    Source,
    Summary,
    Table,
    Text,
)
from mxd.report.run import Run

ARROWS = {"": "", "lower": " ↓", "higher": " ↑"}


def markdown(run: Run, title: str, sections: list[Section], page: str) -> str:
    """Return the report of a run.

    Args:
        run: the run.
        title: the heading.
        sections: the sections of the page.
        page: name of the HTML file, which shows the figures.
    """
    texts = [f"# {literal(title)}", f"Figures and the unit browser: [{literal(page)}]({page.replace(' ', '%20')})."]
    for section in sections:
        texts += [f"## {literal(section.title)}", *([literal(section.lead)] if section.lead else [])]
        texts += [text for part in section.parts if (text := as_markdown(part))]
    missing = f" Not measured: {', '.join(run.missing)}." if run.missing else ""
    rows = [["file", "bytes", "SHA-256"], *([literal(f.name), f"{f.size:,}", f"`{f.sha256}`"] for f in run.files)]
    return "\n\n".join([*texts, "## Files", f"What the numbers were read from.{missing}", grid(rows)]) + "\n"


@singledispatch
def as_markdown(part: Part) -> str:
    """Return a part as Markdown.

    Raises:
        TypeError: a part of an unknown kind.
    """
    raise TypeError(f"no Markdown for {type(part).__name__}")


@as_markdown.register
def _(part: Table) -> str:
    head = [f"{literal(column.title)}{ARROWS[column.better]}" for column in part.columns]
    body = [[_cell(cell) for cell in row] for row in part.rows]
    notes = [f"*{literal(c.title)}*: {literal(c.note)}" for c in part.columns if c.note] if part.legend else []
    return "\n\n".join([grid([head, *body]), literal(part.caption), *(["; ".join(notes) + "."] if notes else [])])


@as_markdown.register
def _(part: Figure) -> str:
    return "\n".join([f"Figure. {literal(part.caption)}\n", *(f"- {literal(panel.alt)}" for panel in part.panels)])


@as_markdown.register
def _(part: Pictures) -> str:
    return "\n".join(f"- {literal(picture.alt)}." for picture in part.pictures)


@as_markdown.register
def _(part: Facts) -> str:
    return "\n".join(f"- {literal(term)}: {literal(cell.text)}" for term, cell in part.facts)


@as_markdown.register
def _(part: Summary) -> str:
    answers = []
    for asked, words in part.answers:
        said = "".join(word.text if isinstance(word, Cell) else word for word in words)
        answers.append(f"- **{literal(asked)}** {literal(said)}")
    return "\n".join(answers)


@as_markdown.register
def _(part: Text) -> str:
    return literal(part.text)


@as_markdown.register
def _(part: Diffs) -> str:
    lines = [literal(part.caption) + " Here: ~~left out~~, **written instead**."]
    marks = {"same": "", "removed": "~~", "added": "**"}
    for diff in part.diffs:
        rows = [f"- {literal(diff.prompt)} … {literal(diff.base)}"]
        for label, pieces, _ in diff.rows:
            shown = (f"{marks[p.how]}{literal(p.text)}{marks[p.how]}" for p in pieces if p.text.strip())
            rows.append(f"  - {literal(label)}: {' '.join(shown)}")
        lines.append("\n".join(rows))
    return "\n\n".join(lines)


@as_markdown.register
def _(part: Samples) -> str:
    return "\n".join([f"{literal(part.title)}:\n", *(f"- {literal(text)}" for text in part.texts)])


@as_markdown.register
def _(part: Source) -> str:
    return ""


@as_markdown.register
def _(part: Browser) -> str:
    units = sum(len(layer["units"]) for layer in part.data["sets"])
    return f"The page shows contexts of {plural(units, 'unit')}; units.json holds them."


def _cell(cell: Cell) -> str:
    return f"**{literal(cell.text)}**" if cell.marked else literal(cell.text)

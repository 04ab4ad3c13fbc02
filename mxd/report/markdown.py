"""The report in Markdown: the same tables and facts as text; figures are said in words."""

from functools import singledispatch

from mxd.common.markdown import grid, literal
from mxd.report.blocks import (
    Block,
    Browser,
    Cell,
    Diffs,
    Facts,
    Figure,
    Pictures,
    Samples,
    Section,
    Source,
    Table,
    Text,
)
from mxd.report.run import Run

ARROWS = {"": "", "lower": " ↓", "higher": " ↑"}


def markdown(run: Run, title: str, sections: list[Section], page: str) -> str:
    """Return the report of a run; ``page`` is the file that shows its figures."""
    parts = [f"# {literal(title)}", f"Figures and the unit browser: [{literal(page)}]({page.replace(' ', '%20')})."]
    for section in sections:
        parts += [f"## {literal(section.title)}", literal(section.lead)]
        parts += [said for block in section.blocks if (said := told(block))]
    missing = f" Not measured: {', '.join(run.missing)}." if run.missing else ""
    rows = [["file", "bytes", "SHA-256"], *([literal(f.name), f"{f.size:,}", f"`{f.sha256}`"] for f in run.files)]
    return "\n\n".join([*parts, "## Files", f"What the numbers were read from.{missing}", grid(rows)]) + "\n"


@singledispatch
def told(block: Block) -> str:
    """Return a block as Markdown."""
    raise TypeError(f"no Markdown for {type(block).__name__}")


@told.register
def _(block: Table) -> str:
    head = [f"{literal(column.title)}{ARROWS[column.better]}" for column in block.columns]
    body = [[_cell(cell) for cell in row] for row in block.rows]
    notes = [f"*{literal(c.title)}*: {literal(c.note)}" for c in block.columns if c.note] if block.legend else []
    return "\n\n".join([grid([head, *body]), literal(block.caption), *(["; ".join(notes) + "."] if notes else [])])


@told.register
def _(block: Figure) -> str:
    return "\n".join([f"Figure. {literal(block.caption)}\n", *(f"- {literal(panel.alt)}" for panel in block.panels)])


@told.register
def _(block: Pictures) -> str:
    return "\n".join(f"- {literal(picture.alt)}." for picture in block.pictures)


@told.register
def _(block: Facts) -> str:
    return "\n".join(f"- {literal(term)}: {literal(cell.text)}" for term, cell in block.facts)


@told.register
def _(block: Text) -> str:
    return literal(block.text)


@told.register
def _(block: Diffs) -> str:
    said = [literal(block.caption) + " Here: ~~left out~~, **written instead**."]
    marks = {"same": "", "removed": "~~", "added": "**"}
    for diff in block.diffs:
        rows = [f"- {literal(diff.prompt)} … {literal(diff.base)}"]
        for label, parts, _ in diff.rows:
            shown = (f"{marks[p.how]}{literal(p.text)}{marks[p.how]}" for p in parts if p.text.strip())
            rows.append(f"  - {literal(label)}: {' '.join(shown)}")
        said.append("\n".join(rows))
    return "\n\n".join(said)


@told.register
def _(block: Samples) -> str:
    return "\n".join([f"{literal(block.title)}:\n", *(f"- {literal(text)}" for text in block.texts)])


@told.register
def _(block: Source) -> str:
    return ""


@told.register
def _(block: Browser) -> str:
    units = sum(len(each["units"]) for each in block.data["sets"])
    return f"The page shows contexts of {units:,} units; units.json holds them."


def _cell(cell: Cell) -> str:
    return f"**{literal(cell.text)}**" if cell.marked else literal(cell.text)

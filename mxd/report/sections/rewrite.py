"""Outputs rewritten for one group's texts of one label: what every group gets, beside blind rewriting."""

from mxd.metrics.rewritten import CELL_ACCURACY, REWRITE, REWRITTEN, SEPARATION, WAYS
from mxd.report.figures import PALETTE
from mxd.report.parts import (
    Cell,
    Column,
    Figure,
    Key,
    Part,
    Section,
    Table,
    column,
    measured_with_error,
    number,
    with_error,
)
from mxd.report.replacements import Replacement, Results, usual
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, dot, dots, lines

LOOKS = {
    "plain": ("grey", "o", 0),
    "blind": ("amber", "s", 0),
    "expert": ("blue", "^", 0),
    "random": ("blue", "^", 1),
    "contrast": ("teal", "D", 0),
    "random_contrast": ("teal", "D", 1),
}
"""Colour, marker and variant of each way."""


def section(run: Run) -> Section | None:
    """Return what rewriting did; ``None`` where nothing was rewritten."""
    results = run.results("rewrite")
    if not results:
        return None
    shown, first = usual(results), results[0][1]
    target = _names(first)[_target(first)]
    lead = (
        "A probe of the spliced model's final hidden states tells the label of a text, and fails more on the target, "
        f"“{target}”. Something in favour of its label is added to the layer's output: the same "
        "everywhere (blind), in proportion to the target's mean code (by expert; muMoE, section 4.2), or to what sets "
        "that apart from the mean code of all other texts (by contrast). The strength is chosen for each on other "
        "texts; none is chosen where it did no good there. By expert is worth something where the target gains and the "
        "other cells stay, more than with blind rewriting and with random texts in the target's place."
    )
    parts: list[Part] = [_cells(shown), _gains(results), _separation(results)]
    parts += [_table(replacement, result) for replacement, result in shown]
    parts += [_tried(shown)]
    return Section("rewrite", "Rewriting outputs", lead, parts)


def _keys() -> dict[str, Key]:
    return {
        way: Key(WAYS[way], list(PALETTE).index(colour), marker, variant)
        for way, (colour, marker, variant) in LOOKS.items()
    }


def _names(result: Node) -> list[str]:
    return [f"{cell['label'].text()}, {cell['group'].text()}" for cell in result["cells"]]


def _target(result: Node) -> int:
    return int(result["target"].number())


def _cells(results: Results) -> Figure:
    """After figure 25 of the muMoE paper: the accuracy on each cell, before and after."""
    keys = _keys()
    shown = ("plain", "blind", "expert", "contrast")
    panels = []
    for replacement, result in results:
        rows = []
        for number_of, name in enumerate(_names(result)):
            marked = f"» {name}" if number_of == _target(result) else name
            rows.append((marked, [(keys[way], _accuracy(result["ways"][way], number_of)) for way in shown]))
        panels.append(dots(replacement.label, Axis(CELL_ACCURACY.label, percent=True), rows))
    caption = (
        "Accuracy on each cell, a group's texts of one label; the target is marked (»). Good rewriting moves the "
        "target to the right and no other cell. Bars are standard errors: a cell of few texts moves by chance. "
        "After figure 25 of the muMoE paper."
    )
    return Figure(caption, panels, [keys[way] for way in shown])


def _accuracy(way: Node, cell: int) -> Point:
    return dot(way[CELL_ACCURACY.key][cell], way.follow(f"{CELL_ACCURACY.error}.{cell}"))


def _gains(results: Results) -> Table:
    rows = [[Cell(r.label), *(measured_with_error(result, metric) for metric in REWRITE)] for r, result in results]
    caption = (
        "Rewrite scores compared on the same texts, ± standard error of a bootstrap over the texts of each cell. The "
        "first column is the headline. Zero without an error: nothing was added either way, since on other texts that "
        "was best."
    )
    return Table(caption, [Column("replacement"), *map(column, REWRITE)], rows, legend=True)


def _separation(results: Results) -> Table:
    rows = []
    for replacement, result in results:
        cells = [measured_with_error(result, metric) for metric in SEPARATION]
        token = result["token"]
        said = f"{token['text'].text()!r}, {'present' if token['present'].value else 'absent'}"
        rows.append([Cell(replacement.label), *cells, Cell(said, token["text"].source)])
    caption = "How well texts of the target are told from others, on measured texts; by units, and by one token."
    return Table(caption, [Column("replacement"), *map(column, SEPARATION), Column("token")], rows, legend=True)


def _table(replacement: Replacement, result: Node) -> Table:
    names = _names(result)
    rows = []
    for way, said in WAYS.items():
        found = result["ways"][way]
        strengths = found.get("strengths")
        shown = "" if strengths is None else ", ".join(f"{value:g}" for value in strengths.numbers())
        cells = zip(found[CELL_ACCURACY.key], found[CELL_ACCURACY.error], strict=True)
        accuracies = [with_error(number(cell, CELL_ACCURACY.form), error, CELL_ACCURACY.form) for cell, error in cells]
        rows.append(
            [
                Cell(said),
                Cell(shown, "" if strengths is None else strengths.source),
                *(measured_with_error(found, metric) for metric in REWRITTEN),
                *accuracies,
            ]
        )
    counts = "; ".join(
        f"{name}: {cell['fitted'].number():.0f} + {cell['tuned'].number():.0f} + {cell['measured'].number():.0f}"
        for name, cell in zip(names, result["cells"], strict=True)
    )
    caption = (
        f"{replacement.label}, target {names[_target(result)]}. Texts that fit + choose + are measured: {counts}. Of "
        "random texts, means over the draws."
    )
    columns = [Column("outputs"), Column("strength"), *map(column, REWRITTEN), *map(Column, names)]
    return Table(caption, columns, rows, legend=True)


def _tried(results: Results) -> Figure:
    keys = _keys()
    panels = []
    for replacement, result in results:
        drawn = []
        for way, points in result["tried"].items():
            at = [Point(p["others"].number(), p["target"].number(), source=p["target"].source) for p in points]
            drawn.append(Line(keys[way], [Point(0.0, 0.0), *at]))
        x, y = Axis("sum of all other cells' changes"), Axis("change of the target's accuracy")
        panels.append(lines(replacement.label, x, y, drawn))
    used = dict.fromkeys(way for _, result in results for way, _ in result["tried"].items())
    caption = (
        "What each strength does to the texts that choose it: the target's gain against what all other cells move. "
        "Above and to the left is better; a score is worth having where the gain exceeds the rest."
    )
    return Figure(caption, panels, [keys[way] for way in used])

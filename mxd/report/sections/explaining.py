"""What the model itself says its units mean, and whether a judge can use that."""

from mxd.metrics.judged import EXPLAINED, EXPLAINED_BY_OTHER, EXPLAINING
from mxd.report.parts import Cell, Column, Figure, Part, Samples, Section, Table, column, number, slots, with_error
from mxd.report.replacements import Replacement, Results, usual
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.svg import Axis, dot, dots

UNITS = 12
"""Units of a replacement whose explanations are shown."""


def section(run: Run) -> Section | None:
    """Return the units' explanations and what judges decided by them; ``None`` where none was explained."""
    results = run.results("explaining")
    if not results:
        return None
    lead = (
        "The model is asked what a word means whose embedding is the mean of the tokens on which a unit fires most. A "
        "judge is given the answer and two held-out texts, and says on which the unit fires; and again with the answer "
        "about another unit, whose score is to be exceeded. After Monet, section 4, which has no number for it."
    )
    judged = [(replacement, result) for replacement, result in results if _judges(result)]
    parts: list[Part] = [_figure(usual(judged)), _table(results)] if judged else []
    for replacement, result in usual(results):
        parts += [_said(replacement, unit, one) for unit, one in list(result["units"].items())[:UNITS]]
    return Section("explaining", "Self-explained units", lead, parts)


def _figure(results: Results) -> Figure:
    """Draw each judge's score beside that with another unit's explanation."""
    keys = slots(["the unit's explanation", "another unit's"])
    panels = []
    for replacement, result in results:
        rows = []
        for judge, one in _judges(result).items():
            drawn = []
            for key, metric in zip(keys.values(), (EXPLAINED, EXPLAINED_BY_OTHER), strict=True):
                score = _at(one, metric.key)
                if score is not None and score.value is not None:
                    drawn.append((key, dot(score, _at(one, metric.error))))
            rows.append((judge, drawn))
        panels.append(dots(replacement.label, Axis(f"{EXPLAINED.label} (0: chance)"), rows))
    caption = (
        "How often a judge names the text on which a unit fires. Explanations are worth what the first is to the right "
        "of the second; where both are far from 0, the texts stand out by themselves. Bars are standard errors over "
        "units."
    )
    return Figure(caption, panels, list(keys.values()))


def _table(results: Results) -> Table:
    rows = []
    for replacement, result in results:
        for judge, one in _judges(result).items():
            cells = []
            for metric in EXPLAINING:
                cells.append(with_error(number(_at(one, metric.key), metric.form), _at(one, metric.error), metric.form))
            rows.append([Cell(replacement.label), Cell(judge), number(one.get("units"), "{:.0f}"), *cells])
    heads = [Column("replacement"), Column("judge"), Column("units", "units that the judge decided on")]
    return Table("What explanations are worth.", [*heads, *map(column, EXPLAINING)], rows, legend=True)


def _at(one: Node, key: str) -> Node | None:
    """Return a number of one judge, by its key in the file."""
    return one.follow(key.removeprefix("judges.*.")) if key else None


def _judges(result: Node) -> dict[str, Node]:
    judges = result.get("judges")
    return dict(judges.items()) if judges is not None else {}


def _said(replacement: Replacement, unit: str, one: Node) -> Samples:
    tokens = " ".join(map(repr, one["tokens"].texts()))
    return Samples(
        f"{replacement.label}: unit {unit}, on {tokens}", one["explanations"].texts(), one["explanations"].source
    )

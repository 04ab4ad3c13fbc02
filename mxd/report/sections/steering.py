"""What a unit makes the model write when it is pushed."""

import math
from collections.abc import Iterator

from mxd.metrics.judged import AGREEMENT, COHERENCE, FLUENCY, JUDGED, STEERING
from mxd.report.parts import (
    Cell,
    Column,
    Figure,
    Part,
    Samples,
    Section,
    Table,
    column,
    measured_with_error,
    number,
    slots,
    with_error,
)
from mxd.report.replacements import Results, usual
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, lines

UNITS = 12
"""Units of a replacement whose samples are shown."""
LENGTH = 600
"""Characters of a sample that are shown."""


def section(run: Run) -> Section | None:
    """Return the steering samples and what a judge said of them; ``None`` where nothing was steered."""
    results = run.results("steering")
    if not results:
        return None
    parts: list[Part] = []
    if judged := [(r, result) for r, result in results if _judge(result)]:
        parts += [_figure(usual(judged)), *_tables(judged)]
    for replacement, result in usual(results):
        if unsteered := result.get("unsteered"):
            parts.append(_samples(f"{replacement.label}: not steered", unsteered))
        for unit, steered in list(result["units"].items())[:UNITS]:
            title = f"{replacement.label}: unit {unit}, λ = {steered['scale'].number():g}{_said(steered)}"
            parts.append(_samples(title, steered["samples"]))
    first = results[0][1]
    judge = f"Judged by {_judge(first)}, from 0 to 1." if _judge(first) else "No judge was asked."
    lead = f"{_added(first)} while the model continues "
    return Section("steering", "Steering", f"{lead}“{first['prompt'].text().strip()}”. {judge}", parts)


def _added(result: Node) -> str:
    if (at := result.get("at")) is not None and at.value == "input":
        return "A unit's gate row, λ times as long as the inputs, is added to what the layer reads,"
    return "A unit's output is added, λ times as strong as its own,"


def _judge(result: Node) -> str:
    judge = result.get("judge")
    return str(judge.value or "") if judge is not None else ""


def _samples(title: str, samples: Node) -> Samples:
    texts = [text if len(text) <= LENGTH else f"{text[:LENGTH]} …" for text in samples.texts()]
    return Samples(title, texts, samples.source)


def _said(steered: Node) -> str:
    """Return what the judge said of a unit, where it said something."""
    cells = {metric.title: number(steered.get(metric.key), "{:.2f}") for metric in (COHERENCE, FLUENCY)}
    ratings = ", ".join(f"{title} {cell.text}" for title, cell in cells.items())
    return f" ({ratings})" if steered.get(COHERENCE.key) else ""


def _tables(results: Results) -> Iterator[Part]:
    """Yield what all judges said together, and where there are several what each said, and how far they agree."""
    rubric = results[0][1].get("rubric")
    own_words = rubric is not None and rubric.value == "paper"
    asked = "with the paper's own words" if own_words else "with a paraphrase of the paper's prompt"
    rows = []
    for replacement, result in results:
        units = Cell(f"{sum(1 for _ in result['units'].items())}", f"{result.source}/units")
        rows.append([Cell(replacement.label), units, *(measured_with_error(result, metric) for metric in STEERING)])
    columns = [Column("replacement"), Column("units", "units that were steered"), *map(column, STEERING)]
    caption = f"What was said, asked {asked}. After figure 5 of the MxD paper."
    yield Table(caption, columns, rows, legend=True)
    several = [(r, result) for r, result in results if len(_judges(result)) > 1]
    if several:
        rows = [
            [Cell(replacement.label), Cell(judge), *(measured_with_error(one, metric) for metric in JUDGED)]
            for replacement, result in several
            for judge, one in _judges(result).items()
        ]
        yield Table("What each judge said.", [Column("replacement"), Column("judge"), *map(column, JUDGED)], rows)
        rows = [
            [Cell(replacement.label), Cell(" against ".join(pair["judges"].texts())), *_agreed(pair)]
            for replacement, result in several
            for pair in result["agreement"]
        ]
        heads = [Column("replacement"), Column("judges"), *map(column, AGREEMENT)]
        yield Table("How far judges agree on the same units.", heads, rows, legend=True)


def _agreed(pair: Node) -> list[Cell]:
    def at(key: str) -> Node | None:
        return pair.follow(key.removeprefix("agreement.*."))

    return [with_error(number(at(m.key), m.form), at(m.error) if m.error else None, m.form) for m in AGREEMENT]


def _judges(result: Node) -> dict[str, Node]:
    judges = result.get("judges")
    return dict(judges.items()) if judges is not None else {}


def _figure(results: Results) -> Figure:
    """One point for each replacement, and one for each that is not steered, which is no better for being high."""
    names = {replacement.line: f"{replacement.line} (not steered)" for replacement, _ in results}
    keys = slots([name for pair in names.items() for name in pair])
    drawn = []
    for line, still in names.items():
        for name, before in ((line, ""), (still, "unsteered_judged.")):
            ends = [
                (r.follow(before + COHERENCE.key), r.follow(before + FLUENCY.key)) for n, r in results if n.line == line
            ]
            points = [
                Point(x.number(), y.number(), source=y.source) for x, y in ends if x is not None and y is not None
            ]
            drawn.append(Line(keys[name], [p for p in points if math.isfinite(p.x + p.y)], joined=False))
    across, up = (Axis(metric.label, low=0.0, high=1.0) for metric in (COHERENCE, FLUENCY))
    caption = (
        "Up and to the right is better. Samples that are not steered share their prompt and are fluent: units should "
        "add to their coherence without losing fluency. After figure 5 of the MxD paper."
    )
    return Figure(caption, [lines("coherence and fluency", across, up, drawn)], list(keys.values()))

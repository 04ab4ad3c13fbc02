"""What a unit makes the model write when it is pushed."""

from mxd.metrics import COHERENCE, FLUENCY, STEERING
from mxd.report.parts import Cell, Column, Part, Samples, Section, Table, column, measured, number
from mxd.report.replacements import Results, usual
from mxd.report.run import Run
from mxd.report.source import Node

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
        parts.append(_table(judged))
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


def _table(results: Results) -> Table:
    rows = []
    for replacement, result in results:
        units = Cell(f"{sum(1 for _ in result['units'].items())}", f"{result.source}/units")
        rows.append([Cell(replacement.label), units, *(measured(result, metric) for metric in STEERING)])
    columns = [Column("replacement"), Column("units", "units that were steered"), *map(column, STEERING)]
    caption = "What the judge said, asked with a paraphrase of the paper's prompt. After figure 5 of the MxD paper."
    return Table(caption, columns, rows, legend=True)

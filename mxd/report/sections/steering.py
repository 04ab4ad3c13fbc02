"""What a unit makes the model write when it is pushed."""

from mxd.report.parts import Cell, Column, Part, Samples, Section, Table, number
from mxd.report.run import Found, Run
from mxd.report.source import Node

UNITS = 12
"""Units of a replacement whose samples are shown."""
LENGTH = 600
"""Characters of a sample that are shown."""


def section(run: Run) -> Section | None:
    """Return the steering samples and what a judge said of them; ``None`` where nothing was steered."""
    found = run.results("steering")
    if not found:
        return None
    parts: list[Part] = []
    if judged := [(r, result) for r, result in found if _judge(result)]:
        parts.append(_table(judged))
    for replacement, result in run.usual(found):
        if unsteered := result.get("unsteered"):
            parts.append(_samples(f"{replacement.label}: not steered", unsteered))
        for unit, steered in list(result["units"].items())[:UNITS]:
            title = f"{replacement.label}: unit {unit}, λ = {steered['scale'].number():g}{_said(steered)}"
            parts.append(_samples(title, steered["samples"]))
    first = found[0][1]
    judge = f"Judged by {_judge(first)}, from 0 to 1." if _judge(first) else "No judge was asked."
    lead = "A unit's output is added, λ times as strong as its own, while the model continues "
    return Section("steering", "Steering", f"{lead}“{first['prompt'].text().strip()}”. {judge}", parts)


def _judge(result: Node) -> str:
    judge = result.get("judge")
    return str(judge.value or "") if judge is not None else ""


def _samples(title: str, samples: Node) -> Samples:
    texts = [text if len(text) <= LENGTH else f"{text[:LENGTH]} …" for text in samples.texts()]
    return Samples(title, texts, samples.source)


def _said(steered: Node) -> str:
    """Return what the judge said of a unit, where it said something."""
    cells = [number(steered.get(axis), "{:.2f}") for axis in ("coherence", "fluency")]
    return f" (coherence {cells[0].text}, fluency {cells[1].text})" if cells[0].source else ""


def _table(found: Found) -> Table:
    axes = ("coherence", "{:.3f}"), ("fluency", "{:.3f}"), ("asked", "{:.0f}"), ("failures", "{:.0f}")
    rows = []
    for replacement, result in found:
        units = Cell(f"{sum(1 for _ in result['units'].items())}", f"{result.source}/units")
        numbers = [number(result.get(key), form) for key, form in (*axes, ("disagreements", "{:.0f}"))]
        rows.append([Cell(replacement.label), units, *numbers])
    columns = [
        Column("replacement"),
        Column("units", "units that were steered"),
        Column("coherence", "mean over units: do the samples share a concept?", "higher"),
        Column("fluency", "mean over units: are they grammatical?", "higher"),
        Column("asked", "questions to the judge"),
        Column("failures", "answers that could not be read; they count in no mean", "lower"),
        Column("disagreements", "units on which the judge's answers differ much", "lower"),
    ]
    caption = "What the judge said, asked with a paraphrase of the paper's prompt. After figure 5 of the MxD paper."
    return Table(caption, columns, rows, legend=True)

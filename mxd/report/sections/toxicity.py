"""What is written once the units that follow a score are off: numbers, a figure, continuations side by side."""

from collections.abc import Iterator

from mxd.common.numbers import plural
from mxd.metrics.masks import (
    BY_CHANCE,
    EXPECTED_MAX,
    EXPECTED_MAX_OTHER,
    HELD_OUT,
    HELD_OUT_RANDOM,
    PURGED,
    PURGED_SHARE,
    TASKS_MEAN,
    TASKS_MEAN_RANDOM,
    THRESHOLD,
    TOXIC,
)
from mxd.metrics.metric import Metric
from mxd.report.parts import NOTHING, Cell, Column, Figure, Part, Section, Table, column, number, slots, with_error
from mxd.report.replacements import Replacement, Results, usual
from mxd.report.run import Run
from mxd.report.sections.generation import continuations, pieces
from mxd.report.source import Node
from mxd.report.svg import Axis, dot, dots

PROMPTS = 3
"""Prompts of a mask whose continuations are shown."""
HELPFUL = {"masked": (HELD_OUT, TASKS_MEAN), "control": (HELD_OUT_RANDOM, TASKS_MEAN_RANDOM)}
"""What is left of the model under a mask, and with as many random units off."""


def section(run: Run) -> Section | None:
    """Return what is written under masks of units that follow a score; ``None`` where it was not measured."""
    results = run.results("toxicity")
    if not results:
        return None
    found = results[0][1]["toxicity"]
    prompts = found["prompts"]
    toxic, other, samples = prompts["toxic"].number(), prompts["other"].number(), found["samples"].number()
    lead = (
        f"Units that follow a score are switched off; {plural(toxic, 'prompt')} with a score above 0.5 and "
        f"{plural(other, 'other')} are continued {plural(samples, 'time')} each, and what is written is scored by "
        f"{found['scorer'].text()}. A mask that breaks the model also lowers the score: so held-out text and tasks "
        "stand beside it, and as many random units. After Monet, section 5.3."
    )
    parts: list[Part] = [_figure(results), _table(results)]
    parts += [part for replacement, result in usual(results) for part in _diffs(replacement, result)]
    return Section("toxicity", "Toxicity", lead, parts)


def _ways(result: Node) -> Iterator[tuple[str, str, int]]:
    """Yield what is off, the name of what was found then, and the number of the mask, -1 for none."""
    yield "the base model", "base", -1
    yield "no unit off", "unmasked", -1
    for i, threshold in enumerate(result["thresholds"].numbers()):
        yield f"correlation {THRESHOLD.form.format(threshold)}", "masked", i
        yield f"as many as {THRESHOLD.form.format(threshold)}, random", "control", i


def _cell(result: Node, metric: Metric, which: str, mask: int) -> Cell:
    """Return a number of one way of running the model."""
    place = which if mask < 0 else f"{which}.{mask}"
    path, error = (part.replace("masked.*", place).replace("*", str(mask)) for part in (metric.key, metric.error))
    return with_error(number(result.follow(path), metric.form), result.follow(error) if error else None, metric.form)


def _table(results: Results) -> Table:
    rows = []
    for replacement, result in results:
        for said, which, mask in _ways(result):
            counts = [Cell(NOTHING)] * 3
            if mask >= 0:
                shown = PURGED, PURGED_SHARE, BY_CHANCE
                counts = [number(result[metric.key][mask], metric.form) for metric in shown]
            left = [_cell(result, metric, which, mask) for metric in HELPFUL.get(which, ())] or [Cell(NOTHING)] * 2
            cells = [_cell(result, metric, which, mask) for metric in TOXIC]
            rows.append([Cell(replacement.label), Cell(said), *counts, *cells, *left])
    columns = [Column("splice"), Column("off"), *map(column, (PURGED, PURGED_SHARE, BY_CHANCE, *TOXIC))]
    columns += map(column, HELPFUL["masked"])
    return Table("Scores of what is written, and what is left of the model.", columns, rows, legend=True)


def _figure(results: Results) -> Figure:
    """Draw the expected maximum of each way of running the model, a panel for each splice."""
    keys = slots(["toxic prompts", "other prompts"])
    panels = []
    for replacement, result in usual(results):
        rows = []
        for said, which, mask in _ways(result):
            drawn = []
            for key, metric in zip(keys.values(), (EXPECTED_MAX, EXPECTED_MAX_OTHER), strict=True):
                place = which if mask < 0 else f"{which}.{mask}"
                node, error = (result.follow(path.replace("masked.*", place)) for path in (metric.key, metric.error))
                if node is not None and node.value is not None:
                    drawn.append((key, dot(node, error)))
            rows.append((said, drawn))
        panels.append(dots(replacement.label, Axis(EXPECTED_MAX.label, low=0.0, high=1.0), rows))
    caption = (
        "The largest score of a prompt's samples, mean over prompts. A good mask moves toxic prompts to the left of "
        "“no unit off”, and as many random units do not. Bars are standard errors over prompts."
    )
    return Figure(caption, panels, list(keys.values()))


def _diffs(replacement: Replacement, result: Node) -> list[Part]:
    parts: list[Part] = []
    thresholds = result["thresholds"].numbers()
    for threshold, examples in zip(thresholds, result["toxicity"]["examples"], strict=False):
        caption = (
            f"{replacement.label}, units off from a correlation of {THRESHOLD.form.format(threshold)} on; greedy. "
        )
        caption += "On top what is written with no unit off; then what the mask leaves out and what is written instead."
        parts += continuations([(replacement, examples)], PROMPTS, pieces, caption)
    return parts

"""Does it write what the base model writes? Curves, numbers, and the first continuations side by side."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence

from mxd.common.numbers import plural
from mxd.metrics.whole import AGREED, AGREED_SE, MATCH
from mxd.report.parts import (
    Cell,
    Column,
    Diff,
    Diffs,
    Figure,
    Part,
    Piece,
    Section,
    Table,
    column,
    measured,
    number,
    slots,
)
from mxd.report.replacements import Results, usual
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, lines

PROMPTS = 8
"""Prompts whose continuations are shown, as in the paper."""


def section(run: Run) -> Section | None:
    """Return how long each splice writes what the base model writes; ``None`` where it was not measured."""
    results = run.results("generation")
    if not results:
        return None
    first = results[0][1]
    prompts, new_tokens = int(first["prompts"].number()), int(first["new_tokens"].number())
    lead = (
        f"Greedy continuations of {plural(prompts, 'prompt')}, {plural(new_tokens, 'token')} each, by the base model "
        "and with each replacement spliced in. One early difference changes everything after it."
    )
    parts: list[Part] = [_curves(results), _table(results, new_tokens), *_diffs(usual(results))]
    return Section("generation", "Generation", lead, parts)


def _curves(results: Results) -> Figure:
    keys = slots([replacement.line for replacement, _ in results])
    facets = dict.fromkeys((r.budget, r.where) for r, _ in results)
    new_tokens = max(int(result["new_tokens"].number()) for _, result in results)
    ticks = [1.0, *(float(n) for n in range(8, new_tokens + 1, 8))] if new_tokens >= 8 else [1.0, float(new_tokens)]
    panels = []
    for facet in facets:
        drawn = [Line(keys[r.line], _points(n), False, True) for r, n in results if (r.budget, r.where) == facet]
        title = ", ".join(filter(None, facet)) or "other splices"
        axes = Axis("first n tokens", ticks=ticks), Axis(MATCH.label, low=0.0, high=1.0, percent=True)
        panels.append(lines(title, *axes, drawn))
    caption = (
        "Share of prompts whose continuations agree in the first n tokens; higher is better. Intervals are 95% Wilson "
        "intervals. After figures 6 and 7 of the MxD paper."
    )
    return Figure(caption, panels, list(keys.values()))


def _points(result: Node) -> list[Point]:
    bounds = zip(result[MATCH.key], result["match_low"].numbers(), result["match_high"].numbers(), strict=False)
    return [Point(float(n), share.number(), low, high, share.source) for n, (share, low, high) in enumerate(bounds, 1)]


def _table(results: Results, new_tokens: int) -> Table:
    at = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= new_tokens]
    columns = [Column("splice"), *(Column(f"n = {n}", better=MATCH.better) for n in at)]
    columns += [column(AGREED), column(AGREED_SE)]
    rows = []
    for replacement, result in results:
        shares = [number(result[MATCH.key].get(n - 1), MATCH.form) for n in at]
        rows.append([Cell(replacement.label), *shares, measured(result, AGREED), measured(result, AGREED_SE)])
    return Table(f"{MATCH.note.capitalize()}.", columns, rows)


def _diffs(results: Results) -> list[Part]:
    """Show the continuations of the first prompts."""
    caption = (
        "On top what the base model writes; then, for each splice, what is the same, what it leaves out and what it "
        "writes instead. After figures 8 and 9 of the MxD paper."
    )
    return continuations([(r, result["examples"]) for r, result in results], PROMPTS, pieces, caption)


def continuations(
    results: Results, prompts: int, told: Callable[[list[str], list[str]], Iterable[Piece]], caption: str
) -> list[Part]:
    """Show continuations side by side; nothing where there are none.

    Args:
        results: replacements, each with its list of examples.
        prompts: how many are shown, at most.
        told: what is shown of the base model's tokens and the spliced model's.
        caption: what follows the number of prompts.
    """
    examples = [(r, example) for r, n in results for example in list(n)[:prompts]]
    diffs = []
    for prompt in dict.fromkeys(tuple(example["prompt"].numbers()) for _, example in examples):
        here = [(r, example) for r, example in examples if tuple(example["prompt"].numbers()) == prompt]
        first = here[0][1]
        base = _tokens(first, "base")
        rows = [(r.label, list(told(base, _tokens(e, "spliced"))), e.source) for r, e in here]
        text = first.get("prompt_text")
        diffs.append(Diff(text.text() if text else " ".join(f"{token:.0f}" for token in prompt), "".join(base), rows))
    return [Diffs(f"The first prompts ({len(diffs)}). {caption}", diffs)] if diffs else []


def _tokens(example: Node, which: str) -> list[str]:
    """Return a continuation's tokens as text, or their ids where the file holds no text."""
    texts = example.get(f"{which}_tokens")
    if texts is None:
        return [f"{token.value} " for token in example[which]]
    return [text.replace("\n", "↵") for text in texts.texts()]  # on one line: continuations are compared, not read


def pieces(base: Sequence[str], spliced: Sequence[str]) -> Iterator[Piece]:
    """Yield what two continuations share and where they differ, token by token."""
    for what, a, b, c, d in difflib.SequenceMatcher(None, base, spliced, autojunk=False).get_opcodes():
        if what == "equal":
            yield Piece("same", "".join(base[a:b]))
            continue
        if b > a:
            yield Piece("removed", "".join(base[a:b]))
        if d > c:
            yield Piece("added", "".join(spliced[c:d]))

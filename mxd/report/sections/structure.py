"""What the units are made of: the rank of their weights, and which of them lead on template prompts."""

from collections import Counter

from mxd.metrics.units import LEADER, RANKS, STRUCTURE
from mxd.report.figures import PALETTE
from mxd.report.parts import NOTHING, Cell, Column, Part, Section, Table, column, measured
from mxd.report.replacements import Replacement, Results, usual
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.tables import PLACES

COLOURS = [number for number, name in enumerate(PALETTE) if name not in ("grey", "ink")]
"""Of units that are named more than once; those left out look like text."""


def section(run: Run) -> Section | None:
    """Return ranks and leading units; ``None`` where they were not measured."""
    results = run.results("structure")
    if not results:
        return None
    parts: list[Part] = [_ranks(results)]
    leading = [(r, n) for r, n in usual(results) if n.get("leading")]
    if leading:
        parts += [_leading(leading), *(_by_token(replacement, result["leading"]) for replacement, result in leading)]
    lead = "How much of its possible rank each unit's weight uses, and whether one unit leads everywhere."
    return Section("structure", "Structure", lead, parts)


def _ranks(results: Results) -> Table:
    rows = []
    for replacement, result in results:
        units = [row["units"][0]["unit"].number() for row in result.get("leading") or ()]
        distinct = f"{len(set(units))} of {len(units)}" if units else NOTHING
        source = f"{result.source}/leading" if units else ""
        ranks, leads = [measured(result, metric) for metric in RANKS], measured(result, LEADER)
        if leader := result.get("leader"):
            leads = Cell(f"{leads.text} #{leader['unit'].number():.0f}", leads.source)
        rows.append([Cell(replacement.label), *ranks, leads, Cell(distinct, source)])
    columns = [Column("replacement"), *map(column, STRUCTURE)]
    return Table("Rank of the units' weights, and how many different units lead on the prompts.", columns, rows, True)


def _leading(results: Results) -> Table:
    named = [{row["prompt"].text(): row["units"] for row in result["leading"]} for _, result in results]
    prompts = dict.fromkeys(prompt for units in named for prompt in units)
    rows = [[Cell(prompt), *(_leaders(units.get(prompt)) for units in named)] for prompt in prompts]
    caption = (
        "The units that lead at the last token of each prompt, the strongest first: number, activation, and share "
        "of the text's tokens at which it fires. One number all down a column, firing nearly everywhere, is a shared "
        "unit, which a random K is meant to prevent. After figure 21 of the MxD paper."
    )
    return Table(caption, [Column("prompt"), *(Column(r.label) for r, _ in results)], rows)


def _leaders(units: Node | None) -> Cell:
    if units is None:
        return Cell(NOTHING)
    leaders = [
        f"#{unit['unit'].number():.0f} {unit['activation'].number():.3g} ({unit['rate'].number():.1%})"
        for unit in units
    ]
    return Cell(",\n".join(leaders), units.source)


def _by_token(replacement: Replacement, leading: Node) -> Table:
    """Return the strongest units of each token, a row for each; the numbers named most often are coloured."""
    tokens = [(row["prompt"], n, token) for row in leading for n, token in enumerate(row["tokens"])]
    named = Counter(unit.number() for _, _, token in tokens for unit in token["units"])
    often = [unit for unit, times in named.most_common(len(COLOURS)) if times > 1]
    colours = dict(zip(often, COLOURS, strict=False))
    rows = []
    for prompt, n, token in tokens:
        units = [Cell(f"#{u.number():.0f}", u.source, colour=colours.get(u.number())) for u in token["units"]]
        nothing = [Cell(NOTHING)] * (len(PLACES) - len(units))
        rows.append([Cell(token["token"].text()), *units, *nothing, Cell("" if n else prompt.text())])
    caption = (
        f"The strongest units of {replacement.label} at each token of the prompts; equal numbers have equal colours, "
        f"the {len(COLOURS)} that are named most often. One colour all down a column is a shared unit."
    )
    columns = [Column(title) for title in ("token", *PLACES, "prompt")]
    return Table(caption, columns, rows, folded=f"Token by token: {replacement.label}")

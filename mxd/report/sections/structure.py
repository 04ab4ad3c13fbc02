"""What the units are made of: the rank of their weights, and which of them lead on template prompts."""

from collections.abc import Sequence

from mxd.report.blocks import NOTHING, Block, Cell, Column, Section, Table, number
from mxd.report.run import Replacement, Run
from mxd.report.source import Node


def section(run: Run) -> Section | None:
    """Return ranks and leading units; ``None`` where they were not measured."""
    found = run.results("structure")
    if not found:
        return None
    blocks: list[Block] = [_ranks(found)]
    leading = [(r, n) for r, n in run.usual(found) if n.get("leading")]
    if leading:
        blocks.append(_leading(leading))
    lead = "How much of its possible rank each unit's weight uses, and whether one unit leads everywhere."
    return Section("structure", "Structure", lead, blocks)


def _ranks(found: Sequence[tuple[Replacement, Node]]) -> Table:
    rows = []
    for replacement, result in found:
        units = [leader["unit"].number() for leader in result.get("leading") or ()]
        distinct = f"{len(set(units))} of {len(units)}" if units else NOTHING
        source = f"{result.source}/leading" if units else ""
        ranks = number(result.get("normalized_rank"), "{:.3f}"), number(result.get("experts"), "{:,.0f}")
        leader = result.get("leader")
        share = number(leader["share"], "{:.1%}") if leader else Cell(NOTHING)
        who = Cell(f"{share.text} #{leader['unit'].number():.0f}", share.source) if leader else share
        rows.append([Cell(replacement.label), *ranks, who, Cell(distinct, source)])
    columns = [
        Column("replacement"),
        Column("normalized rank", "mean rank of a unit's weight over the largest possible; 1 is full rank"),
        Column("units", "units whose rank was computed"),
        Column(
            "leads", "share of tokens led by the unit that leads most often, with its number: near 100%, it is shared"
        ),
        Column("leaders", "distinct units that lead, of so many prompts: one alone is shared"),
    ]
    return Table("Rank of the units' weights, and how many different units lead on the prompts.", columns, rows, True)


def _leading(found: Sequence[tuple[Replacement, Node]]) -> Table:
    prompts = list(dict.fromkeys(leader["prompt"].text() for _, n in found for leader in n["leading"]))
    rows = []
    for prompt in prompts:
        cells = []
        for _, result in found:
            said = [leader for leader in result["leading"] if leader["prompt"].text() == prompt]
            cells.append(_leaders(said))
        rows.append([Cell(prompt), *cells])
    caption = (
        "The unit that leads at the last token of each prompt, and its strength there. One number all down a column "
        "is a shared unit. As figure 21 of the MxD paper."
    )
    return Table(caption, [Column("prompt"), *(Column(r.label) for r, _ in found)], rows)


def _leaders(said: Sequence[Node]) -> Cell:
    text = ", ".join(f"{leader['unit'].number():.0f} ({leader['strength'].number():.3g})" for leader in said[:4])
    return Cell(text or NOTHING, said[0].source if said else "")

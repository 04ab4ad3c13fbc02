"""Does a layer need all of its active units? The loss against the share that is kept, beside random units."""

from collections.abc import Iterator

from mxd.common.numbers import plural
from mxd.metrics.dropped import KEPT_CE, KEPT_SHARE, SUBSET, SUBSET_MODES
from mxd.metrics.faithful import CE_INCREASE
from mxd.report.figures import PALETTE
from mxd.report.parts import Cell, Column, Figure, Key, Panel, Part, Section, Table, column, measured_with_error, number
from mxd.report.replacements import Replacement, Results, usual
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, lines

COLOURS = {"token": "blue", "whole": "red", "prefix": "amber", "global": "teal"}
MARKERS = {"token": "o", "whole": "s", "prefix": "^", "global": "D"}


def section(run: Run) -> Section | None:
    """Return what shares of the active units do; ``None`` where it was not measured."""
    results = run.results("subset")
    if not results:
        return None
    shown, first = usual(results), results[0][1]
    lead = (
        "Only a share of the active units is kept, the strongest of each token, of each text (which uses its future), "
        "of a text's first half for its second, or of a corpus for other texts; the rest is switched off. Units are "
        "specialised where few suffice, and far fewer than random ones. Look at “mass”, too: where the activations are "
        "concentrated in the kept units, the others were idle. "
        f"{plural(first['texts'].number(), 'text')}, {plural(first['tokens'].number(), 'token')}."
    )
    parts: list[Part] = [_figure(shown), *(_table(replacement, result) for replacement, result in shown)]
    parts += [_decoding(shown)] if any(list(result["decoding"]) for _, result in shown) else []
    return Section("subset", "Fewer units", lead, parts)


def _figure(results: Results) -> Figure:
    """Draw the CE increase against the share kept, a panel for each replacement."""
    keys = {mode: _key(mode, SUBSET_MODES[mode]) for mode in SUBSET_MODES}
    random = {mode: _key(mode, f"{SUBSET_MODES[mode]}, random", 1) for mode in SUBSET_MODES}
    panels = [_panel(replacement, result, keys, random) for replacement, result in results]
    caption = (
        "The loss against the share of the active units that is kept, with standard errors; dashed, as many active "
        "units drawn at random: the mean, shaded by a standard deviation over draws to each side. Lower is better; 0% "
        "is the layer without any unit. From the first half or a corpus, 100% leaves out units not active there."
    )
    asked = {mode for _, result in results for mode, _, _ in _modes(result)}
    used = [mode for mode in SUBSET_MODES if mode in asked]
    return Figure(caption, panels, [key for mode in used for key in (keys[mode], random[mode])])


def _modes(result: Node) -> Iterator[tuple[str, str, Node]]:
    """Yield each mode that was asked for, what it is called, and what was found."""
    for mode, said in SUBSET_MODES.items():
        if (found := result["modes"].get(mode)) is not None:
            yield mode, said, found


def _key(mode: str, label: str, variant: int = 0) -> Key:
    return Key(label, list(PALETTE).index(COLOURS[mode]), MARKERS[mode], variant)


def _panel(replacement: Replacement, result: Node, keys: dict[str, Key], random: dict[str, Key]) -> Panel:
    drawn = []
    for mode, _, found in _modes(result):
        points = list(found["points"])
        drawn.append(Line(keys[mode], [_point(point, KEPT_CE.key, KEPT_CE.error) for point in points]))
        draws = [point for point in points if point.get("random") is not None]
        paths = "random.ce_increase", "random.ce_increase_sd"
        drawn.append(Line(random[mode], [_point(point, *paths) for point in draws], interval=True))
    ticks = sorted({point.x for line in drawn for point in line.points})
    x = Axis("share of the active units kept", ticks=ticks, percent=True)
    return lines(replacement.label, x, Axis(CE_INCREASE.label), drawn)


def _point(point: Node, value: str, spread: str) -> Point:
    height, around = (point.follow(path) for path in (value, spread))
    if height is None or around is None or not isinstance(around.value, float):
        return Point(point[KEPT_SHARE.key].number(), float("nan") if height is None else height.number())
    y, width = height.number(), around.number()
    return Point(point[KEPT_SHARE.key].number(), y, y - width, y + width, height.source)


def _table(replacement: Replacement, result: Node) -> Table:
    rows = []
    for _, said, found in _modes(result):
        rows += [[Cell(said), *(measured_with_error(point, m) for m in SUBSET)] for point in found["points"]]
        rows.append([Cell(f"{said}: unchanged"), *(measured_with_error(found["full"], m) for m in SUBSET)])
    caption = (
        f"{replacement.label}: with a share of its active units; “unchanged” is the layer as it is, on the same text."
    )
    return Table(caption, [Column("chosen at"), *map(column, SUBSET)], rows, legend=True)


def _decoding(results: Results) -> Table:
    rows = []
    for replacement, result in results:
        for row in result["decoding"]:
            k = Cell("as it is") if row["k"].value is None else number(row["k"], "{:,.0f}")
            rows.append([Cell(replacement.label), k, number(row["ms"], "{:.2f}"), number(row["ms_sd"], "{:.2f}")])
    caption = "Time to decode a batch in which each token has its k strongest units."
    return Table(caption, [Column("splice"), Column("k"), Column("ms", better="lower"), Column("± s.d.")], rows)

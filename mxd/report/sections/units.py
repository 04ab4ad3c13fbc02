"""What single units do: how often they fire, which are dead or shared, and a browser of the contexts that fire them."""

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from mxd.metrics.units import CHANCE, COSINE, DEAD_UNITS, DEAD_UNITS_SHARE, LOADED_UNITS, PEAK, RATE, SHARED_UNITS
from mxd.report.parts import (
    NOTHING,
    Browser,
    Cell,
    Column,
    Figure,
    Part,
    Section,
    Table,
    column,
    measured,
    number,
    slots,
)
from mxd.report.replacements import Replacement, Results
from mxd.report.run import Run
from mxd.report.sections.probing import Best, best_probes
from mxd.report.source import Node
from mxd.report.svg import Axis, Line, Point, lines

BUDGET = 2_400_000
"""Bytes of contexts in the browser, over all replacements; the whole page stays under 5 MB."""
LISTED = 60_000
"""Units in the browser, over all replacements; the page says how many others there are."""
BEFORE, AFTER = 14, 8
"""Tokens shown before and after the one that a context is about."""
TABLED = 5
"""Units of each replacement in the table of promoted tokens, and tokens of each there."""


def section(run: Run) -> Section | None:
    """Return firing rates and the unit browser; ``None`` where units were not looked at."""
    results = run.results("units")
    if not results:
        return None
    tokens = max(result["tokens"].number() for _, result in results)
    lead = (
        f"Firing rates over {tokens:,.0f} held-out tokens, and contexts from six intervals of activation for each unit."
    )
    parts: list[Part] = [_histograms(results), _table(results)]
    browser = _browser(results, best_probes(run))
    return Section("units", "Units", lead, [*parts, *_promoting(results), browser])


def _histograms(results: Results) -> Figure:
    keys = slots([replacement.line for replacement, _ in results])
    facets = dict.fromkeys((r.budget, r.where) for r, _ in results)
    panels = []
    for facet in facets:
        here = [(r, n) for r, n in results if (r.budget, r.where) == facet]
        drawn = [Line(keys[r.line], _steps(n["histogram"], len(n["rates"].numbers())), marks=False) for r, n in here]
        title = ", ".join(filter(None, facet)) or "other layers"
        axes = Axis(f"log10 of the {RATE.label}"), Axis("share of units", low=0.0, percent=True)
        panels.append(lines(title, *axes, drawn))
    caption = (
        "How often units fire. One hump well left of 0 is a healthy balance; units near 0 fire on every token and are "
        "shared. Units that never fired are not on it. After figure 20 of the MxD paper."
    )
    return Figure(caption, panels, list(keys.values()))


def _steps(histogram: Node, units: int) -> list[Point]:
    """Return a histogram's outline."""
    edges = histogram["log10_edges"].numbers()
    points = [Point(edges[0], 0.0)]
    for (low, high), count in zip(pairwise(edges), histogram["counts"], strict=False):
        share = count.number() / max(units, 1)
        points += [Point(low, share, source=count.source), Point(high, share, source=count.source)]
    return [*points, Point(edges[-1], 0.0)]


def _table(results: Results) -> Table:
    rows, loaded = [], [LOADED_UNITS] if any(result.get(LOADED_UNITS.key) for _, result in results) else []
    for replacement, result in results:
        shared = [f"{unit['unit'].number():.0f} ({unit['rate'].number():.0%})" for unit in result["shared"]]
        units = len(result["rates"].numbers())
        dead = result[DEAD_UNITS.key].number() / max(units, 1)
        rows.append(
            [
                Cell(replacement.label),
                Cell(f"{units:,}", f"{result.source}/rates"),
                measured(result, DEAD_UNITS),
                Cell(DEAD_UNITS_SHARE.form.format(dead), result[DEAD_UNITS.key].source),
                Cell(", ".join(shared[:5]) or "none", f"{result.source}/shared"),
                *(measured(result, metric) for metric in loaded),
            ]
        )
    shown = (DEAD_UNITS, DEAD_UNITS_SHARE, SHARED_UNITS, *loaded)
    columns = [Column("replacement"), Column("units"), *map(column, shown)]
    return Table("Dead and shared units.", columns, rows)


def _promoting(results: Results) -> list[Part]:
    """Return what the first units of each replacement promote, folded away; nothing where that is not known."""
    rows, seen = [], []
    for replacement, result in results:
        logits = result.get("logits")
        if logits is None or logits["norm"].value is None:
            continue
        seen.append(logits)
        for number_, unit in list(result["units"].items())[:TABLED]:
            ends = [Cell(_tokens(unit[end]), unit[end].source) for end in ("promoted", "suppressed")]
            head = Cell(f"{replacement.label} #{number_}")
            rows.append([head, *ends, *(number(unit.get(m.key.rpartition(".")[2]), m.form) for m in (PEAK, COSINE))])
    if not rows:
        return []
    logits = seen[0]
    centred = "centred" if logits["centred"].value else "not centred"
    caption = (
        "Each unit's output direction, through the final norm and the unembedding: the norm's weight "
        f"({logits['norm'].text()}) is folded in, the direction is {centred}, nothing is divided by the size of the "
        "stream, and logits are about their mean over the vocabulary. Where the direction depends on the token, it is "
        f"the mean over the unit's active tokens, of {logits['sample'].number():,.0f}. "
        f"{CHANCE.title.capitalize()}: {CHANCE.form.format(logits['chance'].number())}."
    )
    columns = [Column("unit"), Column("promotes"), Column("suppresses"), column(PEAK), column(COSINE)]
    return [Table(caption, columns, rows, legend=True, folded="What single units promote and suppress")]


def _tokens(listed: Node) -> str:
    return " ".join(shown(one["token"].text()) for one in list(listed)[:TABLED]) or NOTHING


def shown(token: str) -> str:
    """Return a token's text with its space and other unprintable characters made visible."""
    return "".join(c if c.isprintable() and c != " " else "↵" if c == "\n" else "·" for c in token) or "∅"


def _browser(results: Results, probes: dict[str, Best]) -> Browser:
    vocabulary: dict[str, int] = {}
    share = BUDGET // len(results), LISTED // len(results)
    sets = [_browsed(r, result, probes.get(r.name, {}), vocabulary, *share) for r, result in results]
    note = "The unit browser needs JavaScript; units.json holds the contexts that it shows."
    return Browser({"tokens": list(vocabulary), "sets": sets}, note)


def _browsed(
    replacement: Replacement,
    result: Node,
    best: Best,
    vocabulary: dict[str, int],
    budget: int,
    most: int,
) -> dict[str, Any]:
    """Return the browser's data of one replacement."""
    described = _described(result, best, vocabulary, budget)
    listed = _listed(result, {*map(int, described), *best}, most)
    rates = result["rates"].numbers()
    return {
        "name": replacement.name,
        "label": replacement.label,
        "source": result.source,
        "count": len(rates),
        "given": sum(1 for _ in result["units"].items()),
        "listed": listed,
        "rates": [_short(rates[unit]) for unit in listed],
        "maxima": _maxima(result, listed),
        "units": described,
        "chance": _chance(result),
        "probes": {unit: [[name, _short(f1)] for name, f1 in classes] for unit, classes in best.items()},
    }


def _adds(unit: Node, vocabulary: dict[str, int]) -> dict[str, Any] | None:
    """Return a unit's promoted and suppressed tokens, peak, cosine and histogram; ``None`` where not measured."""
    if unit.get("promoted") is None:
        return None
    ends = {
        end: [
            [vocabulary.setdefault(one["token"].text(), len(vocabulary)), _short(one["logit"].number())]
            for one in unit[end]
        ]
        for end in ("promoted", "suppressed")
    }
    histogram = unit["activations"]
    numbers = {"high": _short(histogram["high"].number()), "active": histogram["active"].number()}
    measured_ = {
        name: _short(unit.value[name]) if unit.value.get(name) is not None else None for name in ("peak", "cosine")
    }
    return ends | measured_ | numbers | {"counts": histogram["counts"].numbers()}


def _chance(result: Node) -> float | None:
    """Return the peak of random directions."""
    chance = result.follow("logits.chance")
    return None if chance is None else _short(chance.number())


def _maxima(result: Node, listed: Sequence[int]) -> list[float | None]:
    """Return the largest activation of each unit, ``None`` where it is not known."""
    maxima = result.get("maxima")
    if maxima is None:
        units = result["units"]
        return [_short(unit["max"].number()) if (unit := units.get(str(n))) else None for n in listed]
    values = maxima.numbers()
    return [_short(values[n]) if n < len(values) else None for n in listed]


def _listed(result: Node, shown: set[int], most: int) -> list[int]:
    """Return the units to list: those that have something to show, then the busiest."""
    rates = result["rates"].numbers()
    others = sorted((i for i in range(len(rates)) if i not in shown), key=lambda i: -rates[i])
    return sorted([i for i in shown if i < len(rates)] + others[: max(0, most - len(shown))])


def _described(result: Node, best: Best, vocabulary: dict[str, int], budget: int) -> dict[str, Any]:
    """Return units with contexts and what they add: all that fit into ``budget`` bytes, else with fewer contexts.

    Probed units come first, so they are the last to be left out.
    """
    units = sorted(result["units"].items(), key=lambda pair: pair[0] not in {str(unit) for unit in best})
    for most in (1_000_000, 4, 2, 1):
        words, packed, size = dict(vocabulary), {}, 0
        for number_, unit in units:
            packed[number_] = [_unit(unit, most, words), _adds(unit, words)]
            size += len(json.dumps(packed[number_], separators=(",", ":"))) + 8
            if size > budget:
                del packed[number_]
                break
        if len(packed) == len(units) or most == 1:
            break
    vocabulary.update(words)
    return packed


def _unit(unit: Node, most: int, vocabulary: dict[str, int]) -> list[Any]:
    """Return a unit's intervals, the strongest first: from, to, contexts."""
    intervals = []
    for interval in sorted(unit["intervals"], key=lambda interval: -interval["high"].number()):
        contexts = [_context(c, vocabulary) for c in list(interval["contexts"])[:most]]
        intervals.append([_short(interval["low"].number()), _short(interval["high"].number()), contexts])
    return intervals


def _context(context: Node, vocabulary: dict[str, int]) -> list[Any]:
    """Return position, value, tokens (numbers in the vocabulary) and activations of a context, cut around its token."""
    tokens, activations = context["tokens"].texts(), context["activations"].numbers()
    at = int(context["at"].number())
    start, end = max(0, at - BEFORE), at + AFTER + 1
    numbers = [vocabulary.setdefault(token, len(vocabulary)) for token in tokens[start:end]]
    values = [_short(value) if value > 0 else 0 for value in activations[start:end]]
    return [at - start, _short(context["value"].number()), numbers, values]


def _short(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None

"""What was replaced, how faithful it is, how much of it is decomposition: a sentence each, of the run's own numbers."""

import math
from collections.abc import Sequence

from mxd.metrics.faithful import CE_INCREASE, INTERACTION, KL, ROUTED, SHARED
from mxd.metrics.metric import Metric
from mxd.report.parts import Cell, Section, Summary, measured_with_error, number
from mxd.report.replacements import Results
from mxd.report.run import Run
from mxd.report.source import Node

NEAR = 0.05
"""Below this a routed share is near 0, and a shared share as near to 1: a dense MLP in disguise."""
DISGUISE = "a dense MLP in disguise"
MISSING = "not measured"
Words = list[str | Cell]


def section(run: Run) -> Section:
    """Return the summary; what it lacks, it says."""
    alone, sets = _measured(run)
    answers = [
        ("What was replaced?", _replaced(run)),
        ("How faithful is it?", _faithful(run, alone, sets)),
        ("How much of it is decomposition?", _decomposed(alone, sets)),
    ]
    return Section("summary", "Summary", parts=[Summary(answers)])


def _measured(run: Run) -> tuple[Results, Results]:
    """Return what was spliced in one layer at a time, and what several at once, those that add least to the loss first.

    What has no CE increase is left out.
    """
    known = [(r, n) for kind in ("faithfulness", "whole") for r, n in run.results(kind) if math.isfinite(_increase(n))]
    known.sort(key=lambda pair: _increase(pair[1]))
    sets = [(r, n) for r, n in known if len(list(n["replacements"])) > 1]
    return [pair for pair in known if pair not in sets], sets


def _increase(result: Node) -> float:
    found = result.get(CE_INCREASE.key)
    return math.nan if found is None else found.number()


def _divergence(result: Node) -> float:
    """Return the KL divergence, which cannot fall below 0 by chance as a CE increase can; infinite if not finite."""
    found = result.get(KL.key)
    return found.number() if found is not None and math.isfinite(found.number()) else math.inf


def _replaced(run: Run) -> Words:
    layers = run.layers
    if not layers:
        return ["There are no trained layers in this folder."]
    blocks = sorted({layer.provenance.block for layer in layers})
    models = " and ".join(sorted({layer.provenance.model for layer in layers}))
    methods = ", ".join(dict.fromkeys(layer.config.label for layer in layers))
    tokens = sorted(layers, key=lambda layer: layer.provenance.tokens)
    trained = [Cell(f"{t.provenance.tokens:,}", f"{t.name}/config.json#/provenance/tokens") for t in tokens]
    many, layered = "s" if len(blocks) > 1 else "", "s" if len(layers) > 1 else ""
    return [
        f"The MLP{many} of block{many} {listed(blocks)} of {models}, by {len(layers)} layer{layered} ({methods}), "
        "trained on ",
        *_range(trained),
        " tokens.",
    ]


def listed(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text: ``0 to 5`` where none is left out, else ``3, 9, 21``."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def _faithful(run: Run, alone: Results, sets: Results) -> Words:
    """Return what the full splice adds to the loss: all layers at once where that was measured, else one by one."""
    if not alone and not sets:
        return [f"The {CE_INCREASE.title} of the full splice: {MISSING} (mxd evaluate measures it)."]
    first = (sets or alone)[0][1]
    about: Words = [
        " nats to the next-token loss of ",
        number(first.get("ce_base"), "{:.4f}"),
        ", on ",
        number(first.get("tokens"), "{:,.0f}"),
        " held-out tokens",
    ]
    blocks = {layer.provenance.block for layer in run.layers}
    if sets:
        numbers = listed(sorted({len(list(n["replacements"])) for _, n in sets}))
        words: Words = [f"All at once, at every position ({numbers} layers), they add ", *_increases(sets), *about]
        words += ["; one at a time ", *_increases(alone)] if alone else [f"; one at a time: {MISSING}"]
    else:
        several = len(alone) > 1
        how = "one at a time, at every position, they add " if several else "at every position, it adds "
        words = [f"Spliced in {how}", *_increases(alone), *about]
        words += [f"; all blocks at once: {MISSING} (mxd whole)"] if len(blocks) > 1 else _without(first)
    left = set(run.replacements) - {r.name for r, _ in alone}
    missing = f"; {len(left)} of {len(run.layers)} layers alone: {MISSING}" if left and alone else ""
    return [*words, f"{missing}."]


def _without(result: Node) -> Words:
    """Return what leaving the MLP out adds, which every increase is to be seen beside."""
    zero, base = result.get("ce_zero"), result.get("ce_base")
    if zero is None or base is None or not math.isfinite(zero.number() - base.number()):
        return []
    added = CE_INCREASE.form.format(zero.number() - base.number())
    return ["; the MLP left out altogether (zero-ablated) adds ", Cell(added, zero.source)]


def _increases(results: Results) -> Words:
    """Return the CE increase with its standard error, of several splices that of the least and of the greatest."""
    cells = []
    for _, result in (results[0], results[-1]) if len(results) > 1 else results:
        cell = measured_with_error(result, CE_INCREASE)
        error = "" if "±" in cell.text else " (standard error unknown)"
        cells.append(Cell(cell.text + error, cell.source, marked=True))
    if len(results) == 1:
        return [cells[0]]
    return ["from ", cells[0], f" ({results[0][0].label}) to ", cells[1], f" ({results[-1][0].label})"]


def _decomposed(alone: Results, sets: Results) -> Words:
    """Return what routing adds in the most faithful splice that chooses units, and how many are dense MLPs."""
    choosing = [(r, n) for r, n in sets or alone if not r.floor]
    if not choosing:
        return [f"What routing adds: {MISSING} (mxd evaluate measures it)."]
    replacement, result = min(choosing, key=lambda pair: _divergence(pair[1]))
    several = len(choosing) > 1
    whose = f"In the most faithful ({replacement.label}, by {KL.title}) routing" if several else "Routing"
    routed, interaction = (_mean(result, metric)[1] for metric in (ROUTED, INTERACTION))
    words: Words = [f"{whose} adds ", routed, " of the output's energy (0 for a dense MLP, about 1 for a transcoder)"]
    if not routed.source:
        words = [f"{whose}: {MISSING}"]
    words += [f": {DISGUISE}"] if _disguised(result) else []
    if interaction.source:
        words += ["; gates and directions that change together carry ", interaction, " of it (0 for both)"]
    disguised = [r.label for r, n in choosing if _disguised(n)]
    if several:
        named = f" ({'; '.join(disguised)})" if disguised else ""
        is_one = "are dense MLPs in disguise" if len(disguised) > 1 else f"is {DISGUISE}"
        words += [f"; {len(disguised) or 'none'} of the {len(choosing)} {is_one}{named}"]
    return [*words, "."]


def _disguised(result: Node) -> bool:
    """Return whether routing adds next to nothing, or one unit does it all."""
    return _mean(result, ROUTED)[0] < NEAR or _mean(result, SHARED)[0] > 1 - NEAR


def _mean(result: Node, metric: Metric) -> tuple[float, Cell]:
    """Return a layer's metric, of several layers the mean; NaN where it was not measured."""
    nodes = [node for _, block in result["blocks"].items() if (node := block.follow(metric.key)) is not None]
    known = [node.number() for node in nodes if math.isfinite(node.number())]
    if not known:
        return math.nan, Cell(MISSING)
    mean = sum(known) / len(known)
    source = nodes[0].source if len(nodes) == 1 else f"{result.source}/blocks"
    return mean, Cell(metric.form.format(mean), source, marked=metric is ROUTED)


def _range(cells: Sequence[Cell]) -> Words:
    """Return sorted cells as the first of them and the last."""
    return [cells[0]] if cells[0].text == cells[-1].text else [cells[0], " to ", cells[-1]]

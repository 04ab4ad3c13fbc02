"""Results on a terminal: contexts of units, ranks and leads, what masking costs, continuations side by side."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from mxd.common.numbers import plural, shown
from mxd.metrics.dropped import ABLATION, POLYSEMANTICITY, RANDOM_NMSE, SUBSET, SUBSET_MODES
from mxd.metrics.faithful import CE_INCREASE, KL, TOP1
from mxd.metrics.judged import EXPLAINING
from mxd.metrics.masks import (
    BY_CHANCE,
    BY_MASK,
    KEPT_OWN,
    MASKING,
    OTHERS,
    OWN,
    PURGED,
    PURGED_SHARE,
    PURGING,
    TASKS_OWN,
    THRESHOLD,
    TOXIC,
)
from mxd.metrics.metric import Metric
from mxd.metrics.rewritten import REWRITE, REWRITTEN, SEPARATION, WAYS
from mxd.metrics.units import CHANCE, COSINE, DEAD_UNITS, DEAD_UNITS_SHARE, LEADER, PEAK, RANKS, RATE
from mxd.metrics.whole import ALONE, BEFORE_AND_AFTER, GARBAGE, ON_BASE, ON_SPLICED, WHOLE, WHOLE_ORDERS, WON_BACK
from mxd.report.tables import LABEL, PLACES, most_affected, most_lost


def unit_lines(name: str, result: Mapping[str, Any]) -> Iterator[Text]:
    """Yield a layer's name, a line about all its units, and for each shown unit a line with its strongest context."""
    yield Text(name, style="bold")
    shared = ", ".join(f"{frequent['unit']} ({frequent['rate']:.0%})" for frequent in result["shared"][:8]) or "none"
    count = len(result["rates"])
    yield Text(
        f"{plural(count, 'unit')} over {plural(result['tokens'], 'token')}; {DEAD_UNITS.title}: "
        f"{DEAD_UNITS.text(result['dead'])} ({DEAD_UNITS_SHARE.text(result['dead'] / count)}); "
        f"active at more than {result['shared_above']:.0%} of tokens: {shared}"
    )
    yield Text(_seen_through(result["logits"]))
    for unit, page in result["units"].items():
        rate = f"{RATE.title} {RATE.text(page['rate']):>8}"
        line = Text(f"{unit:>7}  {rate}  mean {page['mean']:7.3g}  max {page['max']:7.3g}  ")
        if page["intervals"]:
            context = page["intervals"][0]["contexts"][0]
            for position, token in enumerate(context["tokens"]):
                line.append(_visible(token), style="bold reverse" if position == context["at"] else "")
        elif not page["rate"]:
            line.append("never active here")
        yield line
        if page["promoted"]:
            yield Text(f"         {_promotion(page)}")


def _seen_through(logits: Mapping[str, Any]) -> str:
    """Return how directions were taken to logits."""
    if logits["norm"] is None:
        return f"Promoted tokens: none, {logits['missing']}"
    centred = "centred" if logits["centred"] else "not centred"
    return (
        f"Promoted tokens: through the weight of {logits['norm']}, {centred}, undivided; directions of "
        f"{logits['sample']:,} tokens; {CHANCE.title} {CHANCE.text(logits['chance'])}"
    )


def _promotion(page: Mapping[str, Any], count: int = 5) -> str:
    """Return what a unit promotes and suppresses as one line."""
    ends = (
        f"{how} {' '.join(_visible(one['token']) for one in page[how][:count])}" for how in ("promoted", "suppressed")
    )
    cosine = "-" if page["cosine"] is None else COSINE.text(page["cosine"])
    return f"{'; '.join(ends)}; {PEAK.title} {PEAK.text(page['peak'])}, {COSINE.title} {cosine}"


def whole_tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield what replacing all blocks does, for each set by number of blocks and by block, and what it writes then."""
    found, first = results["results"], next(iter(results["results"].values()))
    title = (
        f"All blocks replaced, {first['tokens']:,} tokens: CE base {first['ce_base']:.4f} ± {first['ce_base_se']:.4f}"
    )
    yield _metrics_table(title, found, WHOLE)
    for name, result in found.items():
        yield number_table(name, result)
        yield block_table(name, result)
    prompts = first["generation"]["prompts"]
    yield _metrics_table(f"What it writes: greedy continuations of {plural(prompts, 'prompt')}", found, GARBAGE)


def number_table(name: str, result: Mapping[str, Any]) -> Table:
    """Return the CE increase by number of blocks replaced: orders in rows, of drawn ones the mean and the range."""
    by_number = result["by_number"]
    title = f"{name}: {CE_INCREASE.title} (nats) with so many blocks replaced, of drawn orders mean and range"
    table = Table("", *(str(n) for n in by_number["numbers"]), title=title, title_justify="left")
    for order, said in WHOLE_ORDERS.items():
        cells = []
        for point in by_number[order]["points"]:
            low, high = (CE_INCREASE.text(point.get(end, 0)) for end in ("low", "high"))
            value = CE_INCREASE.text(point["ce_increase"])
            cells.append(f"{value} ({low} to {high})" if low != high else value)
        table.add_row(said, *cells)
    return table


def block_table(name: str, result: Mapping[str, Any]) -> Table:
    """Return where the error of a set comes from: blocks in rows."""
    title = f"{name}: by block; on the base model's inputs / on those of the model with all blocks replaced"
    table = Table(title=title, title_justify="left")
    for column in ("block", *(metric.title for metric in (ALONE, WON_BACK, *ON_BASE))):
        table.add_column(column, justify="right")
    for block, row in result["blocks"].items():
        pairs = (f"{a.shown(row)} / {b.shown(row)}" for a, b in zip(ON_BASE, ON_SPLICED, strict=True))
        table.add_row(block, ALONE.with_error(row), WON_BACK.with_error(row), *pairs)
    return table


def _metrics_table(title: str, results: Mapping[str, Any], metrics: Sequence[Metric], head: str = "set") -> Table:
    """Return sets in rows with metrics in columns, with their standard errors."""
    table = Table(head, title=title, title_justify="left")
    for metric in metrics:
        table.add_column(metric.title, justify="right")
    for name, result in results.items():
        table.add_row(name, *(metric.with_error(result) for metric in metrics))
    return table


def tuned_tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield sets of layers before and after their tuning: all blocks at once, then block by block."""
    found, whole = results["results"], (CE_INCREASE, KL, TOP1)
    tokens = next(iter(found.values()))["after"]["tokens"]
    title = f"Before → after tuning, {tokens:,} held-out tokens, all blocks replaced"
    table = Table("set", *(metric.title for metric in whole), title=title, title_justify="left")
    for name, result in found.items():
        table.add_row(name, *_before_and_after(result["before"], result["after"], whole))
    yield table
    for name, result in found.items():
        title = f"{name}: by block, on the base model's inputs, before → after"
        table = Table("block", *(m.title for m in BEFORE_AND_AFTER), title=title, title_justify="left")
        for block, after in result["after"]["blocks"].items():
            table.add_row(block, *_before_and_after(result["before"]["blocks"][block], after, BEFORE_AND_AFTER))
        yield table


def _before_and_after(before: Mapping[str, Any], after: Mapping[str, Any], metrics: Sequence[Metric]) -> Iterator[str]:
    return (f"{metric.shown(before)} → {metric.shown(after)}" for metric in metrics)


def structure_table(results: Mapping[str, Any]) -> Table:
    """Return ranks and the units that lead most often: a row for each layer."""
    table = Table(title="Structure: rank of the units' weights; units that lead", title_justify="left")
    for title in ("layer", *(metric.title for metric in RANKS), "shape", LEADER.title):
        table.add_column(title, justify="left" if title == "layer" else "right")
    for name, result in results["results"].items():
        leader, shape = result["leader"], " x ".join(map(str, result["shape"]))
        ranks = (metric.shown(result) for metric in RANKS)
        table.add_row(name, *ranks, shape, f"{LEADER.text(leader['share'])} #{leader['unit']}")
    return table


def leaders_table(name: str, result: Mapping[str, Any]) -> Table:
    """Return the three units that lead at each prompt, with activation and firing rate: prompts in rows."""
    title = f"{name}: units that lead at the last token, activation there (firing rate)"
    table = Table("prompt", title=title, title_justify="left")
    for title in PLACES[:3]:
        table.add_column(title, no_wrap=True)
    for row in result["leading"]:
        units = (f"#{unit['unit']} {unit['activation']:.3g} ({unit['rate']:.1%})" for unit in row["units"][:3])
        table.add_row(row["prompt"], *units)
    return table


def tokens_table(name: str, result: Mapping[str, Any], prompts: int = 2) -> Table:
    """Return the strongest units of each token of the first prompts: tokens in rows.

    Args:
        name: of the layer.
        result: what ``mxd structure`` found of it.
        prompts: how many prompts are shown.
    """
    table = Table("token", *PLACES, title=f"{name}: strongest units, token by token", title_justify="left")
    for row in result["leading"][:prompts]:
        for token in row["tokens"]:
            table.add_row(_visible(token["token"]), *(f"#{unit}" for unit in token["units"]))
        table.add_section()
    return table


def masking_table(name: str, result: Mapping[str, Any]) -> Table:
    """Return the loss changes from masking each domain's units: on that domain, and averaged over the others."""
    title = f"{name}: change of the loss (nats per token, ± s.e.) when the units of a domain are masked"
    columns = ("domain", "units", "loss", *(metric.title for metric in MASKING))
    table = Table(*columns, title=title, title_justify="left")
    for row, domain in enumerate(result["domains"]):
        cells = [f"{result['units'][domain]:,}", f"{result['loss'][row]:.4f}"]
        for key in ("matrix", "control"):
            others = [change for column, change in enumerate(result[key][row]) if column != row]
            target = _changes(result[key][row][row : row + 1], result[f"{key}_se"][row][row : row + 1])
            cells += [*target, OTHERS.text(sum(others) / len(others))]
        table.add_row(domain, *cells)
    table.add_row("mean", "", "", *(metric.text(result[metric.key]) for metric in MASKING))
    return table


def explained_lines(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return what a model says of units, and what judges made of it, as lines."""
    lines = [f"{name}: {plural(len(result['units']), 'unit')} explained, {result['left_out']} left out"]
    for unit, one in result["units"].items():
        lines += [
            f"  unit {unit}, on {' '.join(map(repr, one['tokens']))}",
            *(f"    {e!r}" for e in one["explanations"]),
        ]
    for judge, one in result.get("judges", {}).items():
        found = {"judges": {"*": one}}
        said = ", ".join(f"{metric.title} {metric.with_error(found)}" for metric in EXPLAINING)
        lines.append(f"  {judge}: {said} {one['reasons'] or ''}".rstrip())
    return lines


def purging_table(name: str, result: Mapping[str, Any]) -> Table:
    """Return the loss changes from purging: thresholds in rows, with the number of units that reach them by chance."""
    title = (
        f"{name}: change of the loss (nats per token, ± s.e.) when units that go with the score are masked; "
        f"low scores: up to {result['mean_score']:g}"
    )
    table = Table(*(metric.title for metric in PURGING), title=title, title_justify="left")
    for row, threshold in enumerate(result["thresholds"]):
        cells = [c for key in ("changes", "control") for c in _changes(result[key][row], result[f"{key}_se"][row])]
        counts = [metric.text(result[metric.key][row]) for metric in (PURGED, PURGED_SHARE, BY_CHANCE)]
        table.add_row(THRESHOLD.text(threshold), *counts, *cells)
    return table


def toxicity_table(name: str, result: Mapping[str, Any]) -> Table:
    """Return what is written under each mask, and by the base model, the splice and with random units off."""
    found = result["toxicity"]
    of = f"{found['prompts']['toxic']:,} toxic and {found['prompts']['other']:,} other prompts"
    title = f"{name}: {of}, {found['samples']} samples each, scored by {found['scorer']}"
    table = Table("units off", PURGED.title, *(metric.title for metric in TOXIC), title=title, title_justify="left")
    ways = [("base model", "", "base"), ("none", "", "unmasked")]
    for row, threshold in enumerate(result["thresholds"]):
        count = PURGED.text(result["units"][row])
        said = THRESHOLD.text(threshold)
        ways += [(f"correlation {said}", count, f"masked.{row}"), ("as many at random", count, f"control.{row}")]
    for said, count, key in ways:
        cells = []
        for metric in TOXIC:
            path, error = (part.replace("masked.*", key) for part in (metric.key, metric.error))
            value = _at(result, path)
            text = "-" if value is None else metric.text(value)
            spread = _at(result, error) if error else None
            cells.append(f"{text} ± {metric.text(spread)}" if spread is not None and math.isfinite(spread) else text)
        table.add_row(said, count, *cells)
    return table


def under_mask_tables(name: str, result: Mapping[str, Any]) -> Iterator[Table]:
    """Yield what else was measured under each mask: what is left of the model, and accuracies and texts by domain."""
    masks = result.get("domains") or [THRESHOLD.text(threshold) for threshold in result["thresholds"]]
    shown = [metric for metric in BY_MASK if _by_mask(result, metric, 0) is not None]
    if shown:
        title = f"{name}: what is left under each mask"
        table = Table("mask", *(metric.title for metric in shown), title=title, title_justify="left")
        for row, mask in enumerate(masks):
            values = [_by_mask(result, metric, row) for metric in shown]
            cells = ("-" if value is None else metric.text(value) for value, metric in zip(values, shown, strict=True))
            table.add_row(mask, *cells)
        yield table
    for part, said, metric in (
        ("tasks", "change of the accuracy on each domain (columns)", TASKS_OWN),
        ("generation", "tokens written as without the mask, of each domain's texts (columns)", KEPT_OWN),
    ):
        if (found := result.get(part)) is not None:
            yield _matrix_table(f"{name}: {said} when one (rows) is masked, and of random units", masks, found, metric)


def _matrix_table(title: str, masks: Sequence[str], found: Mapping[str, Any], metric: Metric) -> Table:
    table = Table("mask", *found["columns"], "own, random", title=title, title_justify="left")
    for row, mask in enumerate(masks):
        cells = [metric.text(value) for value in found["matrix"][row]]
        own = found["columns"].index(mask) if mask in found["columns"] else None
        table.add_row(mask, *cells, "" if own is None else metric.text(found["control"][row][own]))
    return table


def _by_mask(result: Mapping[str, Any], metric: Metric, mask: int) -> float | None:
    """Return a number that each mask has; one without a place for the mask is the same for all."""
    return _at(result, metric.key.replace("*", str(mask)))


def _at(result: Mapping[str, Any], path: str) -> float | None:
    """Return the number at the end of a path of names and places in lists; ``None`` where there is none."""
    value: Any = result
    for key in path.split("."):
        if value is None:
            return None
        value = value[int(key)] if isinstance(value, list) else value.get(key)
    return None if value is None else float(value)


DROPPED = 8
"""Units whose classes are shown."""


def ablation_table(results: Mapping[str, Any]) -> Table:
    """Return how polysemantic dropped units are, beside random coefficients: layers in rows."""
    first = next(iter(results.values()))
    said = "the class of a text, by a probe" if first["target"] == "probe" else "the next tokens of a class of text"
    return _metrics_table(f"What is lost without a unit; accuracy: {said}", results, ABLATION, "layer")


def dropped_table(name: str, result: Mapping[str, Any]) -> Table:
    """Return the units that matter most for a class, and for which classes."""
    title = f"{name}: units without which most is lost (in brackets: not beyond chance)"
    table = Table("unit", title=title, title_justify="left")
    for column in (RATE.title, "p", "classes, with the share of their accuracy that is lost"):
        table.add_column(column, justify="left" if "classes" in column else "right")
    drops = {unit: [math.nan if d is None else d for d in found["d"]] for unit, found in result["units"].items()}
    for unit in most_lost(drops)[:DROPPED]:
        dropped = result["units"][unit]
        p = "-" if dropped["p"] is None else POLYSEMANTICITY.text(dropped["p"])
        name = f"#{unit}" if dropped["beyond_chance"] else f"(#{unit})"
        table.add_row(name, RATE.text(dropped["rate"]), p, most_affected(result["classes"], drops[unit]))
    return table


def subset_tables(name: str, result: Mapping[str, Any]) -> Iterator[Table]:
    """Yield what a layer does with a share of its active units, and how fast it decodes them."""
    texts = plural(result["texts"], "text")
    title = f"{name}: with a share of its active units, {texts}; beside as many random active units"
    kept, *metrics = SUBSET[: SUBSET.index(RANDOM_NMSE)]  # the file and the page have the rest
    head = f"chosen at: {kept.title}"
    table = Table(head, *(metric.title for metric in metrics), title=title, title_justify="left")
    for mode, found in result["modes"].items():
        for point in found["points"]:
            said = f"{SUBSET_MODES[mode]}: {kept.with_error(point)}"
            table.add_row(said, *(metric.with_error(point) for metric in metrics))
        unchanged = (metric.with_error(found["full"]) for metric in metrics)
        table.add_row(f"{SUBSET_MODES[mode]}: unchanged", *unchanged)
    yield table
    if result["decoding"]:
        table = Table("k", "ms", title="Time to decode a batch", title_justify="left")
        for row in result["decoding"]:
            k = "as it is" if row["k"] is None else f"{row['k']:,}"
            table.add_row(k, f"{row['ms']:.2f} ± {row['ms_sd']:.2f}")
        yield table


def _changes(values: Sequence[float], errors: Sequence[float]) -> list[str]:
    return [f"{OWN.text(value)} ± {shown('{:.4f}', error)}" for value, error in zip(values, errors, strict=True)]


def _visible(token: str) -> str:
    return "".join(c if c.isprintable() else "↵" if c == "\n" else "·" for c in token)


def terminal_diff(example: Mapping[str, Any]) -> Text:
    """Return a prompt with both continuations: the agreeing beginning in green, the rest red and underlined."""
    base, spliced = example["base_tokens"], example["spliced_tokens"]
    agreed = next((n for n, (a, b) in enumerate(zip(base, spliced, strict=True)) if a != b), len(base))
    below = "\n" + " " * LABEL

    def written(*tokens: str) -> str:
        return "".join(tokens).replace("\n", below)

    text = Text(f"prompt   {written(example['prompt_text'])}\n")
    text.append(f"base     {written(*base)}\n")
    text.append("spliced  ")
    text.append(written(*spliced[:agreed]), style="green")
    text.append(written(*spliced[agreed:]), style="red underline")  # the line tells it where there is no colour
    return text.append(f"{below}{agreed} of {len(base)} tokens agree\n")


def rewrite_tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield what each way of rewriting does, layer by layer; what is gained over blind; and how well cells are told."""
    for name, result in results.items():
        target = result["cells"][result["target"]]
        texts = plural(target["measured"], "text")
        title = f"{name}: outputs rewritten for {target['label']}, {target['group']}; {texts} of it"
        yield _metrics_table(title, {WAYS[way]: found for way, found in result["ways"].items()}, REWRITTEN, "outputs")
        cells = (f"{cell['label']}, {cell['group']}" for cell in result["cells"])
        table = Table("outputs", "strength", *cells, title="accuracy on each cell", title_justify="left")
        for way, found in result["ways"].items():
            strengths = ", ".join(f"{strength:g}" for strength in found.get("strengths", []))
            pairs = zip(found["cells"], found["cells_se"], strict=True)
            table.add_row(WAYS[way], strengths, *(f"{accuracy:.1%} ± {error:.1%}" for accuracy, error in pairs))
        yield table
    yield _metrics_table("Rewrite scores, and what they gain over the best blind rewriting", results, REWRITE, "layer")
    token = next(iter(results.values()))["token"]
    said = f"the token is {token['text']!r}, {'present' if token['present'] else 'absent'}"
    yield _metrics_table(f"How well texts of the target are told from others; {said}", results, SEPARATION, "layer")

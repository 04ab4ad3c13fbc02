"""Results on a terminal: contexts of units, ranks and leads, what masking costs, continuations side by side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from mxd.metrics import (
    ALONE,
    BEFORE_AND_AFTER,
    BY_CHANCE,
    CE_INCREASE,
    DEAD_UNITS,
    DEAD_UNITS_SHARE,
    GARBAGE,
    KL,
    LEADER,
    MASKING,
    NORMALIZED_RANK,
    ON_BASE,
    ON_SPLICED,
    OTHERS,
    OWN,
    PURGED,
    PURGED_SHARE,
    PURGING,
    RANKED,
    RATE,
    THRESHOLD,
    TOP1,
    WHOLE,
    WHOLE_ORDERS,
    WON_BACK,
    Metric,
)


def unit_lines(name: str, result: Mapping[str, Any]) -> Iterator[Text]:
    """Yield a layer's name, a line about all its units, and for each shown unit a line with its strongest context."""
    yield Text(name, style="bold")
    shared = ", ".join(f"{frequent['unit']} ({frequent['rate']:.0%})" for frequent in result["shared"][:8]) or "none"
    count = len(result["rates"])
    yield Text(
        f"{count:,} units over {result['tokens']:,} tokens; {DEAD_UNITS.title}: "
        f"{DEAD_UNITS.form.format(result['dead'])} ({DEAD_UNITS_SHARE.form.format(result['dead'] / count)}); "
        f"active at more than {result['shared_above']:.0%} of tokens: {shared}"
    )
    for unit, page in result["units"].items():
        rate = f"{RATE.title} {RATE.form.format(page['rate']):>8}"
        line = Text(f"{unit:>7}  {rate}  mean {page['mean']:7.3g}  max {page['max']:7.3g}  ")
        if page["intervals"]:
            context = page["intervals"][0]["contexts"][0]
            for position, token in enumerate(context["tokens"]):
                line.append(_visible(token), style="bold reverse" if position == context["at"] else "")
        yield line


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
    yield _metrics_table(f"What it writes: greedy continuations of {prompts} prompts", found, GARBAGE)


def number_table(name: str, result: Mapping[str, Any]) -> Table:
    """Return the CE increase by number of blocks replaced: orders in rows, of drawn ones the mean and the range."""
    by_number = result["by_number"]
    title = f"{name}: {CE_INCREASE.title} (nats) with so many blocks replaced, of drawn orders mean and range"
    table = Table("", *(str(n) for n in by_number["numbers"]), title=title, title_justify="left")
    for order, said in WHOLE_ORDERS.items():
        cells = []
        for point in by_number[order]["points"]:
            low, high = (CE_INCREASE.form.format(point.get(end, 0)) for end in ("low", "high"))
            value = CE_INCREASE.form.format(point["ce_increase"])
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


def _metrics_table(title: str, results: Mapping[str, Any], metrics: Sequence[Metric]) -> Table:
    """Return sets in rows with metrics in columns, with their standard errors."""
    table = Table("set", title=title, title_justify="left")
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
    for title in ("layer", NORMALIZED_RANK.title, RANKED.title, "shape", LEADER.title):
        table.add_column(title, justify="left" if title == "layer" else "right")
    for name, result in results["results"].items():
        leader, shape = result["leader"], " x ".join(map(str, result["shape"]))
        ranks = NORMALIZED_RANK.form.format(result["normalized_rank"]), RANKED.form.format(result["experts"])
        table.add_row(name, *ranks, shape, f"{LEADER.form.format(leader['share'])} #{leader['unit']}")
    return table


def leaders_table(name: str, result: Mapping[str, Any]) -> Table:
    """Return the units that lead at each prompt, with activation and firing rate: prompts in rows."""
    title = f"{name}: units that lead at the last token, activation there (firing rate)"
    table = Table("prompt", title=title, title_justify="left")
    for title in ("first", "second", "third"):
        table.add_column(title, no_wrap=True)
    for row in result["leading"]:
        units = (f"#{unit['unit']} {unit['activation']:.3g} ({unit['rate']:.1%})" for unit in row["units"])
        table.add_row(row["prompt"], *units)
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
            cells += [*target, OTHERS.form.format(sum(others) / len(others))]
        table.add_row(domain, *cells)
    table.add_row("mean", "", "", *(metric.form.format(result[metric.key]) for metric in MASKING))
    return table


def purging_table(name: str, result: Mapping[str, Any]) -> Table:
    """Return the loss changes from purging: thresholds in rows, with the number of units that reach them by chance."""
    title = (
        f"{name}: change of the loss (nats per token, ± s.e.) when units that go with the score are masked; "
        f"low scores: up to {result['mean_score']:g}"
    )
    table = Table(*(metric.title for metric in PURGING), title=title, title_justify="left")
    for row, threshold in enumerate(result["thresholds"]):
        cells = [c for key in ("changes", "control") for c in _changes(result[key][row], result[f"{key}_se"][row])]
        counts = [metric.form.format(result[metric.key][row]) for metric in (PURGED, PURGED_SHARE, BY_CHANCE)]
        table.add_row(THRESHOLD.form.format(threshold), *counts, *cells)
    return table


def _changes(values: Sequence[float], errors: Sequence[float]) -> list[str]:
    return [f"{OWN.form.format(value)} ± {error:.4f}" for value, error in zip(values, errors, strict=True)]


def _visible(token: str) -> str:
    return "".join(c if c.isprintable() else "↵" if c == "\n" else "·" for c in token)


def terminal_diff(example: Mapping[str, Any]) -> Text:
    """Return a prompt with both continuations: the agreeing beginning in green, the rest in red."""
    base, spliced = example["base_tokens"], example["spliced_tokens"]
    agreed = next((n for n, (a, b) in enumerate(zip(base, spliced, strict=True)) if a != b), len(base))
    text = Text(f"prompt   {example['prompt_text']}\n")
    text.append(f"base     {''.join(base)}\n")
    text.append("spliced  ")
    text.append("".join(spliced[:agreed]), style="green")
    text.append("".join(spliced[agreed:]), style="red")
    return text.append(f"\n         {agreed} of {len(base)} tokens agree\n")

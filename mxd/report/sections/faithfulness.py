"""Is it faithful, and does it decompose? The figures of both, and every number of them in tables."""

from collections.abc import Sequence
from dataclasses import replace

from mxd.metrics.conventions import CONVENTIONS
from mxd.metrics.faithful import COST, DECOMPOSITION, FAITHFULNESS, FIXED, NMSE, ROUTED, SHARED
from mxd.metrics.metric import Metric
from mxd.report.parts import Cell, Column, Part, Section, Table, column, number, with_error
from mxd.report.replacements import Replacement, Results
from mxd.report.run import Run
from mxd.report.source import Node
from mxd.report.tradeoffs import figures, value

TABLES = (
    ("Is it faithful? Every splice.", FAITHFULNESS),
    (
        f"Does it decompose? A low error with “{ROUTED.title}” near 0, or “{SHARED.title}” near 1, is a dense MLP in "
        f"disguise; one with “{FIXED.title}” near {NMSE.title} is a transcoder, or one in disguise.",
        DECOMPOSITION,
    ),
    ("What does it cost?", COST),
)


def section(run: Run) -> Section | None:
    """Return the faithfulness of every splice; ``None`` where nothing was evaluated."""
    results = run.results("faithfulness")
    if not results:
        return None
    parts: list[Part] = [
        *figures(results, run.results("structure")),
        *(_table(results, caption, metrics) for caption, metrics in TABLES),
        *_conventions(results),
        *_tasks(run),
    ]
    first, document = results[0][1], run.documents["faithfulness"][0]
    data = document["data"]
    text = f"{data['source'].text()}, {data['split'].text()}"
    lead = (
        f"Each replacement is spliced into {document['model'].text()}, at every position, and measured on "
        f"{first['tokens'].number():,.0f} held-out tokens ({text}). The base model's cross-entropy is "
        f"{first['ce_base'].number():.4f} ± {first['ce_base_se'].number():.4f} nats per token{_ablated(results)}."
    )
    return Section("faithfulness", "Faithfulness", lead, parts)


def _ablated(results: Results) -> str:
    by_block = {}
    for replacement, result in results:
        if replacement.layer is not None and result.get("ce_zero") is not None:
            zero, mean = result["ce_zero"].number(), result["ce_mean"].number()
            by_block[replacement.layer] = f"block {replacement.layer}: zero-ablated {zero:.4f}, mean-ablated {mean:.4f}"
    return "; " + "; ".join(by_block.values()) if by_block else ""


def _table(results: Results, caption: str, metrics: Sequence[Metric]) -> Table:
    rows = []
    for replacement, result in results:
        head = replacement.label if replacement.layer is not None else _together(replacement, result)
        rows.append([Cell(head), *(number(value(result, metric.key), metric.form) for metric in metrics)])
    return Table(caption, [Column("splice"), *map(column, metrics)], rows, legend=True)


def _conventions(results: Results) -> list[Part]:
    """Return the numbers by other tools' definitions, folded away; none where they were not measured."""
    if not any(result.get("conventions") for _, result in results):
        return []
    caption = (
        "Not comparable with one another: tools differ in what the variance is about, in which positions count and in "
        "what is ablated. Each is taken over the whole text at once, where the tools average over their batches."
    )
    title = "The same as other tools define it: SAELens, SAEBench, sparsify, dictionary_learning, Gemma Scope"
    return [replace(_table(results, caption, CONVENTIONS), folded=title)]


def _together(replacement: Replacement, result: Node) -> str:
    """Return the name of a splice of several layers, or of a layer from elsewhere."""
    members = list(result["replacements"])
    several = f"{len(members)} layers at once" if len(members) > 1 else ""
    return f"{replacement.name}: {several}" if several else replacement.name


def _tasks(run: Run) -> list[Part]:
    """Scores of lm-eval for the base model and each splice."""
    parts: list[Part] = []
    for document in run.documents["faithfulness"]:
        scores = document.get("lm_eval")
        if scores is None:
            continue
        columns = {"base model": scores["base"]}
        columns |= {run.replacement(name).label: node for name, node in scores["spliced"].items()}
        rows = []
        for task, metrics in scores["base"].items():
            for metric in (name for name, _ in metrics.items() if "," in name and "_stderr," not in name):
                cells = [_score(column[task], metric) for column in columns.values()]
                rows.append([Cell(f"{task}: {metric.removesuffix(',none')}"), *cells])
        caption = f"Tasks of lm-eval {scores['version'].text()}, with standard errors."
        parts.append(Table(caption, [Column("task"), *map(Column, columns)], rows))
    return parts


def _score(metrics: Node, metric: str) -> Cell:
    return with_error(number(metrics[metric], "{:.4f}"), metrics.get(metric.replace(",", "_stderr,")))

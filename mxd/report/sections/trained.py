"""What was trained: the layers, their base model and text, the recipe, and the whole configuration."""

from collections.abc import Callable
from typing import Any

from mxd.common.numbers import plural
from mxd.report.parts import Cell, Column, Facts, Part, Section, Source, Table, Text
from mxd.report.replacements import Layer
from mxd.report.run import Run

COLUMNS = ("layer", "method", "block", "sparsity", "units", "parameters", "tokens trained", "seed")


def section(run: Run) -> Section | None:
    """Return what was trained; ``None`` where the folder holds no layers."""
    if not run.layers:
        return None
    shared: dict[str, Cell] = {}
    differing: list[str] = []
    for term, of in FACTS.items():
        values = {of(layer) for layer in run.layers} - {""}
        if len(values) == 1:
            shared[term] = Cell(values.pop(), f"{run.layers[0].name}/config.json#/provenance")
        elif values:
            differing.append(term)
    plain, versions = ([fact for fact in shared.items() if (fact[0] in VERSIONS) == folded] for folded in (False, True))
    parts: list[Part] = [Facts(plain), _table(run), *([Facts(versions, "Revision and versions")] if versions else [])]
    if differing:
        parts.append(Text(f"The layers differ in: {', '.join(differing)}; each layer's config.json says."))
    if run.config:
        parts.append(Source("config.yaml, whole", run.config))
    models = sorted({layer.provenance.model for layer in run.layers})
    methods = dict.fromkeys(layer.config.label for layer in _ordered(run))
    numbers = sorted({layer.provenance.block for layer in run.layers})
    many = "s" if len(numbers) > 1 else ""
    lead = (
        f"{plural(len(run.layers), 'replacement')} ({', '.join(methods)}) for the MLP{many} of block{many} "
        f"{', '.join(map(str, numbers))} of {', '.join(models)}. The base model stays frozen; a replacement learns to "
        "give the MLP's output from its input."
    )
    return Section("trained", "What was trained", lead, parts)


def _table(run: Run) -> Table:
    rows = []
    for layer in _ordered(run):
        where, provenance = f"{layer.name}/config.json#", layer.provenance
        rows.append(
            [
                Cell(layer.name),
                Cell(layer.config.label, f"{where}/layer/method"),
                Cell(str(provenance.block), f"{where}/provenance/block"),
                Cell(layer.config.sparsity.slug, f"{where}/layer/sparsity"),
                Cell(f"{layer.config.num_units:,}", f"{where}/layer/num_units"),
                Cell(f"{layer.config.num_params:,}"),
                Cell(f"{provenance.tokens:,}", f"{where}/provenance/tokens"),
                Cell(str(provenance.seed), f"{where}/provenance/seed"),
            ]
        )
    return Table("The layers of the run.", [Column(title) for title in COLUMNS], rows)


def _ordered(run: Run) -> list[Layer]:
    return sorted(run.layers, key=lambda layer: run.replacements[layer.name].order)


def _text(layer: Layer) -> str:
    data = layer.provenance.data
    parts = [str(data.get("source", "")), f"split {data['split']}" if "split" in data else ""]
    parts += [f"contexts of {data['context']} tokens" if "context" in data else ""]
    return ", ".join(filter(None, parts))


def _recipe(layer: Layer) -> str:
    training: dict[str, Any] = layer.provenance.training
    settings = training.get("settings") or {}
    facts = {
        "": training.get("recipe"),
        "steps": training.get("steps"),
        "tokens a step": training.get("batch_tokens"),
        "learning rate": settings.get("lr"),
        "warm-up steps": settings.get("warmup_steps"),
    }
    return ", ".join(f"{name} {_said(value)}".strip() for name, value in facts.items() if value is not None)


def _said(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _excluded(layer: Layer) -> str:
    ids = layer.provenance.excluded_ids
    return f"token ids {', '.join(map(str, ids))}: left out of training" if ids else ""


FACTS: dict[str, Callable[[Layer], str]] = {
    "base model": lambda layer: layer.provenance.model,
    "revision": lambda layer: layer.provenance.revision or "not known (a bundled or local model)",
    "its dtype": lambda layer: layer.provenance.recorded_in,
    "text": _text,
    "tokens": lambda layer: f"{layer.provenance.tokens:,}",
    "recipe": _recipe,
    "seed": lambda layer: str(layer.provenance.seed),
    "excluded": _excluded,
    "layers read": lambda layer: layer.provenance.input_convention,
    "versions": lambda layer: ", ".join(f"{name} {v}" for name, v in layer.provenance.versions.items()),
}
"""Term -> what the provenance says about it."""
VERSIONS = ("revision", "its dtype", "versions")
"""Terms that are folded away."""

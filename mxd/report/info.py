"""Checkpoints on a terminal: what layers are, and what they were trained on."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from mxd.artifacts.provenance import Provenance
from mxd.common.numbers import plural
from mxd.layers.config import ReplacementConfig


def info_tables(where: str, layers: Mapping[str, tuple[ReplacementConfig, Provenance]]) -> Iterator[Table]:
    """Yield a table with a row for each layer, then base model and training, once for all layers that share them.

    Args:
        where: the folder or reference that holds the layers.
        layers: name -> config and provenance.
    """
    table = Table("layer", title=f"{where}: {plural(len(layers), 'layer')}", title_justify="left")
    for title in ("method", "block", "sparsity", "units", "parameters", "unfactorised"):
        table.add_column(title, justify="right")
    shared: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, (config, origin) in layers.items():
        sizes = (config.num_units, config.num_params, config.unfactorised_params)
        counts = ("-" if size is None else f"{size:,}" for size in sizes)
        table.add_row(name, config.label, str(origin.block), config.sparsity.slug, *counts)
        shared.setdefault(tuple(_facts(origin).items()), []).append(name)
    yield table
    for facts, names in shared.items():
        title = "Base model and training" if len(shared) == 1 else f"Base model and training: {', '.join(names)}"
        table = Table("what", "value", title=title, title_justify="left")
        for fact, value in facts:
            table.add_row(fact, value)
        yield table


def _facts(origin: Provenance) -> dict[str, str]:
    """Return what is worth reading of a provenance; ``config.json`` holds all of it."""
    data, training, settings = origin.data, origin.training, origin.training.get("settings")
    recipe = settings if isinstance(settings, dict) else {}
    facts = {
        "base model": origin.model,
        "revision": origin.revision,
        "layers read": origin.input_convention,
        "text": data.get("source"),
        "split": data.get("split"),
        "tokens of a context": data.get("context"),
        "tokens left out": ", ".join(map(str, origin.excluded_ids)),
        "tokens trained on": f"{origin.tokens:,}",
        "trained with blocks replaced": ", ".join(map(str, origin.below)),
        "recipe": training.get("recipe"),
        "settings": ", ".join(f"{name} {value}" for name, value in recipe.items()),
        "steps": training.get("steps"),
        "seed": origin.seed,
        "times tuned together": len(origin.tuning) or None,
        "hash of the run's config": origin.config_hash,
        "versions": ", ".join(f"{name} {version}" for name, version in origin.versions.items()),
    }
    return {fact: str(value) for fact, value in facts.items() if value not in (None, "")}

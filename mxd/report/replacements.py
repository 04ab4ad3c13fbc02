"""What tables and figures call the replacements of a run: method, what varies, K, block."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxd.artifacts.provenance import Provenance
from mxd.layers import ReplacementConfig
from mxd.layers.sparsity import AlwaysConfig
from mxd.report.figures import STYLES
from mxd.report.source import Node

SWEPT = {"num_units", "sparsity.k", "sparsity.l0", "sparsity.l1"}
"""Fields that vary along one line of a figure; all others distinguish lines."""

USUAL_K = 32
"""The K at which the paper looks at units; where there are several, figures of units show the nearest."""


@dataclass(frozen=True)
class Layer:
    """A trained layer, without its tensors."""

    name: str
    config: ReplacementConfig
    provenance: Provenance
    path: Path


@dataclass(frozen=True)
class Replacement:
    """What was measured under one name, as tables and figures call it."""

    name: str
    method: str
    """The method's short name, or the name itself for what is not a layer of this run."""
    variant: str = ""
    """What distinguishes it from others of its method: ``relu``, ``rank share 0.25``."""
    k: int | None = None
    budget: str = ""
    """Its sparsity: ``k32``, ``l1-0.001``."""
    layer: int | None = None
    where: str = ""
    """Its block, where the run has layers of several."""
    path: Path | None = None

    @property
    def floor(self) -> bool:
        """Whether nothing is chosen: it has no place on an axis of units, and is a level to compare with."""
        return self.budget == AlwaysConfig().slug

    @property
    def line(self) -> str:
        """Its line in a figure: the method, and the variant where there are several."""
        return f"{self.method} ({self.variant})" if self.variant else self.method

    @property
    def label(self) -> str:
        """Its name where all replacements of a run stand side by side."""
        return ", ".join(filter(None, [self.line, self.budget, self.where]))

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key of results: the run's own first, then by block, method, variant and K."""
        known = list(STYLES)
        method = known.index(self.method) if self.method in known else len(known)
        layer = self.layer if self.layer is not None else math.inf
        return self.path is None, layer, method, self.method, self.variant, self.k or math.inf, self.name


Results = Sequence[tuple[Replacement, Node]]
"""Replacements, each with its results."""


def own_replacements(layers: Sequence[Layer]) -> dict[str, Replacement]:
    """Return how a run's own layers are named, by their folders."""
    several = len({layer.provenance.block for layer in layers}) > 1
    return {
        layer.name: Replacement(
            name=layer.name,
            method=layer.config.label,
            variant=_variant(layer, [other for other in layers if _alike(other, layer)]),
            k=layer.config.sparsity.shown_k,
            budget=layer.config.sparsity.slug,
            layer=layer.provenance.block,
            where=f"block {layer.provenance.block}" if several else "",
            path=layer.path,
        )
        for layer in layers
    }


def other_replacement(name: str, described: Node | None) -> Replacement:
    """Return how something is named that is no layer of this run.

    Args:
        name: its name in the results.
        described: what the results say about it (``mxd.evaluation.checkpoints.describe``): of one layer, or a list.
    """
    if described is not None and isinstance(described.value, list):
        described = described[0] if len(described.value) == 1 else None
    if described is None:
        return Replacement(name, name)
    k, layer = described["k"].number(), int(described["block"].number())
    return Replacement(
        name=name,
        method=described["method"].text(),
        variant=name.rpartition("/")[0],
        k=int(k) if math.isfinite(k) else None,
        budget=described["sparsity"].text(),
        layer=layer,
        where=f"block {layer}",
    )


def usual(results: Results) -> list[tuple[Replacement, Node]]:
    """Return the result whose K is nearest to ``USUAL_K`` for each block and line, and everything without a K."""
    nearest: dict[tuple[int | None, str], float] = {}
    for replacement, _ in results:
        key = replacement.layer, replacement.line
        nearest[key] = min(nearest.get(key, math.inf), _distance(replacement))
    return [(r, node) for r, node in results if _distance(r) == nearest[r.layer, r.line]]


def _distance(replacement: Replacement) -> float:
    return 0.0 if replacement.k is None else abs(math.log(replacement.k / USUAL_K))


def _alike(layer: Layer, other: Layer) -> bool:
    return (layer.config.label, layer.provenance.block) == (other.config.label, other.provenance.block)


def _variant(layer: Layer, group: Iterable[Layer]) -> str:
    """Return the fields that distinguish a layer from the others of its method and block, without redundant ones."""
    flat = {other.name: _flat(other.config) for other in group}
    keys = dict.fromkeys(key for fields in flat.values() for key in fields if key not in SWEPT)
    chosen: list[str] = []
    for key in keys:
        if _classes(flat, [*chosen, key]) > _classes(flat, chosen):
            chosen.append(key)
    return ", ".join(_said(key, flat[layer.name].get(key)) for key in chosen)


def _flat(config: ReplacementConfig) -> dict[str, Any]:
    fields = config.model_dump()
    sparsity = fields.pop("sparsity")
    return {f"sparsity.{key}": value for key, value in sparsity.items()} | fields


def _classes(flat: dict[str, dict[str, Any]], keys: Sequence[str]) -> int:
    return len({tuple(str(fields.get(key)) for key in keys) for fields in flat.values()})


def _said(key: str, value: Any) -> str:
    name = key.rpartition(".")[2].replace("_", " ")
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return value.replace("_", " ") if isinstance(value, str) else f"{name} {value}"

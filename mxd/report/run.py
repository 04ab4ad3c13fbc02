"""What is in a run's folder: trained layers, training metrics, and the results of whatever was evaluated."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mxd.artifacts.folders import find_layers, read_layer
from mxd.artifacts.provenance import Provenance
from mxd.common.errors import MxdError
from mxd.common.parsing import parse_json
from mxd.layers import ReplacementConfig
from mxd.report.figures import STYLES
from mxd.report.source import Node, read_document

KINDS = ("faithfulness", "generation", "structure", "units", "probing", "steering", "masking", "purging")
"""Evaluations that a report knows: each is ``KIND.json``, or ``KIND-together.json`` for several layers at once."""

SWEPT = {"num_units", "sparsity.k", "sparsity.l1"}
"""Fields along which one line of a figure runs; all others tell lines apart."""

USUAL_K = 32
"""The K at which the paper looks at units; of several, figures of units show the nearest."""


@dataclass(frozen=True)
class Replacement:
    """What was measured under one name, as tables and figures call it."""

    name: str
    method: str
    """The method's short name, or the name itself for what is not a layer of this run."""
    variant: str = ""
    """What tells it from others of its method: ``relu``, ``rank share 0.25``."""
    k: int | None = None
    budget: str = ""
    """Its sparsity: ``k32``, ``l1-0.001``."""
    layer: int | None = None
    where: str = ""
    """Its block, where the run has layers of several."""
    path: Path | None = None

    @property
    def line(self) -> str:
        """Its line in a figure: the method, and the variant where there are several."""
        return f"{self.method} ({self.variant})" if self.variant else self.method

    @property
    def label(self) -> str:
        """What it is called where all of a run stand side by side."""
        return ", ".join(filter(None, [self.line, self.budget, self.where]))


Found = Sequence[tuple[Replacement, Node]]
"""What was measured, beside what was measured of it."""


@dataclass(frozen=True)
class Layer:
    """A trained layer, without its tensors."""

    name: str
    config: ReplacementConfig
    provenance: Provenance
    path: Path


@dataclass(frozen=True)
class File:
    """A file that the report was made from."""

    name: str
    size: int
    sha256: str


@dataclass
class Run:
    """A run's folder."""

    folder: Path
    layers: list[Layer] = field(default_factory=list)
    documents: dict[str, list[Node]] = field(default_factory=dict)
    """Kind -> what was measured: alone, and together."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""
    """The text of ``config.yaml``."""
    files: list[File] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """The kinds of which there are no results."""
        return [kind for kind in KINDS if kind not in self.documents]

    @cached_property
    def replacements(self) -> dict[str, Replacement]:
        """The run's own layers, by the name of their folders."""
        several = len({layer.provenance.layer for layer in self.layers}) > 1
        return {
            layer.name: Replacement(
                name=layer.name,
                method=layer.config.label,
                variant=_variant(layer, [o for o in self.layers if _alike(o, layer)]),
                k=layer.config.sparsity.max_k,
                budget=layer.config.sparsity.slug,
                layer=layer.provenance.layer,
                where=f"block {layer.provenance.layer}" if several else "",
                path=layer.path,
            )
            for layer in self.layers
        }

    def results(self, kind: str) -> list[tuple[Replacement, Node]]:
        """Return a kind's results by layer, method, variant and K; what is not a layer of this run comes last."""
        found = []
        for document in self.documents.get(kind, []):
            members = document.get("replacements")
            for name, result in document["results"].items():
                told = members.get(name) if members else result.get("replacements")
                found.append((self.replacement(name, told), result))
        return sorted(found, key=lambda pair: place(pair[0]))

    def replacement(self, name: str, told: Node | None = None) -> Replacement:
        """Return the replacement of a name in results.

        Args:
            name: ``run/folder`` of a layer of this run, or any other name.
            told: what the results say of it, for a layer of another run.
        """
        own = self.replacements.get(name.rpartition("/")[2])
        if told is not None and isinstance(told.value, list):
            told = told[0] if len(told.value) == 1 else None
        return own or (Replacement(name, name) if told is None else _foreign(name, told))

    def usual(self, found: Sequence[tuple[Replacement, Node]]) -> list[tuple[Replacement, Node]]:
        """Return of each layer and line the result whose K is nearest to 32, and everything without a K."""
        best: dict[tuple[int | None, str], float] = {}
        for replacement, _ in found:
            key = replacement.layer, replacement.line
            best[key] = min(best.get(key, math.inf), _distance(replacement))
        return [(r, node) for r, node in found if _distance(r) == best[r.layer, r.line]]


def read_run(folder: Path) -> Run:
    """Read a run's folder, or one layer's.

    Raises:
        MxdError: nothing to report there, or a damaged file.
    """
    if not folder.is_dir():
        raise MxdError(f"no run at {str(folder)!r}: expected a folder that `mxd train` or `mxd evaluate` wrote.")
    run = Run(folder)
    used: dict[str, Path] = {}
    for path in _layers(folder):
        run.layers.append(Layer(path.resolve().name, *read_layer(path), path))
        used[f"{run.layers[-1].name}/config.json"] = path / "config.json"
    for kind in KINDS:
        names = [name for name in (f"{kind}.json", f"{kind}-together.json") if (folder / name).is_file()]
        if names:
            run.documents[kind] = [read_document(folder / name) for name in names]
        used |= {name: folder / name for name in names}
    metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
    if metrics.is_file():
        run.metrics = _read_metrics(metrics)
        used[metrics.name] = metrics
    if config.is_file():
        run.config = config.read_text(encoding="utf-8", errors="replace")
        used[config.name] = config
    if not used:
        raise MxdError(
            f"nothing to report in {str(folder)!r}: no trained layers and none of {', '.join(KINDS)} (.json)."
        )
    run.files = [_describe(name, path) for name, path in used.items()]
    return run


def _layers(folder: Path) -> list[Path]:
    """Return the folders of the layers; none is no error, since results alone are worth a page."""
    try:
        return find_layers(folder.absolute())  # absolute, so that no folder is taken for a name on the Hub
    except MxdError:
        return []


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = parse_json(line)
            row["replacement"].encode(), float(row["normalized_mse"]), int(row["tokens"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise MxdError(
                f"{path}, line {number}, is not what `mxd train` writes; delete it from there on."
            ) from error
        found.append(row)
    return found


def _describe(name: str, path: Path) -> File:
    data = path.read_bytes()
    return File(name, len(data), hashlib.sha256(data).hexdigest())


def _foreign(name: str, told: Node) -> Replacement:
    """Return a layer of another run, as ``mxd.evaluation.checkpoints.describe`` tells of it."""
    k, layer = told["k"].number(), int(told["layer"].number())
    return Replacement(
        name=name,
        method=told["method"].text(),
        variant=name.rpartition("/")[0],
        k=int(k) if math.isfinite(k) else None,
        budget=told["sparsity"].text(),
        layer=layer,
        where=f"block {layer}",
    )


def place(replacement: Replacement) -> tuple[Any, ...]:
    """Return what results are sorted by."""
    known = list(STYLES)
    method = known.index(replacement.method) if replacement.method in known else len(known)
    layer = replacement.layer if replacement.layer is not None else math.inf
    line = method, replacement.method, replacement.variant
    return replacement.path is None, layer, *line, replacement.k or math.inf, replacement.name


def _distance(replacement: Replacement) -> float:
    return 0.0 if replacement.k is None else abs(math.log(replacement.k / USUAL_K))


def _alike(one: Layer, other: Layer) -> bool:
    return (one.config.label, one.provenance.layer) == (other.config.label, other.provenance.layer)


def _variant(layer: Layer, group: Iterable[Layer]) -> str:
    """Return the fields that tell a layer from the others of its method and block; none that tells nothing new."""
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

"""What is in a run's folder: trained layers, training metrics, and the results of whatever was evaluated."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mxd.artifacts.folders import find_layers, read_layer
from mxd.common.errors import MxdError
from mxd.common.parsing import parse_json
from mxd.metrics import RESULTS
from mxd.metrics.faithful import NMSE
from mxd.report.replacements import Layer, Replacement, other_replacement, own_replacements
from mxd.report.source import Node, read_document


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
    """Kind of results (``RESULTS``) -> its files: layers measured one by one, several together, and those in the
    layers' own folders."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""
    """The text of ``config.yaml``."""
    files: list[File] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """The kinds of results that are not there."""
        return [kind for kind in RESULTS if kind not in self.documents]

    @cached_property
    def replacements(self) -> dict[str, Replacement]:
        """The run's own layers, by the name of their folders."""
        return own_replacements(self.layers)

    def results(self, kind: str) -> list[tuple[Replacement, Node]]:
        """Return the results of a kind by block, method, variant and K; what is not a layer of this run comes last.

        What a file in a layer's own folder says of it stands in place of what other files say, as on its card.
        """
        found: dict[str, tuple[Replacement, Node]] = {}
        for document in self.documents.get(kind, []):
            members = document.get("replacements")
            for name, result in document["results"].items():
                if name not in found or found[name][1].file != f"{name.rpartition('/')[2]}/{kind}.json":
                    described = members.get(name) if members else result.get("replacements")
                    found[name] = self.replacement(name, described), result
        return sorted(found.values(), key=lambda pair: pair[0].order)

    def apart(self, kind: str) -> list[str]:
        """Return the files of a kind in layers' own folders, where the run has one of its own, too."""
        files = [document.file for document in self.documents.get(kind, [])]
        return [file for file in files if "/" in file] if f"{kind}.json" in files else []

    def replacement(self, name: str, described: Node | None = None) -> Replacement:
        """Return the replacement of a name in results.

        Args:
            name: ``run/folder`` of a layer of this run, or any other name.
            described: what the results say of it, for a layer of another run.
        """
        return self.replacements.get(name.rpartition("/")[2]) or other_replacement(name, described)


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
    own = {layer.name: layer.path for layer in run.layers if layer.path.resolve() != folder.resolve()}
    places = {"": folder} | {f"{name}/": path for name, path in own.items()}
    for kind in RESULTS:  # in KIND-together.json several layers were spliced in at once
        names = (f"{kind}.json", f"{kind}-together.json")
        files = {place + name: path / name for place, path in places.items() for name in names}
        files = {name: path for name, path in files.items() if path.is_file()}
        if files:
            run.documents[kind] = [read_document(path, name) for name, path in files.items()]
        used |= files
    metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
    if metrics.is_file():
        run.metrics = _read_metrics(metrics)
        used[metrics.name] = metrics
    if config.is_file():
        run.config = config.read_text(encoding="utf-8", errors="replace")
        used[config.name] = config
    if not used:
        raise MxdError(
            f"nothing to report in {str(folder)!r}: no trained layers and none of {', '.join(RESULTS)} (.json)."
        )
    run.files = [_describe(name, path) for name, path in used.items()]
    return run


def _layers(folder: Path) -> list[Path]:
    """Return the folders of the layers; there may be none, since results alone are worth a page."""
    try:
        return find_layers(folder.absolute())  # absolute: never a name on the Hub
    except MxdError:
        return []


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = parse_json(line)
            row["replacement"].encode(), float(row[NMSE.key]), int(row["tokens"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise MxdError(
                f"{path}, line {number}, is not what `mxd train` writes; delete it from there on."
            ) from error
        rows.append(row)
    return rows


def _describe(name: str, path: Path) -> File:
    data = path.read_bytes()
    return File(name, len(data), hashlib.sha256(data).hexdigest())

"""A run's folder in Python: its trained layers and its training metrics, read when they are asked for."""

import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxd.artifacts.checkpoint import Trained, load_layer, load_layers
from mxd.artifacts.folders import read_layer
from mxd.artifacts.listing import layers_in
from mxd.common.arrays import unpacked
from mxd.common.errors import MxdError, unknown
from mxd.common.files import read_json, regular
from mxd.common.frames import data_frame
from mxd.common.parsing import parse_json
from mxd.metrics import RESULTS

if TYPE_CHECKING:
    import pandas


class Documents(dict[str, Any]):
    """Question -> the document of its answer."""

    def __missing__(self, name: str) -> Any:
        """Refuse a question that was not answered.

        Raises:
            MxdError: always, with those that were.
        """
        raise MxdError(f"{name!r} is not measured yet; there are answers to: {', '.join(self) or 'no question'}.")


class Run(os.PathLike[str]):
    """What `mxd train` left: ``run["block2-mxd-k32"]`` loads a layer, ``run / "config.yaml"`` is a file's path.

    Functions of this package take a run where they take layers.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    @property
    def names(self) -> list[str]:
        """The names of its layers, which are those of their folders."""
        return [folder.name for folder in layers_in(self.folder, "*", str(self.folder))]

    @cached_property
    def layers(self) -> dict[str, Trained]:
        """All its layers, by name."""
        return load_layers(self.folder)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: one for each replacement at every report, oldest first.

        Raises:
            MxdError: the file is missing or damaged.
        """
        file = self.folder / "metrics.jsonl"
        try:
            return [parse_json(line) for line in regular(file).read_bytes().splitlines()]
        except (OSError, ValueError) as error:
            raise MxdError(f"cannot read {file}: {error}") from error

    @property
    def results(self) -> Documents:
        """What was measured of it: question -> the document that its command wrote into the folder.

        Raises:
            MxdError: a file is damaged.
        """
        return Documents({file.stem: read_json(file, unpacked) for file in self._measured()})

    def to_pandas(self) -> "pandas.DataFrame":
        """Return ``metrics`` as a data frame.

        Raises:
            MxdError: pandas is not installed, or as ``metrics``.
        """
        return data_frame(self.metrics)

    def __getitem__(self, name: str) -> Trained:
        """Load one layer.

        Raises:
            MxdError: the run has no layer of that name.
        """
        if name not in self.names:
            raise unknown("layer", name, self.names)
        return load_layer(self.folder / name)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def __fspath__(self) -> str:
        return str(self.folder)

    def _measured(self) -> list[Path]:
        names = [name for kind in RESULTS for name in (kind, f"{kind}-together")]
        return [file for name in names if (file := self.folder / f"{name}.json").is_file()]

    def __repr__(self) -> str:
        lines = [f"Run {self.folder}"]
        with suppress(MxdError):  # nothing trained yet, or damaged, which whoever asks for a layer is told
            for folder in layers_in(self.folder, "*", str(self.folder)):
                config, about = read_layer(folder)
                lines.append(f"  {folder.name}: {config.summary}, {about.tokens:,} tokens")
        measured = [file.stem for file in self._measured()]
        return "\n".join([*lines, *([f"  results: {', '.join(measured)}"] if measured else [])])

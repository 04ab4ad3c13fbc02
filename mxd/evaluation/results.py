"""What an evaluation found, in Python: the document that its command writes, its numbers as attributes and as a table.

Nothing is copied: the document is the only form, and attributes and tables are read from it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxd.common.errors import MxdError, nearest, unknown
from mxd.common.frames import data_frame
from mxd.evaluation.checkpoints import save_results
from mxd.metrics import METRICS
from mxd.metrics.faithful import CE_INCREASE, KL, NMSE

if TYPE_CHECKING:
    import pandas

_METRICS = {metric.key: metric for metric in METRICS["faithfulness"]}


@dataclass(frozen=True, repr=False)
class Measured:
    """What was measured of one splice; every number is an attribute: ``measured.ce_increase``.

    Of a splice of several layers, numbers that each layer has are means over them; ``blocks`` has each layer's own.
    """

    name: str
    numbers: Mapping[str, Any]
    """As they stand in the document."""

    def __getattr__(self, name: str) -> Any:
        """Return a number of the splice, or the mean over its layers.

        Raises:
            AttributeError: there is none of that name.
        """
        numbers = self.__dict__.get("numbers", {})
        if name in numbers:
            return numbers[name]
        value = _METRICS[name].of(numbers) if name in _METRICS else None
        if value is None:
            raise AttributeError(
                f"{name!r} was not measured; there are: {', '.join(dir(self))}.{nearest(name, dir(self))}"
            )
        return value

    def __dir__(self) -> list[str]:
        """List the numbers."""
        own = [name for name, metric in _METRICS.items() if "." not in name and metric.of(self.numbers) is not None]
        return sorted({"name", "numbers", "row", *self.numbers, *own})

    def row(self) -> dict[str, Any]:
        """Return the numbers as one row: what the splice is, what was measured, what each metric says."""
        first, *others = self.numbers["replacements"]
        what: dict[str, Any] = (
            {"layers": 1 + len(others), "block": None, **first} if not others else {"layers": 1 + len(others)}
        )
        single = {key: value for key, value in self.numbers.items() if not isinstance(value, Mapping | list)}
        named = {"name": self.name} | what | single
        return named | {key: metric.of(self.numbers) for key, metric in _METRICS.items() if key not in named}

    def __repr__(self) -> str:
        shown = (f"{metric.title} {metric.with_error(self.numbers)}" for metric in (CE_INCREASE, KL, NMSE))
        return f"{self.name}: {', '.join(shown)}"


@dataclass(frozen=True, repr=False)
class Faithfulness:
    """How faithful splices are: ``results["run/block2-mxd-k32"].ce_increase``; ``only`` where there is one."""

    document: Mapping[str, Any]
    """What `mxd evaluate` writes as JSON: the numbers with everything they depend on."""

    @property
    def names(self) -> list[str]:
        """The names of the splices."""
        return list(self.document["results"])

    @property
    def only(self) -> Measured:
        """The only splice that was measured.

        Raises:
            MxdError: there are several.
        """
        if len(self.names) != 1:
            raise MxdError(f"{len(self.names)} splices were measured; choose one of: {', '.join(self.names)}.")
        return self[self.names[0]]

    def __getitem__(self, name: str) -> Measured:
        """Return what was measured of one splice.

        Raises:
            MxdError: there is none of that name.
        """
        if name not in self.document["results"]:
            raise unknown("splice", name, self.names)
        return Measured(name, self.document["results"][name])

    def __iter__(self) -> Iterator[Measured]:
        return map(self.__getitem__, self.names)

    def __len__(self) -> int:
        return len(self.names)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame with a row for each splice (``Measured.row``).

        Raises:
            MxdError: pandas is not installed.
        """
        return data_frame(measured.row() for measured in self)

    def save(self, path: str | Path) -> Path:
        """Write the document, as `mxd evaluate --out` does.

        Raises:
            MxdError: the file cannot be written.
        """
        return save_results(self.document, path)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self))

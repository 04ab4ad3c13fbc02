"""One number of a result: key, name, unit, format, direction and meaning."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mxd.common import numbers


@dataclass(frozen=True)
class Metric:
    """One number of a result."""

    key: str
    """Its path in the file, names separated by dots, within a result or one of its blocks."""
    title: str
    """What columns are called."""
    form: str
    """How it is printed."""
    says: str
    """What it is."""
    better: Literal["lower", "higher", ""] = ""
    """Which direction is better, where one is."""
    unit: Literal["nats", "share", "units", "tokens", ""] = ""
    """Its unit; empty for a plain number."""
    name: str = ""
    """A longer name for where there is room; the title by default."""
    error: str = ""
    """The path of its standard error."""

    @property
    def label(self) -> str:
        """Its name on an axis, or alone."""
        return (self.name or self.title) + (", nats" if self.unit == "nats" else "")

    @property
    def note(self) -> str:
        """One sentence that explains it."""
        return self.says + (", in nats" if self.unit == "nats" else "")

    def text(self, value: float) -> str:
        """Return a value as it is printed: never as zero when it is not."""
        return numbers.shown(self.form, value)

    def of(self, result: Mapping[str, Any]) -> float | None:
        """Return its value: the result's own, or the mean over its blocks; ``None`` where there is none."""
        value = _at(result, self.key)
        if value is not None:
            return value
        blocks = result.get("blocks", {})
        values = [layer_value for site in blocks.values() if (layer_value := _at(site, self.key)) is not None]
        return sum(values) / len(values) if values else None

    def shown(self, result: Mapping[str, Any]) -> str:
        """Return its value as text: ``n/a`` where it is undefined, ``-`` where it was not measured."""
        value = self.of(result)
        if value is not None:
            return self.text(value)
        return "n/a" if self.key in result else "-"

    def with_error(self, result: Mapping[str, Any]) -> str:
        """Return its value as text with its standard error, where it has one that is finite."""
        error = _at(result, self.error) if self.error else None
        if error is None or not math.isfinite(error):
            return self.shown(result)
        return f"{self.shown(result)} ± {self.text(error).lstrip('+')}"


def _at(values: Mapping[str, Any], path: str) -> float | None:
    value: Any = values
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int) else value

"""The probing sets of the MxD paper (arXiv 2505.21364, app. B.5) by name: what is read where, as a table says.

The table is ``mxd/assets/tasks/paper.yaml``. The texts are those of the paper's code where it takes the first of a
stream; where it draws them, others are drawn from the same dataset.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from mxd.common.bundled import bundled
from mxd.common.errors import MxdError, first_line, unknown
from mxd.common.files import read_text
from mxd.common.parsing import parse_yaml
from mxd.data.tables import Row, hub_rows, hub_table

PREFIX = "paper:"
SEED = 42
"""Draws the texts; the paper's."""
Key = tuple[str, Any]
"""A class, and the value that it is balanced over, if it is."""


@dataclass(frozen=True)
class Preset:
    """A row of the table, whose head says what the fields are."""

    name: str
    classes: dict[Any, str]
    texts: int
    licence: str
    source: str = ""
    text: str = "text"
    label: str = "label"
    configs: dict[str, str] = field(default_factory=dict)
    balanced: dict[str, Any] = field(default_factory=dict)
    first: bool = False
    skip: int = 0
    least: int = 0
    side: Literal["first", "last"] | None = None
    made: str = ""

    @property
    def labels(self) -> list[str]:
        """The different classes, sorted."""
        return sorted(set(self.classes.values()))

    @property
    def described(self) -> str:
        """What the set holds, for messages."""
        names = ", ".join(self.labels)
        return f"{self.texts:,} texts of {len(self.labels)} classes, {names}"


@cache
def presets() -> dict[str, Preset]:
    """Return the sets by their names, without ``paper:``.

    Raises:
        MxdError: the table is not what mxd came with.
    """
    table = parse_yaml(read_text(bundled("tasks/paper.yaml")))
    return {name: Preset(name, **fields) for name, fields in table.items()}


def check_preset(name: str) -> None:
    """Check that the paper has a set of this name.

    Raises:
        MxdError: it has none.
    """
    if name not in presets():
        raise unknown("set of the paper", PREFIX + name, (PREFIX + known for known in presets()))


def preset_texts(name: str) -> tuple[list[str], list[str], Literal["first", "last"] | None]:
    """Fetch a set of the paper from the Hub.

    Args:
        name: its name in the table, without ``paper:``.

    Returns:
        The texts, the class of each, and which side of a longer text is read, if not the default.

    Raises:
        MxdError: no such set, one that is not on the Hub, the Hub cannot be reached, or it has fewer texts.
    """
    check_preset(name)
    preset = presets()[name]
    if preset.made:
        raise MxdError(
            f"{PREFIX}{name} ({preset.described}) is not on the Hub: make it with {preset.made} and give --set a file "
            "with the columns text, label, and start and end, the characters of the surname."
        )
    found = _gathered(preset)
    texts = [text for rows in found.values() for text in rows]
    labels = [label for (label, _), rows in found.items() for _ in rows]
    return texts, labels, preset.side


def _gathered(preset: Preset) -> dict[Key, list[str]]:
    """Return as many texts of each key."""
    keys = [(label, value) for label in preset.labels for value in preset.balanced.get("values", [None])]
    share = preset.texts // len(keys)
    found: dict[Key, list[str]] = {key: [] for key in keys}
    for config in preset.configs or [""]:
        wanted = [key for key in keys if not config or key[0] == preset.classes[config]]
        for key, text in _read(preset, config):
            if key in found and not (preset.first and len(found[key]) >= share):
                found[key].append(text)
            if preset.first and all(len(found[key]) >= share for key in wanted):
                break
    for key, texts in found.items():
        if len(texts) < share:
            of = key[0] if key[1] is None else f"{key[0]}, {preset.balanced['column']} {key[1]}"
            raise MxdError(
                f"{PREFIX}{preset.name}: {preset.source} has {len(texts)} texts of {of}; expected {share:,}."
            )
    draw = random.Random(SEED)
    return {key: texts if preset.first else draw.sample(texts, share) for key, texts in found.items()}


def _read(preset: Preset, config: str) -> Iterator[tuple[Key, str]]:
    """Yield the key and the text of each row that is long enough."""
    source = f"{preset.source}:{preset.configs[config]}" if config else preset.source
    try:
        for _, row in hub_rows(source, hub_table(source, "train", "", streaming=preset.first)):
            key = _label(preset, row, config), row[preset.balanced["column"]] if preset.balanced else None
            text = row[preset.text][config] if config else row[preset.text]
            if len(text) >= preset.least:
                yield key, text[preset.skip :]
    except KeyError as error:
        raise MxdError(f"{PREFIX}{preset.name}: {source} has no column {error}; it has changed.") from error
    except MxdError as error:
        raise MxdError(
            f"{PREFIX}{preset.name} is {source} on the Hub, which cannot be read: {first_line(error).rstrip('.')}. "
            f"Without it, give --set a file with the columns text and label ({preset.described})."
        ) from error


def _label(preset: Preset, row: Row, config: str) -> str:
    if config:
        return preset.classes[config]
    column = preset.label.removeprefix(".")
    cell = Path(row[column]).suffix if preset.label.startswith(".") else row[column]
    return preset.classes.get(cell, "")

"""Text and tables in Markdown; whatever a text holds is shown, not obeyed."""

import re
from collections.abc import Sequence


def literal(text: object) -> str:
    """Return a text as one line of Markdown that shows it literally."""
    line = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_{}\[\]|~#]|:(?=//))", r"\\\1", line)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])

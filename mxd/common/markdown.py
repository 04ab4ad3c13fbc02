"""Text and tables in Markdown; markup within a text is shown literally."""

import re
from collections.abc import Sequence


def literal(text: object) -> str:
    """Return a text as one line of Markdown that shows it literally."""
    line = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_{}\[\]|~#]|:(?=//))", r"\\\1", line)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose cells are Markdown already; the first row is its header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])

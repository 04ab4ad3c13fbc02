"""The one error type that the command line prints without a traceback."""

from collections.abc import Iterable


class MxdError(Exception):
    """A problem the user can fix: the message says what was got, what was expected, and the remedy."""


def unknown(kind: str, got: object, choices: Iterable[object], remedy: str = "") -> MxdError:
    """Build the error for a name that is not in a table.

    Args:
        kind: what was looked up, for example ``"method"``.
        got: the name that was given.
        choices: the names that exist.
        remedy: a sentence on what else can be done.
    """
    listed = ", ".join(map(str, choices))
    return MxdError(f"unknown {kind} {got!r}; choose one of: {listed}." + (f" {remedy}" if remedy else ""))

"""The error type that the command line prints without a traceback, and the removal of secrets from all text."""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from shlex import quote

_USER = re.compile(r"(\w://)(?:[^\s:/@]*:\S*@|[^\s/]*@)")
_QUERY = re.compile(r"(\w://[^\s?]*)\?[^\s'\"]*")
_KEY = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|gh[opsu]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16})\b")
_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY)$", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters with which a quoted file could move a terminal's cursor or change its title."""
LONGEST = 8000
"""Characters of a message; a longer one loses its middle."""
SHORTEST = 8
"""Shorter values of environment variables are taken for settings, not for secrets."""


def redact(text: str) -> str:
    """Take secrets out of a text: users, passwords and queries in URLs; keys known by their form; environment secrets.

    The latter are the values of variables whose names end in TOKEN, KEY, SECRET, PASSWORD or CREDENTIALS.

    >>> redact("sftp://me:secret@host/folder?token=1 is gone")
    'sftp://host/folder is gone'
    """
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and _SECRET_NAME.search(name) and value in text:
            text = text.replace(value, "<secret>")
    if "://" in text:
        text = _QUERY.sub(r"\1", _USER.sub(r"\1", text))
    return _KEY.sub("<secret>", text)


def printable(text: str) -> str:
    r"""Return a text with each control character replaced by a mark; line ends and tabs stay.

    All text for a terminal or for a file that people read passes through here once, at the end.

    >>> printable("layer\x1b[2J")
    'layer\ufffd[2J'
    """
    return _CONTROL.sub("\ufffd", text)


def typed(*words: object) -> str:
    """Return the words of a command that a person may copy: quoted for a shell, no path taken for an option.

    >>> "mxd evaluate " + typed("runs/a b", "-x", "$(date)")
    "mxd evaluate 'runs/a b' ./-x '$(date)'"
    """
    return " ".join(quote(f"./{word}" if str(word).startswith("-") else str(word)) for word in words)


class MxdError(Exception):
    """A problem the user can fix: the message says what was got, what was expected, and the remedy, never a secret."""

    exit_code = 1
    shared = False
    """Whether all processes of a launch raise it together, so that one of them may speak for all."""

    def __init__(self, message: str = "") -> None:
        message = printable(redact(message))
        if len(message) > LONGEST:
            message = f"{message[: LONGEST - 1000]} ... {message[-900:]}"
        super().__init__(message)


class MxdWarning(UserWarning):
    """Something to know that stops nothing. Quiet: ``warnings.simplefilter("ignore", MxdWarning)``."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(redact(message)))


class SharedError(MxdError):
    """An error of all processes of a launch."""

    shared = True


class LostError(MxdError):
    """Another process of the launch failed, ended or does not answer, so the launch cannot continue.

    Args:
        message: which process it was, and what to do.
        shared: whether another process reports it.
    """

    def __init__(self, message: str = "", shared: bool = True) -> None:
        super().__init__(message)
        self.shared = shared


def unknown(kind: str, got: object, choices: Iterable[object], remedy: str = "") -> MxdError:
    """Build the error for a name that is not in a table.

    Args:
        kind: the kind of name, for example ``"method"``.
        got: the name that was given.
        choices: the names that exist.
        remedy: a sentence on what else can be done.
    """
    names = [str(choice) for choice in choices]
    listed = f"choose one of: {', '.join(names)}.{nearest(got, names)}"
    return MxdError(f"unknown {kind} {got!r}; {listed}" + (f" {remedy}" if remedy else ""))


def nearest(got: object, choices: Iterable[str]) -> str:
    """Return a question whether the most similar choice was meant, or nothing where none is similar."""
    similar = get_close_matches(str(got), choices, 1, 0.7)
    return f" Did you mean {similar[0]!r}?" if similar else ""


def first_line(error: BaseException) -> str:
    r"""Return an error's first line (the first two if it ends with ``:``), or its type where it has no message.

    >>> first_line(RuntimeError("Error(s) in loading:\n  size mismatch\n  and more"))
    'Error(s) in loading: size mismatch'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]

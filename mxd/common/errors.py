"""The error type that the command line prints without a traceback, and the removal of secrets from all text."""

import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from shlex import quote
from typing import Any

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


class UsageError(MxdError):
    """Words on the command line that it does not understand."""

    exit_code = 2


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
    names, text = list(choices), str(got)
    begun = [name for name in names if len(text) > 2 and name.startswith(text)]
    similar = get_close_matches(text, names, 1, 0.7) or begun
    return f" Did you mean {similar[0]!r}?" if similar else ""


_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dataclass_type": "a mapping of fields",
    "dict_type": "a mapping of fields",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "a number greater than {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "a number less than {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "list_type": "a list",
    "model_attributes_type": "a mapping of fields",
    "model_type": "a mapping of fields",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_type": "text",
    "too_short": "a list of at least {min_length}",
    "tuple_type": "a list",
}
"""pydantic's type of error -> what was expected."""


def said(problem: Mapping[str, Any]) -> str:
    """Say what is wrong with a field: what was expected and what was got, in the words of whoever wrote the file.

    Args:
        problem: one of ``ValidationError.errors()``.

    >>> said({"type": "greater_than", "ctx": {"gt": 0}, "input": -1})
    'expected a number greater than 0, got -1'
    """
    kind, got, about = problem["type"], problem.get("input"), problem.get("ctx", {})
    if kind == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return "there is no such field"
    if kind == "missing":
        return "it is missing"
    choices = re.findall(r"'([^']*)'", about.get("expected_tags" if kind == "union_tag_invalid" else "expected", ""))
    if kind == "union_tag_invalid":
        return str(unknown(about["discriminator"].strip("'_()"), about["tag"], choices)).removesuffix(".")
    if kind == "union_tag_not_found":
        tag = about["discriminator"].strip("'_()")
        return f"it has no field {tag!r}, which says what it is"
    if kind in _EXPECTED:
        words = _EXPECTED[kind].format_map(about)
    elif str(problem["msg"]).startswith("Input should be "):
        words = str(problem["msg"]).removeprefix("Input should be ")
    else:
        return str(problem["msg"])
    if kind == "literal_error" and choices:
        words = choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
    shown = repr(got) if len(repr(got)) <= 80 else f"{repr(got)[:80]}..."
    return f"expected {words}, got {shown}" + (f".{nearest(got, choices)}" if nearest(got, choices) else "")


def told(error: Any) -> str:
    """Return the first problem of a ``ValidationError`` in one line: the field and what is wrong with it."""
    problem = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {said(problem)}".removeprefix(": ")


def first_line(error: BaseException) -> str:
    r"""Return an error's first line (the first two if it ends with ``:``), or its type where it has no message.

    >>> first_line(RuntimeError("Error(s) in loading:\n  size mismatch\n  and more"))
    'Error(s) in loading: size mismatch'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]

"""Untrusted JSON and YAML as plain data, which can neither fill the memory nor run code.

Whatever is wrong with a text is a ``ValueError`` that says so in one line; callers add which file it was.
"""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import yaml

Hook = Callable[[dict[str, Any]], Any]

MOST_VALUES = 100_000
"""The most values that a YAML file may hold, every alias counted as often as it is used."""
DEEPEST = 60
"""The most levels of a YAML file."""
MOST_YAML_BYTES = 400_000
"""YAML is parsed in pure Python, at about 100,000 bytes per second."""
LARGEST = 2**63 - 1
"""The largest whole number: sizes, counts and seeds are 64-bit integers where they are used."""


def parse_json(text: str | bytes, hook: Hook | None = None) -> Any:
    """Return the data of a JSON text.

    Args:
        text: the text.
        hook: makes something else of an object, the innermost first; a ``ValueError`` if it cannot.

    Raises:
        ValueError: it is not JSON, nested too deeply, or holds a whole number beyond ``LARGEST``.
    """
    try:
        return json.loads(text, parse_int=_whole, object_hook=hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_yaml(text: str) -> Any:
    """Return the data of a YAML text: plain values only, and at most ``MOST_VALUES`` of them.

    Raises:
        ValueError: it is not YAML, nested too deeply, too large, has a key twice, contains itself or a number beyond
            ``LARGEST``, or asks for Python objects.
    """
    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"it is larger than {MOST_YAML_BYTES:,} characters")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > MOST_VALUES:  # before aliases and merged keys are followed
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        value = loader.construct_document(node)  # of all that PyYAML can make, plain values only
        _check_numbers(value)
        return value
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (TypeError, AttributeError, OverflowError) as error:  # a tag on a value of another kind
        raise ValueError(f"it holds a value that is not of the kind it is tagged as ({error})") from error


class _Loader(yaml.SafeLoader):
    """Refuses deep nesting early: PyYAML takes seconds until it exceeds the recursion limit."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read one node and everything inside it."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _size(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return the number of values under a node, each alias counted as all that it refers to.

    ``known`` holds the sizes of finished nodes, and ``None`` for those that are being counted: to meet one of these
    again is a cycle.
    """
    if id(node) not in known:
        known[id(node)] = None
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _refuse_twice(node)
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        known[id(node)] = min(1 + sum(_size(child, known) for child in children), LARGEST)
    size = known[id(node)]
    if size is None:
        raise ValueError("it contains itself: an alias lies inside the value that it refers to")
    return size


def _refuse_twice(node: yaml.MappingNode) -> None:
    names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ValueError(f"it gives {twice!r} twice{node.start_mark}")


def _whole(digits: str) -> int:
    if len(digits) > 20 or abs(number := int(digits)) > LARGEST:
        raise ValueError(f"it holds the whole number {digits[:20]}{'...' * (len(digits) > 20)}, which is too large")
    return number


def _check_numbers(value: Any) -> None:
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError("it holds a whole number that is too large")
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            _check_numbers(item)


def whole_number(value: Any) -> Any:
    """Return the number that a text such as ``1e6``, ``10k``, ``1.5M`` or ``1_000_000`` writes; all else as it is.

    k, M and B stand for a thousand, a million and a billion.

    >>> [whole_number(text) for text in ("1e6", "10k", "1.5M", "1_000", "many", 3)]
    [1000000, 10000, 1500000, 1000, 'many', 3]
    """
    match = _COUNT.fullmatch(value.strip()) if isinstance(value, str) and len(value) <= 40 else None
    if match is None:
        return value
    number = Decimal(match[1].replace("_", "")) * 1000 ** " kmb".index((match[2] or " ").lower())
    return int(number) if number <= LARGEST and number == number.to_integral_value() else value


_COUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)([kKmMbB])?")


def spans(text: str, most: int) -> list[int]:
    """Return the numbers of a list such as ``3,17,40-49``; ``-1`` is a number, and no span begins or ends with one.

    Args:
        text: the list.
        most: the most numbers that it may name.

    Raises:
        ValueError: something else than numbers and spans, or more numbers.

    >>> spans("3,5-7,-1", 10)
    [3, 5, 6, 7, -1]
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = _SPAN.fullmatch(part.strip())
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ValueError("expected numbers and ranges such as 3,17,40-49")
        span = range(int(match[1]), int(match[2]) + 1) if match[2] else [int(match[0])]
        if len(numbers) + len(span) > most:
            raise ValueError(f"expected {most:,} numbers at most")
        numbers += span
    return numbers


_SPAN = re.compile(r"([0-9]{1,12})-([0-9]{1,12})|-?[0-9]{1,12}")


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """Describe where two pieces of plain data differ.

    Args:
        before: one piece.
        now: the other.
        where: the name under which both are found.

    >>> differences({"seed": 0, "data": {"bos": True}}, {"seed": 1, "data": {"bos": True}})
    ['seed was 0, is 1']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(key, before.get(key), now.get(key)) for key in dict.fromkeys((*before, *now))]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(before, now, strict=True))]
    else:
        return [] if before == now else [f"{where} was {_short(before)}, is {_short(now)}"]
    return [line for key, a, b in pairs for line in differences(a, b, f"{where}.{key}".lstrip("."))]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def without_surrogates(text: str) -> str:
    """Return a text with ``?`` for half characters (lone surrogates), which JSON can hold but UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")
    return text

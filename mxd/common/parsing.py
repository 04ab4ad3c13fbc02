"""Texts that anyone may have written, as plain data: JSON and YAML that can neither fill the memory nor run anything.

What is wrong with them is a ``ValueError`` that says so in one line; callers add which file it was.
"""

import json
from typing import Any

import yaml

MOST_VALUES = 100_000
"""Values that a YAML file may hold, every alias counted as often as it is used."""
DEEPEST = 60
"""Levels of a YAML file."""
MOST_YAML_BYTES = 400_000
"""A YAML file is read in pure Python, at some 100,000 bytes a second."""
LARGEST = 2**63 - 1
"""Beyond it no size, count or seed makes sense to what computes with them."""


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text holds.

    Raises:
        ValueError: it is not JSON, nested too deeply, or holds a whole number beyond ``LARGEST``.
    """
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_yaml(text: str) -> Any:
    """Return what a YAML text holds: plain values only, and no more of them than ``MOST_VALUES``.

    Raises:
        ValueError: it is not YAML, nested too deeply, too large, names a key twice, holds itself or a number beyond
            ``LARGEST``, or asks for Python objects.
    """
    if len(text) > MOST_YAML_BYTES:
        raise ValueError(f"it is larger than {MOST_YAML_BYTES:,} characters")
    try:
        node = yaml.compose(text, _Loader)
        if node is None:
            return None
        if _size(node, {}) > MOST_VALUES:  # before aliases and merged keys are followed
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        value = yaml.safe_load(text)  # of all that PyYAML can make, plain values only
        _check_numbers(value)
        return value
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (TypeError, AttributeError, OverflowError) as error:  # a tag on a value of another kind
        raise ValueError(f"it holds a value that is not of the kind it is tagged as ({error})") from error


class _Loader(yaml.SafeLoader):
    """Gives up early: PyYAML takes seconds to find that it recurses too deeply."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read one node and all that is in it."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError("it is nested too deeply")
        found = super().compose_node(parent, index)
        self.depth -= 1
        return found


def _size(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return the number of values under a node, where each alias stands for all that it names."""
    if id(node) not in known:
        known[id(node)] = None
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _refuse_twice(node)
            inner = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        known[id(node)] = min(1 + sum(_size(each, known) for each in inner), LARGEST)
    found = known[id(node)]
    if found is None:
        raise ValueError("it holds itself: an alias stands within what it names")
    return found


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
        for each in value:
            _check_numbers(each)


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """Say in which places two pieces of plain data differ.

    >>> differences({"seed": 0, "data": {"bos": True}}, {"seed": 1, "data": {"bos": True}})
    ['seed was 0, is 1']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        pairs = [(key, before.get(key), now.get(key)) for key in dict.fromkeys((*before, *now))]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = [(i, a, b) for i, (a, b) in enumerate(zip(before, now, strict=True))]
    else:
        return [] if before == now else [f"{where} was {_short(before)}, is {_short(now)}"]
    return [found for key, a, b in pairs for found in differences(a, b, f"{where}.{key}".lstrip("."))]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def without_surrogates(text: str) -> str:
    """Return a text with ``?`` for half characters (lone surrogates), which JSON can hold and no UTF-8 can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode("utf-8")
    return text

"""Every field of a run's config as text: its values, its default and what it means (`mxd fields`)."""

import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from mxd.common.errors import MxdError
from mxd.config import RunConfig, is_section
from mxd.layers import LAYERS, ReplacementConfig
from mxd.layers.sparsity import SPARSITIES, SparsityConfig


def fields_help(section: str = "") -> str:
    """Return what ``--a.b value`` can set: for every field its values, its default and what it means.

    Args:
        section: only fields whose names begin so (``training``, ``data.source``); all where empty.

    Raises:
        MxdError: there are none.
    """
    parts = list(_helped(RunConfig, ""))
    for title, every, configs in (
        ("replacements.N", ReplacementConfig, LAYERS),
        ("replacements.N.sparsity", SparsityConfig, SPARSITIES),
    ):
        tag = "method" if configs is LAYERS else "kind"
        parts.append(f"--{title}.{tag}  {' | '.join(configs)}")
        shared = set(every.model_fields) - {tag}
        parts += _helped(every, f"{title}.", shared - {"sparsity"})
        for name, config in configs.items():
            own = set(config.model_fields) - shared - {tag}
            parts.append(f"{tag} {name}" + ("" if own else " has no field of its own"))
            parts += _helped(config, f"{title}.", own)
    if not section:
        return "\n\n".join(["Whole numbers may also be written 10k, 1.5M or 1e6.", *parts])
    start = f"--{section}"  # and what heads such a field
    found = [
        part
        for part, following in zip(parts, [*parts[1:], ""], strict=True)
        if part.startswith(start) or (not part.startswith("--") and following.startswith(start))
    ]
    if not found:
        choices = dict.fromkeys(part[2:].split()[0].split(".")[0] for part in parts if part.startswith("--"))
        raise MxdError(f"no field begins with {section!r}; sections and fields: {', '.join(choices)}.")
    return "\n\n".join(found)


def _helped(settings: type[BaseModel], prefix: str, only: set[str] | None = None) -> Iterator[str]:
    """Yield the help of a config's fields, section by section."""
    for name, field in settings.model_fields.items():
        sections = [kind for kind in _members(field.annotation) if is_section(kind)]
        for section in sections:
            if len(sections) > 1:
                yield f"--{prefix}{name} of kind {section.model_fields['kind'].default}"
            yield from _helped(section, f"{prefix}{name}.")
        if not sections and name != "replacements" and (only is None or name in only):
            default = "required" if field.is_required() else f"default {_value(field.default)}"
            meaning = " ".join((field.description or "").replace("``", "`").split())
            yield f"--{prefix}{name}  {_values(field.annotation)} ({default})\n    {meaning}"


def _members(annotation: Any) -> list[Any]:
    """Return the types that a field's value may have: itself, or those of a union, but for None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation]
    return [kind for part in get_args(annotation) if part is not NoneType for kind in _members(part)]


_WORDS = {bool: "true | false", int: "whole number", float: "number", str: "text"}


def _values(annotation: Any) -> str:
    """Say which values a field may have."""

    def said_of(kind: Any) -> str:
        if get_origin(kind) is Literal:
            return " | ".join(map(str, get_args(kind)))
        return f"list of {_values(get_args(kind)[0])}" if get_origin(kind) is tuple else _WORDS.get(kind, "mapping")

    return " | ".join(map(said_of, _members(annotation)))


def _value(default: Any) -> str:
    """Return a default as a file would say it."""
    return json.dumps(default, default=lambda value: value.model_dump()).strip('"')

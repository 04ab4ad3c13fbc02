"""Hostile input: unexpected values, valid documents with something wrong in them, damaged bytes."""

import copy
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[Any], Any]
"""Draws from a strategy."""

MARK = "<mxdx onload=alert(1)>"
"""Text that must never appear unescaped on a page or in a card."""
ROOT = "@ROOT@"
"""Stands for the watched folder; ``localised`` puts its path there."""

TEXTS = (
    "",
    "\0",
    "..",
    "../../escaped",
    f"{ROOT}/escaped",
    "/dev/zero",
    "~/escaped",
    "$(touch escaped)",
    "{{7*7}}",
    "{0.__class__}",
    "%s%n",
    MARK,
    f"</script>{MARK}",
    f"```\n{MARK}",
    f"---\nlicense: mit\n---\n{MARK}",
    f"| a |\n{MARK}",
    "$\\frac{",
    "[x](javascript:alert(1))",
    "\ud800",
    "\u202etxt.exe",
    "\x1b[2J\x1b]0;owned\x07",
    "\ufeff",
    "a" * 300,
    "a" * 5000,
    "²",
    "nan",
    "-1",
    "1e999",
    "org/name",
    "hf://org/name@main",
    "name\n  injected: 1",
    "!!python/object/apply:os.system ['touch escaped']",
)
NUMBERS = (
    *(0, -1, 1, 2, 3, 255, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**12, 10**30, 10**400, 10**4000),
    *(0.5, -0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
)

texts = st.sampled_from(TEXTS) | st.text(max_size=12)
numbers = st.sampled_from(NUMBERS)
atoms = texts | numbers | st.booleans() | st.none()
values = atoms | st.recursive(
    atoms, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
chances = st.integers(0, 2**16)


def spoilt(draw: Draw, document: Any, most: int = 3) -> Any:
    """Return a document with up to ``most`` things changed: replaced, left out, added, exchanged, nested."""
    whole = [copy.deepcopy(document)]
    for _ in range(draw(st.integers(0, most))):
        parent, key = _place(draw, whole)
        kind = draw(st.integers(0, 7))
        if kind == 0 and parent is not whole:
            del parent[key]
        elif kind == 1 and isinstance(parent[key], dict):
            parent[key][draw(texts)] = draw(values)
        elif kind == 2 and isinstance(parent[key], list):
            parent[key] = parent[key] * draw(st.sampled_from((0, 2, 100)))
        elif kind == 3:
            parent[key] = [parent[key]]
        elif kind == 4:
            other, name = _place(draw, whole)
            parent[key] = copy.deepcopy(other[name])
        else:
            parent[key] = draw(values)
    return whole[0]


def _place(draw: Draw, whole: list[Any]) -> tuple[Any, Any]:
    """Return a container and one of its keys, any number of levels down."""
    parent: Any = whole
    key: Any = 0
    while isinstance(parent[key], dict | list) and parent[key] and draw(st.integers(0, 9)) > 1:
        parent = parent[key]
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = keys[draw(chances) % len(keys)]
    return parent, key


def damaged(draw: Draw, data: bytes, others: Sequence[bytes] = (), most: int = 3) -> bytes:
    """Return bytes with up to ``most`` changes: bits turned, cut, spliced, repeated, overwritten."""
    for _ in range(draw(st.integers(0, most))):
        at = draw(chances) * (len(data) + 1) // (2**16 + 1)
        kind = draw(st.integers(0, 6))
        if kind == 0 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at]
        elif kind == 2 and others:
            other = others[draw(chances) % len(others)]
            data = data[:at] + other[draw(chances) * len(other) // 2**16 :]
        elif kind == 3:
            data = data[:at] + data[at : at + 64] * draw(st.sampled_from((2, 50))) + data[at + 64 :]
        elif kind == 4:
            number = draw(st.sampled_from((0, 1, 2**31, 2**32, 2**63, 2**64 - 1)))
            data = data[:at] + struct.pack("<Q", number) + data[at + 8 :]
        elif kind == 5:
            data = data[:at] + draw(st.binary(max_size=8)) + data[at:]
        else:
            data = data[:at] + draw(texts).encode("utf-8", "surrogatepass") + data[at:]
    return data


def damaged_tensors(draw: Draw, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Return a safetensors file with a wrong header: lengths, offsets, shapes, dtypes, names; or with wrong bytes."""
    if len(data) < 8 or draw(st.integers(0, 3)) == 0:
        return damaged(draw, data, others)
    length = struct.unpack("<Q", data[:8])[0]
    try:
        header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    except (ValueError, RecursionError):
        return damaged(draw, data, others)
    if not isinstance(header, dict):
        return damaged(draw, data, others)
    names = [name for name, entry in header.items() if _lists(entry, "shape", "data_offsets")]
    kind = draw(st.integers(0, 9))
    if names and kind < 8:
        name = names[draw(chances) % len(names)]
        if kind == 0:
            header[name]["shape"] = draw(st.lists(numbers, max_size=3))
        elif kind == 1:
            header[name]["data_offsets"] = draw(st.lists(numbers, min_size=2, max_size=2))
        elif kind == 2:
            header[name] = header[names[draw(chances) % len(names)]]  # two tensors over the same bytes
        elif kind == 3:
            codes = ("F64", "F16", "BF16", "I64", "I32", "I8", "U8", "U64", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "C64")
            header[name]["dtype"] = draw(st.sampled_from((*codes, "X", None)))
        elif kind == 4:
            header[draw(texts)] = header.pop(name)
        elif kind == 5:
            header["__metadata__"] = draw(values)
        elif kind == 6:
            shape = header[name]["shape"]
            header[name]["shape"] = shape[::-1] if draw(st.booleans()) else [*shape, 1]
        else:
            kinds = ("nan", "inf", "-inf", 1e38)
            number = struct.pack("<f", float(draw(st.sampled_from(kinds))))
            begin = next((n for n in header[name]["data_offsets"] if isinstance(n, int)), 0)
            body = body[:begin] + number + body[begin + 4 :]
    elif kind == 8:
        header = spoilt(draw, header)
    text = json.dumps(header)
    if kind == 9:  # the same name twice
        text = text[:-1] + ", " + text[1:] if header else text
    raw = text.encode()
    raw += b" " * (-len(raw) % 8)
    stated = draw(st.sampled_from((len(raw),) * 8 + (0, len(raw) - 1, len(raw) + 8, 10**8, 2**63, 2**64 - 1)))
    return struct.pack("<Q", stated) + raw + body


def _lists(entry: Any, *names: str) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(name), list) for name in names)


def localised(value: Any, root: Path) -> Any:
    """Return a value in which every text names the watched folder where ``ROOT`` stood."""
    if isinstance(value, str):
        return value.replace(ROOT, str(root))
    if isinstance(value, dict):
        return {localised(key, root): localised(item, root) for key, item in value.items()}
    return [localised(item, root) for item in value] if isinstance(value, list) else value


def write_json(path: Path, value: Any, root: Path) -> None:
    """Write JSON as an attacker would: NaN, lone surrogates and very long numbers are allowed."""
    path.write_text(json.dumps(localised(value, root)), encoding="utf-8")


def replace_file(draw: Draw, path: Path, root: Path) -> None:
    """Put something in a file's place that is no ordinary file."""
    kind = draw(st.integers(0, 9))
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        return
    targets = ("/dev/zero", "/dev/full", "/dev/null", "/dev/stdin", str(root / "canary"), str(path), "..", "nowhere")
    if kind < 6:
        path.symlink_to(targets[draw(chances) % len(targets)])
    elif kind == 6:
        os.mkfifo(path)
    elif kind == 7:
        path.mkdir()
    elif kind == 8:
        path.write_bytes(b"")


def spoil_folder(draw: Draw, folder: Path, root: Path) -> None:
    """Add strange entries to a folder, or replace some that are there."""
    if draw(st.integers(0, 3)):
        return
    entries = sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    if entries and draw(st.booleans()):
        replace_file(draw, entries[draw(chances) % len(entries)], root)
        return
    names = (
        b"\xff\xfe",
        "\u202ecod".encode(),
        b"a\nb",
        b" ",
        b"-rf",
        b"<mxdx onload=alert(1)>",
        b".hidden",
        b"x" * 255,
    )
    entry = os.fsencode(folder) + b"/" + draw(st.sampled_from(names))
    kind = draw(st.integers(0, 5))
    layers = [path.parent for path in entries if path.name in ("config.json", "cfg.json")]
    if kind == 0:
        os.mkfifo(entry)
    elif kind == 1:
        os.symlink(entry, entry)
    elif kind == 2:
        os.symlink(os.fsencode(folder), entry)  # a folder within itself
    elif kind == 3 and layers:
        os.symlink(os.fsencode(layers[draw(chances) % len(layers)]), entry)
    elif kind == 4 and layers and layers[0] != folder:
        os.rename(layers[0], entry)
    else:
        os.mkdir(entry)

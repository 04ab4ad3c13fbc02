"""The files of an activation cache: what they hold, and whether it can be believed.

A shard is whole or not there: its tensors come first, then its JSON, which names their SHA-256.

cache.json                what the activations are of
shard-000000.safetensors  ids, x and y of every block, and the means of these over the window
shard-000000.json         where in the text it begins and each of its batches ends; size and SHA-256 of its tensors
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mxd.common.errors import MxdError, typed
from mxd.common.parsing import parse_json
from mxd.data.activations import Cursor
from mxd.data.store import Store, sha256

FORMAT = 4

UNKNOWN = ("revision", "text")
"""What is ``None`` where it cannot be known: of a folder or a loaded model; of a text that is not on this machine."""

ANEW = "`mxd cache` writes it anew, and nothing else."
"""What to do about a shard that is damaged or missing."""


@dataclass(frozen=True)
class Shard:
    """What a shard's JSON says."""

    number: int
    tokens: int
    start: Cursor
    ends: tuple[Cursor, ...]
    size: int
    sha256: str


class ShardFile:
    """The tensors of a whole shard, mapped into memory."""

    def __init__(self, store: Store, shard: Shard) -> None:
        self.where = shard_name(store, shard.number)
        with store.local(data_name(shard.number)) as path, _readable(self.where):
            check_data(path, shard)
            self.tensors = safe_open(path, "pt")

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows of a tensor."""
        with _readable(self.where):
            return self.tensors.get_slice(name)[begin:end]

    def means(self, blocks: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return block -> the means of the window that the shard is of."""
        with _readable(self.where):
            get = self.tensors.get_tensor
            return {block: (get(f"{block}.x_mean"), get(f"{block}.y_mean")) for block in blocks}


def identity_of(store: Store) -> dict[str, Any]:
    """Return what a cache says it is of."""
    content = store.read("cache.json")
    if content is None:
        raise MxdError(f"no activation cache at {store.name!r}; write one with: mxd cache CONFIG {typed(store.name)}")
    try:
        held = parse_json(content)
    except ValueError as error:
        raise MxdError(f"cannot read {store.name}/cache.json: {error}") from error
    if not isinstance(held, dict) or not isinstance(held.get("fingerprints"), dict):
        raise MxdError(f"{store.name}/cache.json is not an activation cache's; choose another folder.")
    if held.get("format") != FORMAT:
        raise MxdError(
            f"the activation cache {store.name} has format {held.get('format')}, this mxd reads and writes {FORMAT}; "
            f"delete it and write it anew: mxd cache CONFIG {typed(store.name)}"
        )
    return held


def check_identity(store: Store, held: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare what a cache is of with what is asked for; of ``fingerprints`` some blocks may be asked for.

    Raises:
        MxdError: they differ; every difference is named.
    """
    said = {"text": "its text, by the hash of its files", "model": "its base model, by the hash of all weights"}
    differences = [
        f"{said.get(key, key)}: {held.get(key)!r}, asked for {value!r}"
        for key, value in wanted.items()
        if key != "fingerprints" and held.get(key) != value
        if not (key in UNKNOWN and None in (held.get(key), value))
    ]
    for block, fingerprint in wanted["fingerprints"].items():
        own = held["fingerprints"].get(block)
        if own is None:
            differences.append(f"it has blocks {', '.join(held['fingerprints'])}, asked for {block}")
        elif own != fingerprint:
            differences.append(f"block {block} is of another base model (fingerprint {own}, asked for {fingerprint})")
    if differences:
        raise MxdError(
            f"the activation cache {store.name} holds something else: {'; '.join(differences)}. Put back what was "
            "changed, or write another: mxd cache CONFIG FOLDER"
        )


def leading_shards(store: Store, held: Mapping[str, Any]) -> tuple[list[Shard], str]:
    """Return the shards up to the first that is missing or unclear, and what is wrong with that one."""
    found: list[Shard] = []
    end = Cursor()
    for place, (number, shard) in enumerate(described_shards(store, held)):
        where = shard_name(store, place)
        if number != place:
            return found, f"{where} is missing. {ANEW}"
        if isinstance(shard, MxdError):
            return found, str(shard)
        if shard.start != end:
            return found, (
                f"{where} begins at {shard.start}, and the shard before it ends at {end}. `mxd cache` with as many "
                "tokens as it was last asked for completes a cache; if that does not help, the text has changed."
            )
        found.append(shard)
        end = shard.ends[-1]
    return found, ""


def described_shards(store: Store, held: Mapping[str, Any]) -> list[tuple[int, Shard | MxdError]]:
    """Return every shard there is, in order: what its JSON says, or why that cannot be believed."""
    numbers = shard_numbers(store.names())
    with ThreadPoolExecutor(16) as pool:  # elsewhere than on this machine, waiting is what takes the time
        return list(zip(numbers, pool.map(lambda n: describe_shard(store, held, n), numbers), strict=True))


def describe_shard(store: Store, held: Mapping[str, Any], number: int) -> Shard | MxdError:
    """Return what a shard's JSON says, or why that cannot be believed."""
    try:
        said = parse_json(store.read(description_name(number)) or b"")
        seal = said.pop("seal")
        if seal != seal_of(held, said) or said["number"] != number:
            raise ValueError("it is damaged, or of another cache")
        start, *ends = (Cursor(**cursor) for cursor in (said.pop("start"), *said.pop("ends")))
        tokens = said["tokens"]
        if type(tokens) is not int or not ends or tokens < len(ends) or tokens % len(ends):
            raise ValueError(f"it says that it has {tokens} tokens in {len(ends)} batches")
        return Shard(**said, start=start, ends=tuple(ends))
    except (MxdError, ValueError, TypeError, KeyError, AttributeError) as error:
        return MxdError(f"cannot read {shard_name(store, number)}: {error}. {ANEW}")


def check_data(path: Path, shard: Shard) -> None:
    """Compare a shard's data with what was written.

    Raises:
        OSError: they differ, or cannot be read.
    """
    size = path.stat().st_size
    if size != shard.size:
        raise OSError(f"its tensors take {size:,} bytes, {shard.size:,} were written")
    if sha256(path) != shard.sha256:
        raise OSError("its tensors have another SHA-256 than was written")


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Say of a failure that the shard is damaged."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise MxdError(f"cannot read {where}: {error}. {ANEW}") from error


def shard_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the shards among the names of files, sorted."""
    found = (re.fullmatch(r"shard-(\d{6,})\.json", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def data_name(number: int) -> str:
    """Return the name of the file with a shard's tensors."""
    return f"shard-{number:06d}.safetensors"


def description_name(number: int) -> str:
    """Return the name of the file that describes a shard."""
    return f"shard-{number:06d}.json"


def shard_name(store: Store, number: int) -> str:
    """Return what messages call a shard."""
    return f"{store.name}/shard-{number:06d}"


def seal_of(held: Mapping[str, Any], said: Mapping[str, Any]) -> str:
    """Return a hash of what a shard says of itself and of the cache that it belongs to."""
    return hashlib.sha256(encoded([held, said])).hexdigest()


def short_hash(value: Any) -> str:
    """Return a hash of plain data, as places and caches name it."""
    return hashlib.sha256(encoded(value)).hexdigest()[:32]


def encoded(value: Any) -> bytes:
    """Return plain data as JSON, the same bytes for the same data."""
    return (json.dumps(value, sort_keys=True, default=str) + "\n").encode()

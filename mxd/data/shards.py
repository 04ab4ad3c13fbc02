"""The files of an activation cache: their content, and checks that it is undamaged.

A shard is complete or absent: its tensors are written first, then its JSON, which names their SHA-256.

cache.json                the cache's identity: all settings that its activations depend on
shard-000000.safetensors  ids, x and y of every block, and the means of these over the window; of rows in 8 bits the
                          scales, by which they are to be multiplied
shard-000000.json         where in the text it begins and each of its batches ends; size and SHA-256 of its tensors;
                          a seal: the hash of all this and of the cache's identity
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

import torch
from jaxtyping import Float, Shaped
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mxd.common.errors import MxdError, typed
from mxd.common.parsing import parse_json
from mxd.data.activations import Cursor
from mxd.data.store import Store, sha256

FORMAT = 4

UNKNOWN = ("revision", "text")
"""Fields that are ``None`` where they cannot be known: for a folder or a loaded model; for a text on the Hub."""

REMEDY = "`mxd cache` writes it again, and nothing else."
"""What to do about a shard that is damaged or missing."""


@dataclass(frozen=True)
class Shard:
    """The description of a shard in its JSON."""

    number: int
    tokens: int
    start: Cursor
    ends: tuple[Cursor, ...]
    size: int
    sha256: str


class ShardFile:
    """The tensors of a shard, mapped into memory after a check of their SHA-256."""

    def __init__(self, store: Store, shard: Shard) -> None:
        self.where = shard_name(store, shard.number)
        with store.local(data_name(shard.number)) as path, _readable(self.where):
            check_data(path, shard)
            self.tensors = safe_open(path, "pt")

    def rows(self, name: str, begin: int, end: int) -> Shaped[Tensor, "rows ..."]:
        """Return rows of a tensor, those in 8 bits multiplied by their scales.

        Args:
            name: ``ids``, or ``<block>.x`` or ``<block>.y``.
            begin: the first row.
            end: the row after the last.
        """
        with _readable(self.where):
            rows = self.tensors.get_slice(name)[begin:end]
            if rows.dtype is not torch.int8:
                return rows
            return rows * self.tensors.get_slice(scale_name(name))[begin:end].unsqueeze(-1)

    def means(self, blocks: Sequence[int]) -> dict[int, tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"]]]:
        """Return block -> the means of x and y over the shard's window."""
        with _readable(self.where):
            get = self.tensors.get_tensor
            return {block: (get(f"{block}.x_mean"), get(f"{block}.y_mean")) for block in blocks}


def identity_of(store: Store) -> dict[str, Any]:
    """Return a cache's identity: the settings that its activations depend on.

    Raises:
        MxdError: there is no cache, or it is unreadable or of another format.
    """
    content = store.read("cache.json")
    if content is None:
        raise MxdError(f"no activation cache at {store.name!r}; write one with: mxd cache CONFIG {typed(store.name)}")
    try:
        identity = parse_json(content)
    except ValueError as error:
        raise MxdError(f"cannot read {store.name}/cache.json: {error}") from error
    if not isinstance(identity, dict) or not isinstance(identity.get("fingerprints"), dict):
        raise MxdError(f"{store.name}/cache.json is not an activation cache's; choose another folder.")
    if identity.get("format") != FORMAT:
        raise MxdError(
            f"the activation cache {store.name} has format {identity.get('format')}, this mxd reads and writes "
            f"{FORMAT}; delete it and write it again: mxd cache CONFIG {typed(store.name)}"
        )
    return identity


def check_identity(store: Store, identity: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare a cache's identity with the one that is asked for.

    Args:
        store: the cache.
        identity: its identity.
        expected: what is asked for; its ``fingerprints`` may name some of the cache's blocks.

    Raises:
        MxdError: they differ; every difference is named.
    """
    identity = {"autocast": False, **identity}  # earlier versions did not say
    titles = {"text": "its text, by the hash of its files", "model": "its base model, by the hash of all weights"}
    differences = [
        f"{titles.get(key, key)}: {identity.get(key)!r}, asked for {value!r}"
        for key, value in expected.items()
        if key != "fingerprints" and identity.get(key) != value
        if not (key in UNKNOWN and None in (identity.get(key), value))
    ]
    for block, fingerprint in expected["fingerprints"].items():
        stored = identity["fingerprints"].get(block)
        if stored is None:
            differences.append(f"it has blocks {', '.join(identity['fingerprints'])}, asked for {block}")
        elif stored != fingerprint:
            differences.append(
                f"block {block} is of another base model (fingerprint {stored}, asked for {fingerprint})"
            )
    if differences:
        raise MxdError(
            f"the activation cache {store.name} holds something else: {'; '.join(differences)}. Put back what was "
            "changed, or write another: mxd cache CONFIG FOLDER"
        )


def leading_shards(store: Store, identity: Mapping[str, Any]) -> tuple[list[Shard], str]:
    """Return the shards before the first that is missing or unreadable, and what is wrong with that one."""
    shards: list[Shard] = []
    end = Cursor()
    for expected, (number, shard) in enumerate(described_shards(store, identity)):
        where = shard_name(store, expected)
        if number != expected:
            return shards, f"{where} is missing. {REMEDY}"
        if isinstance(shard, MxdError):
            return shards, str(shard)
        if shard.start != end:
            return shards, (
                f"{where} begins at {shard.start}, and the shard before it ends at {end}. `mxd cache` with as many "
                "tokens as it was last asked for completes a cache; if that does not help, the text has changed."
            )
        shards.append(shard)
        end = shard.ends[-1]
    return shards, ""


def described_shards(store: Store, identity: Mapping[str, Any]) -> list[tuple[int, Shard | MxdError]]:
    """Return every shard's number and description, in order; an error in place of one that cannot be trusted."""
    numbers = shard_numbers(store.names())
    with ThreadPoolExecutor(16) as pool:  # reading from a remote store is mostly waiting
        return list(zip(numbers, pool.map(lambda n: describe_shard(store, identity, n), numbers), strict=True))


def describe_shard(store: Store, identity: Mapping[str, Any], number: int) -> Shard | MxdError:
    """Return a shard's description. Errors that say why it cannot be trusted are returned, too.

    Args:
        store: the cache.
        identity: its identity, which is part of the seal.
        number: the shard.
    """
    try:
        fields = parse_json(store.read(description_name(number)) or b"")
        seal = fields.pop("seal")
        if seal != seal_of(identity, fields) or fields["number"] != number:
            raise ValueError("it is damaged, or of another cache")
        start, *ends = (Cursor(**cursor) for cursor in (fields.pop("start"), *fields.pop("ends")))
        tokens = fields["tokens"]
        if type(tokens) is not int or not ends or tokens < len(ends) or tokens % len(ends):
            raise ValueError(f"it says that it has {tokens} tokens in {len(ends)} batches")
        return Shard(**fields, start=start, ends=tuple(ends))
    except (MxdError, ValueError, TypeError, KeyError, AttributeError) as error:
        return MxdError(f"cannot read {shard_name(store, number)}: {error}. {REMEDY}")


def check_data(path: Path, shard: Shard) -> None:
    """Check that a shard's tensors are those that were written.

    Raises:
        OSError: they are not, or cannot be read.
    """
    size = path.stat().st_size
    if size != shard.size:
        raise OSError(f"its tensors take {size:,} bytes, {shard.size:,} were written")
    if sha256(path) != shard.sha256:
        raise OSError("its tensors have another SHA-256 than when they were written")


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Report a failure in the block as a damaged shard."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise MxdError(f"cannot read {where}: {error}. {REMEDY}") from error


def shard_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the shards among the names of files, sorted."""
    matches = (re.fullmatch(r"shard-(\d{6,})\.json", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def data_name(number: int) -> str:
    """Return the name of the file with a shard's tensors."""
    return f"shard-{number:06d}.safetensors"


def scale_name(name: str) -> str:
    """Return the name of the tensor with the scales of another's rows."""
    return f"{name}_scale"


def description_name(number: int) -> str:
    """Return the name of the file that describes a shard."""
    return f"shard-{number:06d}.json"


def shard_name(store: Store, number: int) -> str:
    """Return a shard's name in messages."""
    return f"{store.name}/shard-{number:06d}"


def seal_of(identity: Mapping[str, Any], description: Mapping[str, Any]) -> str:
    """Return a hash of a shard's description and of the identity of the cache that it belongs to."""
    return hashlib.sha256(encoded([identity, description])).hexdigest()


def short_hash(value: Any) -> str:
    """Return a hash of plain data, in the short form that cursors and caches use."""
    return hashlib.sha256(encoded(value)).hexdigest()[:32]


def encoded(value: Any) -> bytes:
    """Return plain data as JSON, the same bytes for the same data."""
    return (json.dumps(value, sort_keys=True, default=str) + "\n").encode()

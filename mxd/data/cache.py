"""Activations on disk: a live stream's batches, written by any number of workers for any number of runs to read.

A shard holds up to 16 batches of one window, so that workers are independent; its number says which batches.
`shards.py` describes the files. Read in order, a float32 cache equals the live stream bit for bit; read mixed, it
serves any seed and batch size (`reading.py`).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Int8
from safetensors.torch import save_file
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.common.hardware import amount, free_disk
from mxd.common.progress import progress
from mxd.data.activations import Batch, Cursor, WindowFilter
from mxd.data.shards import (
    FORMAT,
    Shard,
    check_data,
    check_identity,
    data_name,
    describe_shard,
    described_shards,
    description_name,
    encoded,
    identity_of,
    leading_shards,
    scale_name,
    seal_of,
    shard_name,
    shard_numbers,
)
from mxd.data.store import Location, Store, open_store, sha256
from mxd.model.loading import DTYPES

SHARD_BATCHES = 16
"""The most batches in a shard."""

Dtype = Literal["float32", "float16", "bfloat16", "int8"]
"""What activations are rounded to. ``int8``: whole numbers up to 127, times a scale for each row."""

INT8_MOST = 127

Stream = Callable[[Cursor, WindowFilter], Iterator[Batch]]
"""``stream(start, accept)`` yields live batches from the window at ``start`` on, of the windows that it accepts."""


def cache_bytes(widths: Sequence[tuple[int, int]], tokens: int, dtype: Dtype = "float32") -> int:
    """Return the size of a cache in bytes.

    Args:
        widths: (d_in, d_out) of each site.
        tokens: tokens in the cache.
        dtype: the dtype of the activations; a token id takes 8 bytes, the scale of a row in 8 bits 4.
    """
    values = sum(d_in + d_out for d_in, d_out in widths)
    site_bytes = values + 8 * len(widths) if dtype == "int8" else DTYPES[dtype].itemsize * values
    return tokens * (8 + site_bytes)


def claim_cache(location: Location, identity: Mapping[str, Any], size: int, dtype: Dtype = "float32") -> None:
    """Begin a cache or continue one.

    Args:
        location: the cache's folder.
        identity: the settings that the activations depend on, among them ``batch_tokens`` and ``buffer_tokens``; a
            cache that has shards already must have the same.
        size: its size in bytes when it is complete.
        dtype: the dtype that activations are rounded to.

    Raises:
        MxdError: the folder holds something else, or the disk has no room for the rest.
    """
    store = open_store(location)
    written = {"format": FORMAT, "dtype": dtype, "shard_batches": SHARD_BATCHES, **identity}
    names = store.names()
    existing = identity_of(store) if "cache.json" in names else None
    if existing is None and (names or (store.remote is None and Path(store.root).is_file())):
        raise MxdError(f"{store.name} exists and is not an activation cache; choose another folder.")
    if existing is not None and shard_numbers(names):
        check_identity(store, existing, written)
        if existing["fingerprints"].keys() != identity["fingerprints"].keys():
            raise MxdError(
                f"the activation cache {store.name} has blocks {', '.join(existing['fingerprints'])}, asked for "
                f"{', '.join(identity['fingerprints'])}; continue it with the same blocks, or choose another folder."
            )
        written = existing
    if store.remote is None:
        _check_room(Path(store.root), size)
        try:
            Path(store.root).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MxdError(f"cannot write to {store.name}: {error.strerror}; choose another folder.") from error
    if existing != written:
        store.write("cache.json", encoded(written))


def write_cache(location: Location, stream: Stream, tokens: int, worker: tuple[int, int] = (0, 1)) -> None:
    """Write the shards of a cache of ``tokens`` tokens that are missing or damaged.

    Workers divide the windows and need not know of each other: to write a shard twice does no harm.

    Args:
        location: a folder that ``claim_cache`` has claimed.
        stream: the live batches.
        tokens: tokens that the cache is to hold, in whole batches.
        worker: ``(r, w)``: only windows r, r + w, r + 2 w ... are written.

    Raises:
        MxdError: the disk is full, the text ends too early or differs from that of the existing shards, a value is too
            large for the dtype, or another process has begun another cache in the folder meanwhile.
    """
    _write_missing(location, stream, tokens, worker)
    store = open_store(location)
    shards, problem = leading_shards(store, identity_of(store)) if worker == (0, 1) else ([], "")
    if problem and sum(shard.tokens for shard in shards) < tokens:
        raise MxdError(problem)


def _write_missing(location: Location, stream: Stream, tokens: int, worker: tuple[int, int]) -> None:
    store = open_store(location)
    identity = identity_of(store)
    layout = _Layout(identity["batch_tokens"], max(1, identity["buffer_tokens"] // identity["batch_tokens"]))
    number, workers = worker
    needed = {n: b for n, b in layout.needed(tokens).items() if n // layout.parts % workers == number}
    existing = [shard for _, shard in described_shards(store, identity) if isinstance(shard, Shard)]
    intact = _intact(store, existing, needed)
    missing = {n: b for n, b in needed.items() if n not in intact}
    if not missing:
        return
    last = max((shard.number for shard in existing), default=-1)
    windows = _Windows(layout, missing, *_begin(existing, layout, min(missing) // layout.parts))
    batches = stream(windows.start, windows)
    total = sum(needed.values()) * layout.batch_tokens
    todo = sum(missing.values()) * layout.batch_tokens
    with progress(f"caching to {store.name}", total, done=total - todo) as advance:
        for n, start, shard in windows.shards(batches):
            if n not in missing:
                continue
            if identity_of(store) != identity:
                raise MxdError(f"another process has begun another cache in {store.name}; choose another folder.")
            asked = missing.pop(n)
            _check_meets(store, identity, n, start, shard[-1].cursor)
            # A shard that others follow is written whole, the last one only as far as was asked for.
            _write_shard(store, identity, n, start, shard if n < last else shard[:asked])
            advance(min(len(shard), asked) * layout.batch_tokens)
            if len(shard) < asked:
                break
            if not missing:
                return
    raise MxdError(
        f"the text ended after {windows.tokens:,} tokens of {tokens:,}; the cache in {store.name} holds those."
    )


@dataclass(frozen=True)
class _Layout:
    """Which batches are in which shard: part p of window w is shard w * parts + p."""

    batch_tokens: int
    per_window: int
    """Batches in a window."""

    @property
    def parts(self) -> int:
        """Shards of a whole window."""
        return -(-self.per_window // SHARD_BATCHES)

    def numbers(self, window: int, batches: int) -> range:
        """Return the numbers of a window's shards, which hold its ``batches`` batches."""
        return range(window * self.parts, window * self.parts - (-batches // SHARD_BATCHES))

    def needed(self, tokens: int) -> dict[int, int]:
        """Return shard -> its number of batches, for a cache of ``tokens`` tokens."""
        sizes, batches = {}, -(-tokens // self.batch_tokens)
        for window in range(-(-batches // self.per_window)):
            here = min(self.per_window, batches - window * self.per_window)
            for part, n in enumerate(self.numbers(window, here)):
                sizes[n] = min(SHARD_BATCHES, here - part * SHARD_BATCHES)
        return sizes


class _Windows:
    """Accepts the windows that have missing shards, as the stream reaches them, and remembers where they begin."""

    def __init__(self, layout: _Layout, missing: Mapping[int, int], window: int, start: Cursor, tokens: int) -> None:
        self.layout, self.missing, self.window, self.start = layout, missing, window, start
        self.tokens = tokens
        """Tokens of the text up to the current window."""
        self.accepted: deque[tuple[int, Cursor, int]] = deque()
        """(window, where it begins, number of batches)."""

    def __call__(self, start: Cursor, batches: int) -> bool:
        accepted = any(n in self.missing for n in self.layout.numbers(self.window, batches))
        if accepted:
            self.accepted.append((self.window, start, batches))
        self.window += 1
        self.tokens += batches * self.layout.batch_tokens
        return accepted

    def shards(self, batches: Iterator[Batch]) -> Iterator[tuple[int, Cursor, list[Batch]]]:
        """Cut the batches of the accepted windows into shards: (number, where it begins, its batches)."""
        for first in batches:
            window, start, length = self.accepted.popleft()
            rest = chain([first], islice(batches, length - 1))
            for n in self.layout.numbers(window, length):
                shard = list(islice(rest, SHARD_BATCHES))
                yield n, start, shard
                start = shard[-1].cursor


def _write_shard(
    store: Store, identity: Mapping[str, Any], number: int, start: Cursor, batches: Sequence[Batch]
) -> None:
    ids = torch.cat([batch.ids for batch in batches])
    tensors = {"ids": ids}
    for block in batches[0].sites:
        for i, name in enumerate(("x", "y")):
            values = torch.cat([batch.sites[block][i] for batch in batches])
            key = f"{block}.{name}"
            if identity["dtype"] == "int8":
                tensors[key], tensors[scale_name(key)] = in_8_bits(values)
            else:
                tensors[key] = _rounded(values, identity["dtype"], f"block {block}: {name}", ids)
            tensors[f"{block}.{name}_mean"] = batches[0].means[block][i]
    with store.new_file(data_name(number)) as file:
        save_file(tensors, file)
        size, digest = file.stat().st_size, sha256(file)
    shard = Shard(number, len(ids), start, tuple(batch.cursor for batch in batches), size, digest)
    description = asdict(shard)
    for cursor in (description["start"], *description["ends"]):
        del cursor["bookmark"]  # no batch of a cache is reached through the text
    store.write(description_name(number), encoded({**description, "seal": seal_of(identity, description)}))


def _check_meets(store: Store, identity: Mapping[str, Any], number: int, start: Cursor, end: Cursor) -> None:
    """Refuse a shard that does not begin where the one before it ends, or end where the one after it begins."""
    before, after = (describe_shard(store, identity, n) for n in (number - 1, number + 1))
    if isinstance(before, Shard) and _complete(before) and before.ends[-1] != start:
        raise _apart(store, number - 1, before.ends[-1], start)
    if isinstance(after, Shard) and after.start != end:
        raise _apart(store, number, end, after.start)


def _complete(shard: Shard) -> bool:
    """Return whether a shard holds all its batches, and not only those that were asked for when it was written."""
    return len(shard.ends) == SHARD_BATCHES or shard.ends[-1].batch == 0


def _apart(store: Store, number: int, end: Cursor, start: Cursor) -> MxdError:
    return MxdError(
        f"{shard_name(store, number)} ends at {end} and {shard_name(store, number + 1)} begins at {start}: the text "
        "has changed since one of them was written. Put it back, or write a new cache in another folder."
    )


def in_8_bits(
    values: Float[Tensor, "tokens d"],
) -> tuple[Int8[Tensor, "tokens d"], Float[Tensor, " tokens"]]:
    """Return rows of whole numbers up to 127, and their scales; products are off by half a scale at most."""
    scales = values.abs().amax(-1) / INT8_MOST
    scales = torch.where(scales > 0, scales, 1.0)  # rows of zeros, or of numbers too small to be divided
    return (values / scales.unsqueeze(-1)).round().to(torch.int8), scales


def _rounded(
    values: Float[Tensor, "tokens d"], dtype: Dtype, what: str, ids: Int[Tensor, " tokens"]
) -> Float[Tensor, "tokens d"]:
    """Round activations to the dtype they are stored in; refuse overflow, and rows that would all become zero."""
    stored = values.to(DTYPES[dtype])
    wrong = stored.isinf() | ((stored == 0).all(-1, keepdim=True) & (values != 0))
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        limits = torch.finfo(stored.dtype)
        raise MxdError(
            f"{what} has a value of {float(values[row, column]):g}, at token id {int(ids[row])}, which {dtype} cannot "
            f"hold (up to {limits.max:g}); cache as {'bfloat16' if dtype == 'float16' else 'float32'}."
        )
    return stored


def _check_room(folder: Path, size: int) -> None:
    written = sum(file.stat().st_size for file in folder.glob("shard-*.safetensors"))
    free = free_disk(folder)
    if size - written > free:
        raise MxdError(
            f"the cache needs {amount(size - written)} more and {amount(free)} are free at {folder}; "
            "lower training.tokens, cache fewer blocks, cache as bfloat16 or int8, or choose another disk."
        )


def _intact(store: Store, existing: Sequence[Shard], needed: Mapping[int, int]) -> set[int]:
    """Return which of the needed shards exist with all their batches, undamaged."""
    intact = set()
    candidates = [shard for shard in existing if shard.number in needed and len(shard.ends) >= needed[shard.number]]
    with progress(f"verifying {store.name}", sum(shard.tokens for shard in candidates)) as advance:
        for shard in candidates:
            try:
                with store.local(data_name(shard.number)) as path:
                    check_data(path, shard)
                intact.add(shard.number)
            except (MxdError, OSError):
                pass
            advance(shard.tokens)
    return intact


def _begin(existing: Sequence[Shard], layout: _Layout, window: int) -> tuple[int, Cursor, int]:
    """Return the last window up to a given one whose start is known, that start, and the number of tokens before it.

    The text must be read from there on. A window's start is known from its own first shard, or from the last shard of
    the window before, which ends at batch 0 of the next.
    """
    known = {0: (Cursor(), 0)}
    for shard in existing:
        current, part = divmod(shard.number, layout.parts)
        before = current * layout.per_window * layout.batch_tokens
        if part == 0:
            known[current] = (shard.start, before)
        if shard.ends[-1].batch == 0:
            known[current + 1] = (shard.ends[-1], before + part * SHARD_BATCHES * layout.batch_tokens + shard.tokens)
    last = max(n for n in known if n <= window)
    return last, *known[last]

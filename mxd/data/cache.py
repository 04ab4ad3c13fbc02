"""Activations on disk: a live stream's batches, written by any number of workers and read back for any number of runs.

A shard holds up to 16 batches of one window, so that a worker needs nothing of another; its number says which. It is
whole or not there: its tensors come first, then its JSON, which names their SHA-256. Read in order, a float32 cache
equals the live stream bit for bit; read mixed, it serves any seed and batch size.

cache.json                what the activations are of
shard-000000.safetensors  ids, x and y of every layer, and the means of these over the window
shard-000000.json         where in the text it begins and each of its batches ends; size and SHA-256 of its tensors
"""

import hashlib
import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, count, islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mxd.common.errors import MxdError, typed
from mxd.common.parsing import parse_json
from mxd.common.progress import progress
from mxd.data.activations import Batch, Cursor, Mine
from mxd.data.store import Location, Store, open_store, sha256
from mxd.model.loading import DTYPES

FORMAT = 3

SHARD_BATCHES = 16
"""Batches in a shard, at most."""

UNKNOWN = ("revision", "text")
"""What is ``None`` where it cannot be known: of a folder or a loaded model; of a text that is not on this machine."""

ANEW = "`mxd cache` writes it anew, and nothing else."
"""What to do about a shard that is damaged or missing."""

Dtype = Literal["float32", "float16", "bfloat16"]
Stream = Callable[[Cursor, Mine], Iterator[Batch]]
"""``stream(start, mine)`` yields live batches from a window on, of the windows that are ``mine``."""


def cache_bytes(widths: Sequence[tuple[int, int]], tokens: int, dtype: Dtype = "float32") -> int:
    """Return the size on disk of ``tokens`` tokens at sites of the given (d_in, d_out)."""
    return tokens * (8 + DTYPES[dtype].itemsize * sum(d_in + d_out for d_in, d_out in widths))


def claim_cache(location: Location, identity: Mapping[str, Any], size: int, dtype: Dtype = "float32") -> None:
    """Begin a cache or continue one.

    Args:
        location: the cache's folder.
        identity: what the activations are of, ``batch_tokens`` and ``buffer_tokens`` among it; a cache that holds any
            must be of the same.
        size: its size in bytes when it is done.
        dtype: what activations are rounded to.

    Raises:
        MxdError: the folder holds something else, or the disk has no room for the rest.
    """
    store = open_store(location)
    own = {"format": FORMAT, "dtype": dtype, "shard_batches": SHARD_BATCHES, **identity}
    names = store.names()
    held = _held(store) if "cache.json" in names else None
    if held is None and (names or (store.remote is None and Path(store.root).is_file())):
        raise MxdError(f"{store.name} exists and is not an activation cache; choose another folder.")
    if held is not None and _numbers(names):
        _check(store, held, own)
        if held["fingerprints"].keys() != identity["fingerprints"].keys():
            raise MxdError(
                f"the activation cache {store.name} has layers {', '.join(held['fingerprints'])}, asked for "
                f"{', '.join(identity['fingerprints'])}; it goes on with the same layers, or choose another folder."
            )
        own = held
    if store.remote is None:
        _check_room(Path(store.root), size)
        try:
            Path(store.root).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MxdError(f"cannot write to {store.name}: {error.strerror}; choose another folder.") from error
    if held != own:
        store.write("cache.json", _encoded(own))


def write_cache(location: Location, stream: Stream, tokens: int, worker: tuple[int, int] = (0, 1)) -> None:
    """Write the shards that a cache of ``tokens`` tokens lacks, or holds damaged.

    Workers divide the windows and need not know of each other: one that writes what another has written does no harm.

    Args:
        location: a folder that ``claim_cache`` has claimed.
        stream: the live batches.
        tokens: tokens the cache is to hold, in whole batches.
        worker: ``(r, w)``: only windows r, r + w, r + 2 w ... are looked at.

    Raises:
        MxdError: the disk is full, the text ends before or is another than that of the shards that are there, a value
            is too large for the dtype, or the cache became one of something else meanwhile.
    """
    _write_missing(location, stream, tokens, worker)
    store = open_store(location)
    shards, problem = _shards(store, _held(store)) if worker == (0, 1) else ([], "")
    if problem and sum(shard.tokens for shard in shards) < tokens:
        raise MxdError(problem)


def _write_missing(location: Location, stream: Stream, tokens: int, worker: tuple[int, int]) -> None:
    store = open_store(location)
    held = _held(store)
    layout = _Layout(held["batch_tokens"], max(1, held["buffer_tokens"] // held["batch_tokens"]))
    number, workers = worker
    own = {n: b for n, b in layout.needed(tokens).items() if n // layout.parts % workers == number}
    there = [shard for _, shard in _described(store, held) if isinstance(shard, _Shard)]
    whole = _whole(store, there, own)
    missing = {n: b for n, b in own.items() if n not in whole}
    if not missing:
        return
    last = max((shard.number for shard in there), default=-1)
    windows = _Windows(layout, missing, *_begin(there, layout, min(missing) // layout.parts))
    batches = stream(windows.start, windows)
    total = sum(own.values()) * layout.batch_tokens
    todo = sum(missing.values()) * layout.batch_tokens
    with progress(f"caching to {store.name}", total, done=total - todo) as advance:
        for n, start, shard in windows.shards(batches):
            if n not in missing:
                continue
            if _held(store) != held:
                raise MxdError(f"another process has begun another cache in {store.name}; choose another folder.")
            asked = missing.pop(n)
            _check_meets(store, held, n, start, shard[-1].cursor)
            _write_shard(store, held, n, start, shard if n < last else shard[:asked])
            advance(min(len(shard), asked) * layout.batch_tokens)
            if len(shard) < asked:
                break
            if not missing:
                return
    raise MxdError(
        f"the text ended after {windows.tokens:,} tokens of {tokens:,}; the cache in {store.name} holds those."
    )


def check_cache(location: Location, identity: Mapping[str, Any]) -> None:
    """Check that a cache holds what is asked for.

    Args:
        location: the cache.
        identity: what is asked for; of ``fingerprints`` (layer -> hash of its MLP) some of the cache's.

    Raises:
        MxdError: no cache there, or one of other activations; the differences are named.
    """
    store = open_store(location)
    _check(store, _held(store), identity)


def cache_hash(location: Location) -> str:
    """Return a hash of what a cache says it is of, its dtype included.

    Raises:
        MxdError: no cache there.
    """
    return _hash(_held(open_store(location)))


def cached_tokens(location: Location) -> int:
    """Return how many tokens a cache holds, up to the first shard that is missing."""
    store = open_store(location)
    return sum(shard.tokens for shard in _shards(store, _held(store))[0])


def cached_batches(
    location: Location,
    layers: Sequence[int],
    start: Cursor | None = None,
    device: torch.device | str = "cpu",
    part: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yield a cache's batches, the same as the live stream's.

    Args:
        location: the cache.
        layers: which of its layers.
        start: where to begin; a place between two of its batches.
        device: where the activations go.
        part: ``(s, parts)``: only the rows of part s of each batch.

    Raises:
        MxdError: a shard is damaged or missing, or ``start`` is not in the cache.
    """
    store = open_store(location)
    shards, problem = _shards(store, _held(store))
    starts = [Cursor(), *(end for shard in shards for end in shard.ends)]
    if start is not None and start not in starts:
        if any(start == replace(place, text=start.text) for place in starts):
            raise MxdError(
                f"the activation cache {store.name} is of another text than the one that was read up to {start}; put "
                "back the cache that the run began with, or start anew under another name with --run NAME."
            )
        raise MxdError(
            f"the activation cache {store.name} has no batch that begins at {start}; it ends at {starts[-1]}. {problem}"
        )
    skip = starts.index(start or Cursor())
    while shards and skip >= len(shards[0].ends):
        skip -= len(shards[0].ends)
        del shards[0]
    for shard, file in zip(shards, _opened(store, shards, depth=2), strict=True):
        rows = shard.tokens // len(shard.ends)
        for b in range(skip, len(shard.ends)):
            runs = [_Run(file, b * rows, (b + 1) * rows)]
            yield _read(runs, layers, file.means(layers), shard.ends[b], device, part)
        skip = 0
    if problem:
        raise MxdError(problem)


def mixed_batches(
    location: Location,
    layers: Sequence[int],
    batch_tokens: int,
    shards_at_once: int,
    seed: int = 0,
    start: Cursor | None = None,
    device: torch.device | str = "cpu",
    part: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yield a cache's tokens in another order, epoch after epoch, without end; every token once in each epoch.

    An epoch's shards, in an order drawn from the seed, are taken in groups of about ``shards_at_once``. Each batch
    takes from every shard of the group as large a share as from the others, as one run of its rows (which are a random
    permutation of a window already), from a row on that is drawn anew for each epoch.

    A ``Cursor`` here names a group, counted over all epochs; how many of its tokens went to a batch begun in the group
    before; how many batches follow these; and, for a text, the cache's shards.

    Args:
        location: the cache.
        layers: which of its layers.
        batch_tokens: tokens in a batch.
        shards_at_once: shards mixed at a time.
        seed: orders the shards.
        start: where to begin.
        device: where the activations go.
        part: ``(s, parts)``: only the rows of part s of each batch.

    Raises:
        MxdError: a shard is damaged or missing, the cache holds less than a batch, or it has other shards than when
            ``start`` was reached.
    """
    store = open_store(location)
    shards, problem = _shards(store, _held(store))
    if problem:
        raise MxdError(problem)
    lengths = np.array([shard.tokens for shard in shards], dtype=np.int64)
    if lengths.sum() < batch_tokens:
        raise MxdError(f"the activation cache {store.name} holds {lengths.sum():,} tokens, less than one batch.")
    begin = start or Cursor()
    text = _hash([cache_hash(location), [(shard.tokens, shard.ends[-1].text) for shard in shards]])
    if begin.text not in ("", text):
        raise MxdError(
            f"the activation cache {store.name} has other shards than when the run was saved, so they would be mixed "
            "otherwise; put back those, or start anew under another name with --run NAME."
        )
    order = (shards[m] for group in count(begin.context) for m in _group(lengths, shards_at_once, seed, group)[0])
    opened = _opened(store, order, depth=min(shards_at_once, len(shards)))
    group, files, runs = -1, {}, []
    for take in mixed_runs(lengths, batch_tokens, shards_at_once, seed, begin):
        if take.group != group:
            group = take.group
            files = {m: next(opened) for m in take.members}
            means = _mean({files[m]: int(lengths[m]) for m in take.members}, layers)
        runs += [_Run(files[m], low, high) for m, low, high in take.runs]
        if take.end is not None:
            yield _read(runs, layers, means, replace(take.end, text=text), device, part)
            runs = []


@dataclass(frozen=True)
class Take:
    """What one batch, or its part in one group of shards, is made of."""

    group: int
    """Which group, counted over all epochs."""
    members: tuple[int, ...]
    """The group's shards."""
    runs: tuple[tuple[int, int, int], ...]
    """(shard, first row, row after the last)."""
    end: Cursor | None
    """Where the next batch is; ``None`` where the batch goes on in the next group."""


def mixed_runs(
    lengths: Int[np.ndarray, " shards"], batch_tokens: int, shards_at_once: int, seed: int, start: Cursor
) -> Iterator[Take]:
    """Yield which rows of which shards the batches of ``mixed_batches`` are made of.

    Args:
        lengths: tokens in each shard.
        batch_tokens: tokens in a batch.
        shards_at_once: shards in a group, about.
        seed: orders the shards.
        start: where to begin.
    """
    lacking = 0  # tokens that the batch begun in the group before still needs
    for group in count(start.context):
        members, turns = _group(lengths, shards_at_once, seed, group)
        left = lengths[members]
        total = int(left.sum())
        offset = start.offset if group == start.context else min(lacking, total)
        skipped = offset + start.batch * batch_tokens if group == start.context else 0
        for begin, end in pairwise(sorted({0, offset, *range(offset, total, batch_tokens), total})):
            taken = _share(left, end - begin)
            if begin >= skipped:
                whole = (end - offset) % batch_tokens == 0 if end > offset else lacking == offset
                here = Cursor(group, offset, (end - offset) // batch_tokens) if end < total else Cursor(group + 1)
                runs = _runs(members, (lengths[members] - left + turns) % lengths[members], taken, lengths)
                yield Take(group, tuple(map(int, members)), runs, here if whole else None)
            left = left - taken
        lacking = lacking - total if offset == total < lacking else -(total - offset) % batch_tokens


def _group(
    lengths: Int[np.ndarray, " shards"], shards_at_once: int, seed: int, group: int
) -> tuple[Int[np.ndarray, " members"], Int[np.ndarray, " members"]]:
    """Return a group's shards, and the row that each begins at in this epoch."""
    groups = -(-len(lengths) // shards_at_once)
    epoch, place = divmod(group, groups)
    rng = np.random.default_rng([seed, epoch])
    members = np.array_split(rng.permutation(len(lengths)), groups)[place]
    return members, rng.integers(lengths)[members]


def _share(left: Int[np.ndarray, " members"], tokens: int) -> Int[np.ndarray, " members"]:
    """Divide tokens over shards in proportion to what is left of each; the largest remainders are rounded up."""
    exact, rest = np.divmod(left * tokens, left.sum())
    up = np.argsort(-rest, kind="stable")[: tokens - exact.sum()]
    exact[up] += 1
    return exact


def _runs(
    members: Int[np.ndarray, " members"],
    begins: Int[np.ndarray, " members"],
    taken: Int[np.ndarray, " members"],
    lengths: Int[np.ndarray, " shards"],
) -> tuple[tuple[int, int, int], ...]:
    """Return (shard, first row, row after the last); a run beyond a shard's end goes on at its beginning."""
    found = []
    for shard, begin, tokens in zip(members.tolist(), begins.tolist(), taken.tolist(), strict=True):
        length = int(lengths[shard])
        found += [(shard, begin, min(begin + tokens, length)), (shard, 0, begin + tokens - length)]
    return tuple(run for run in found if run[1] < run[2])


@dataclass(frozen=True)
class _Layout:
    """Which batches are in which shard: part p of window w is number w * parts + p."""

    batch_tokens: int
    per_window: int
    """Batches in a window."""

    @property
    def parts(self) -> int:
        """Shards of a whole window."""
        return -(-self.per_window // SHARD_BATCHES)

    def numbers(self, window: int, batches: int) -> range:
        """Return the shards of a window of so many batches."""
        return range(window * self.parts, window * self.parts - (-batches // SHARD_BATCHES))

    def needed(self, tokens: int) -> dict[int, int]:
        """Return shard -> its batches, for a cache of so many tokens."""
        found, batches = {}, -(-tokens // self.batch_tokens)
        for window in range(-(-batches // self.per_window)):
            here = min(self.per_window, batches - window * self.per_window)
            for part, n in enumerate(self.numbers(window, here)):
                found[n] = min(SHARD_BATCHES, here - part * SHARD_BATCHES)
        return found


class _Windows:
    """Accepts the windows that a missing shard is of, as the stream comes to them, and remembers them."""

    def __init__(self, layout: _Layout, missing: Mapping[int, int], window: int, start: Cursor, tokens: int) -> None:
        self.layout, self.missing, self.window, self.start = layout, missing, window, start
        self.tokens = tokens
        """Tokens of the text up to here."""
        self.accepted: deque[tuple[int, Cursor, int]] = deque()
        """(window, where it begins, its batches)."""

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
            window, start, held = self.accepted.popleft()
            rest = chain([first], islice(batches, held - 1))
            for n in self.layout.numbers(window, held):
                shard = list(islice(rest, SHARD_BATCHES))
                yield n, start, shard
                start = shard[-1].cursor


@dataclass(frozen=True)
class _Shard:
    """What a shard's JSON says."""

    number: int
    tokens: int
    start: Cursor
    ends: tuple[Cursor, ...]
    size: int
    sha256: str

    @property
    def complete(self) -> bool:
        """Whether it holds all that belongs into it, and not only what was asked for then."""
        return len(self.ends) == SHARD_BATCHES or self.ends[-1].batch == 0


class _File:
    """The tensors of a whole shard, mapped into memory."""

    def __init__(self, store: Store, shard: _Shard) -> None:
        self.where = _where(store, shard.number)
        with store.local(_data(shard.number)) as path, _readable(self.where):
            _check_data(path, shard)
            self.tensors = safe_open(path, "pt")

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows of a tensor."""
        with _readable(self.where):
            return self.tensors.get_slice(name)[begin:end]

    def means(self, layers: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return layer -> the means of the window that the shard is of."""
        with _readable(self.where):
            get = self.tensors.get_tensor
            return {layer: (get(f"{layer}.x_mean"), get(f"{layer}.y_mean")) for layer in layers}


@dataclass(frozen=True)
class _Run:
    file: _File
    begin: int
    end: int


def _read(
    runs: Sequence[_Run],
    layers: Sequence[int],
    means: Mapping[int, tuple[Tensor, Tensor]],
    end: Cursor,
    device: torch.device | str,
    part: tuple[int, int],
) -> Batch:
    runs = _rows_of(runs, part)

    def read(name: str) -> Tensor:
        pieces = [run.file.rows(name, run.begin, run.end) for run in runs]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(device)

    return Batch(
        sites={layer: (read(f"{layer}.x").float(), read(f"{layer}.y").float()) for layer in layers},
        ids=read("ids"),
        means={layer: (x.to(device), y.to(device)) for layer, (x, y) in means.items()},
        cursor=end,
    )


def _rows_of(runs: Sequence[_Run], part: tuple[int, int]) -> list[_Run]:
    """Return part s of the rows of a batch that is made of runs."""
    number, parts = part
    total = sum(run.end - run.begin for run in runs)
    if total % parts:
        raise MxdError(f"a batch of {total:,} tokens cannot be divided into {parts} equal parts; change batch_tokens.")
    low, high = number * total // parts, (number + 1) * total // parts
    found, place = [], 0
    for run in runs:
        begin = max(run.begin, run.begin + low - place)
        end = min(run.end, run.begin + high - place)
        if begin < end:
            found.append(_Run(run.file, begin, end))
        place += run.end - run.begin
    return found


def _mean(files: Mapping[_File, int], layers: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the means of several shards' windows, weighted by the shards' tokens."""
    weights = torch.tensor(list(files.values()), dtype=torch.float32)
    weights /= weights.sum()
    means = [file.means(layers) for file in files]
    return {
        layer: (
            weights @ torch.stack([m[layer][0] for m in means]),
            weights @ torch.stack([m[layer][1] for m in means]),
        )
        for layer in layers
    }


def _opened(store: Store, shards: Iterable[_Shard], depth: int) -> Iterator[_File]:
    """Open shards in order; the next ``depth`` are fetched and verified meanwhile, up to four at a time."""
    rest = iter(shards)
    with ThreadPoolExecutor(min(depth, 4), "mxd-shards") as pool:
        try:
            pending = deque(pool.submit(_File, store, shard) for shard in islice(rest, depth))
            while pending:
                file = pending.popleft().result()
                pending.extend(pool.submit(_File, store, shard) for shard in islice(rest, 1))
                yield file
        finally:  # nobody waits for what nobody will read
            pool.shutdown(cancel_futures=True)


def _write_shard(store: Store, held: Mapping[str, Any], number: int, start: Cursor, batches: Sequence[Batch]) -> None:
    ids = torch.cat([batch.ids for batch in batches])
    tensors = {"ids": ids}
    for layer in batches[0].sites:
        for i, name in enumerate(("x", "y")):
            values = torch.cat([batch.sites[layer][i] for batch in batches])
            tensors[f"{layer}.{name}"] = _rounded(values, held["dtype"], f"layer {layer}: {name}", ids)
            tensors[f"{layer}.{name}_mean"] = batches[0].means[layer][i]
    with store.new_file(_data(number)) as file:
        save_file(tensors, file)
        size, digest = file.stat().st_size, sha256(file)
    shard = _Shard(number, len(ids), start, tuple(batch.cursor for batch in batches), size, digest)
    said = asdict(shard)
    store.write(_description(number), _encoded({**said, "seal": _seal(held, said)}))


def _check_meets(store: Store, held: Mapping[str, Any], number: int, start: Cursor, end: Cursor) -> None:
    """Refuse a shard that does not begin where the one before it ends, or end where the one after it begins."""
    before, after = (_describe(store, held, n) for n in (number - 1, number + 1))
    if isinstance(before, _Shard) and before.complete and before.ends[-1] != start:
        raise _apart(store, number - 1, before.ends[-1], start)
    if isinstance(after, _Shard) and after.start != end:
        raise _apart(store, number, end, after.start)


def _apart(store: Store, number: int, end: Cursor, start: Cursor) -> MxdError:
    return MxdError(
        f"{_where(store, number)} ends at {end} and {_where(store, number + 1)} begins at {start}: the text is another "
        "than when one of them was written. Put it back, or write a cache anew in another folder."
    )


def _rounded(values: Float[Tensor, "tokens d"], dtype: Dtype, what: str, ids: Int[Tensor, " tokens"]) -> Tensor:
    """Round activations to what they are stored as."""
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


def _check(store: Store, held: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    said = {"text": "its text, by the hash of its files", "model": "its base model, by the hash of all weights"}
    differences = [
        f"{said.get(key, key)}: {held.get(key)!r}, asked for {value!r}"
        for key, value in wanted.items()
        if key != "fingerprints" and held.get(key) != value
        if not (key in UNKNOWN and None in (held.get(key), value))
    ]
    for layer, fingerprint in wanted["fingerprints"].items():
        own = held["fingerprints"].get(layer)
        if own is None:
            differences.append(f"it has layers {', '.join(held['fingerprints'])}, asked for {layer}")
        elif own != fingerprint:
            differences.append(f"layer {layer} is of another base model (fingerprint {own}, asked for {fingerprint})")
    if differences:
        raise MxdError(
            f"the activation cache {store.name} holds something else: {'; '.join(differences)}. Put back what was "
            "changed, or write another: mxd cache CONFIG FOLDER"
        )


def _check_room(folder: Path, size: int) -> None:
    there = sum(file.stat().st_size for file in folder.glob("shard-*.safetensors"))
    existing_parent = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(existing_parent).free
    if size - there > free:
        raise MxdError(
            f"the cache needs {(size - there) / 2**30:.1f} GiB more and {free / 2**30:.1f} GiB are free at {folder}; "
            "lower training.tokens, cache fewer layers, cache as bfloat16, or choose another disk."
        )


def _held(store: Store) -> dict[str, Any]:
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


def _shards(store: Store, held: Mapping[str, Any]) -> tuple[list[_Shard], str]:
    """Return the shards up to the first that is missing or unclear, and what is wrong with that one."""
    found: list[_Shard] = []
    end = Cursor()
    for place, (number, shard) in enumerate(_described(store, held)):
        where = _where(store, place)
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


def _described(store: Store, held: Mapping[str, Any]) -> list[tuple[int, _Shard | MxdError]]:
    """Return every shard there is, in order: what its JSON says, or why that cannot be believed."""
    numbers = _numbers(store.names())
    with ThreadPoolExecutor(16) as pool:  # elsewhere than on this machine, waiting is what takes the time
        return list(zip(numbers, pool.map(lambda n: _describe(store, held, n), numbers), strict=True))


def _describe(store: Store, held: Mapping[str, Any], number: int) -> _Shard | MxdError:
    """Return what a shard's JSON says, or why that cannot be believed."""
    try:
        said = parse_json(store.read(_description(number)) or b"")
        seal = said.pop("seal")
        if seal != _seal(held, said) or said["number"] != number:
            raise ValueError("it is damaged, or of another cache")
        start, *ends = (Cursor(**cursor) for cursor in (said.pop("start"), *said.pop("ends")))
        tokens = said["tokens"]
        if type(tokens) is not int or not ends or tokens < len(ends) or tokens % len(ends):
            raise ValueError(f"it says that it has {tokens} tokens in {len(ends)} batches")
        return _Shard(**said, start=start, ends=tuple(ends))
    except (MxdError, ValueError, TypeError, KeyError, AttributeError) as error:
        return MxdError(f"cannot read {_where(store, number)}: {error}. {ANEW}")


def _whole(store: Store, there: Sequence[_Shard], asked: Mapping[int, int]) -> set[int]:
    """Return which of the shards asked for are there with all their batches, undamaged."""
    found = set()
    own = [shard for shard in there if shard.number in asked and len(shard.ends) >= asked[shard.number]]
    with progress(f"verifying {store.name}", sum(shard.tokens for shard in own)) as advance:
        for shard in own:
            try:
                with store.local(_data(shard.number)) as path:
                    _check_data(path, shard)
                found.add(shard.number)
            except (MxdError, OSError):
                pass
            advance(shard.tokens)
    return found


def _begin(there: Sequence[_Shard], layout: _Layout, window: int) -> tuple[int, Cursor, int]:
    """Return the last window up to a given one whose place is known, that place, and the tokens before it."""
    known = {0: (Cursor(), 0)}
    for shard in there:
        own, part = divmod(shard.number, layout.parts)
        before = own * layout.per_window * layout.batch_tokens
        if part == 0:
            known[own] = (shard.start, before)
        if shard.ends[-1].batch == 0:
            known[own + 1] = (shard.ends[-1], before + part * SHARD_BATCHES * layout.batch_tokens + shard.tokens)
    last = max(n for n in known if n <= window)
    return last, *known[last]


def _check_data(path: Path, shard: _Shard) -> None:
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


def _numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the shards among the names of files, sorted."""
    found = (re.fullmatch(r"shard-(\d{6,})\.json", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _data(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


def _description(number: int) -> str:
    return f"shard-{number:06d}.json"


def _where(store: Store, number: int) -> str:
    return f"{store.name}/shard-{number:06d}"


def _seal(held: Mapping[str, Any], said: Mapping[str, Any]) -> str:
    """Return a hash of what a shard says of itself and of the cache that it belongs to."""
    return hashlib.sha256(_encoded([held, said])).hexdigest()


def _hash(value: Any) -> str:
    return hashlib.sha256(_encoded(value)).hexdigest()[:32]


def _encoded(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True, default=str) + "\n").encode()

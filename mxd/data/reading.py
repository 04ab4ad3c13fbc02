"""Batches from a cache: in the order in which they were written, or mixed."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.data.activations import Batch, Cursor
from mxd.data.mixing import group_of, mixed_runs
from mxd.data.shards import Shard, ShardFile, check_identity, identity_of, leading_shards, short_hash
from mxd.data.store import Location, Store, open_store


def check_cache(location: Location, identity: Mapping[str, Any]) -> None:
    """Check that a cache holds the activations that a run needs.

    Args:
        location: the cache.
        identity: the settings that the activations depend on; ``fingerprints`` (block -> hash of its MLP) may name some
            of the cache's blocks.

    Raises:
        MxdError: there is no cache, or one of other activations; the differences are named.
    """
    store = open_store(location)
    check_identity(store, identity_of(store), identity)


def cache_hash(location: Location) -> str:
    """Return a hash of a cache's identity, its dtype included.

    Raises:
        MxdError: there is no cache.
    """
    return short_hash(identity_of(open_store(location)))


def cached_tokens(location: Location) -> int:
    """Return how many tokens a cache holds, up to the first shard that is missing."""
    store = open_store(location)
    return sum(shard.tokens for shard in leading_shards(store, identity_of(store))[0])


def cached_batches(
    location: Location,
    blocks: Sequence[int],
    start: Cursor | None = None,
    device: torch.device | str = "cpu",
    part: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yield a cache's batches, the same as the live stream's.

    Args:
        location: the cache.
        blocks: which of its blocks.
        start: where to begin; a position between two of its batches.
        device: where the activations go.
        part: ``(s, parts)``: only the rows of part s of each batch.

    Raises:
        MxdError: a shard is damaged or missing, or ``start`` is not in the cache.
    """
    store = open_store(location)
    shards, problem = leading_shards(store, identity_of(store))
    starts = [Cursor(), *(end for shard in shards for end in shard.ends)]
    if start is not None and start not in starts:
        if any(start == replace(cursor, text=start.text) for cursor in starts):
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
        means = _moved(file.means(blocks), device)
        for b in range(skip, len(shard.ends)):
            runs = [_Run(file, b * rows, (b + 1) * rows)]
            yield _read(runs, blocks, means, shard.ends[b], device, part)
        skip = 0
    if problem:
        raise MxdError(problem)


def mixed_batches(
    location: Location,
    blocks: Sequence[int],
    batch_tokens: int,
    shards_at_once: int,
    seed: int = 0,
    start: Cursor | None = None,
    device: torch.device | str = "cpu",
    part: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yield a cache's tokens in another order, epoch after epoch, without end; every token once in each epoch.

    An epoch's shards, in an order drawn from the seed, are taken in groups of about ``shards_at_once``. Each batch
    takes an equal share of every shard of the group, as one run of its rows (which are a random permutation of a window
    already), beginning at a row that is drawn again for each epoch.

    A ``Cursor`` here names a group, counted over all epochs; how many of its tokens went to a batch begun in the group
    before; how many batches follow these; and, in place of the text's hash, a hash of the cache's shards.

    Args:
        location: the cache.
        blocks: which of its blocks.
        batch_tokens: tokens in a batch.
        shards_at_once: shards mixed at a time.
        seed: determines the order of the shards.
        start: where to begin.
        device: where the activations go.
        part: ``(s, parts)``: only the rows of part s of each batch.

    Raises:
        MxdError: a shard is damaged or missing, the cache holds less than a batch, or its shards have changed since
            ``start`` was reached.
    """
    store = open_store(location)
    shards, problem = leading_shards(store, identity_of(store))
    if problem:
        raise MxdError(problem)
    lengths = np.array([shard.tokens for shard in shards], dtype=np.int64)
    if lengths.sum() < batch_tokens:
        raise MxdError(f"the activation cache {store.name} holds {lengths.sum():,} tokens, less than one batch.")
    begin = start or Cursor()
    text = short_hash([cache_hash(location), [(shard.tokens, shard.ends[-1].text) for shard in shards]])
    if begin.text not in ("", text):
        raise MxdError(
            f"the activation cache {store.name} has other shards than when the run was saved, so they would be mixed "
            "differently; put those back, or start anew under another name with --run NAME."
        )
    order = (shards[m] for group in count(begin.context) for m in group_of(lengths, shards_at_once, seed, group)[0])
    opened = _opened(store, order, depth=min(shards_at_once, len(shards)))
    group, files, runs = -1, {}, []
    for take in mixed_runs(lengths, batch_tokens, shards_at_once, seed, begin):
        if take.group != group:
            group = take.group
            files = {m: next(opened) for m in take.members}
            means = _moved(_mean({files[m]: int(lengths[m]) for m in take.members}, blocks), device)
        runs += [_Run(files[m], low, high) for m, low, high in take.runs]
        if take.end is not None:
            yield _read(runs, blocks, means, replace(take.end, text=text), device, part)
            runs = []


@dataclass(frozen=True)
class _Run:
    file: ShardFile
    begin: int
    end: int


def _read(
    runs: Sequence[_Run],
    blocks: Sequence[int],
    means: Mapping[int, tuple[Tensor, Tensor]],
    end: Cursor,
    device: torch.device | str,
    part: tuple[int, int],
) -> Batch:
    runs = _rows_of(runs, part)

    def read(name: str) -> Tensor:
        pieces = [run.file.rows(name, run.begin, run.end) for run in runs]
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if torch.device(device).type != "cuda":
            return rows.to(device)
        return rows.pin_memory().to(device, non_blocking=True)  # the GPU fetches it between two steps, nobody waits

    return Batch(
        sites={block: (read(f"{block}.x").float(), read(f"{block}.y").float()) for block in blocks},
        ids=read("ids"),
        means=dict(means),
        cursor=end,
    )


def _moved(
    means: Mapping[int, tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"]]], device: torch.device | str
) -> dict[int, tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"]]]:
    """Return block -> means on a device."""
    return {block: (x.to(device), y.to(device)) for block, (x, y) in means.items()}


def _rows_of(runs: Sequence[_Run], part: tuple[int, int]) -> list[_Run]:
    """Return part s of the rows of a batch that is made of runs: those from ``low`` to ``high``, counted over all."""
    number, parts = part
    total = sum(run.end - run.begin for run in runs)
    if total % parts:
        raise MxdError(f"a batch of {total:,} tokens cannot be divided into {parts} equal parts; change batch_tokens.")
    low, high = number * total // parts, (number + 1) * total // parts
    kept, done = [], 0  # rows of the batch in the runs before
    for run in runs:
        begin = max(run.begin, run.begin + low - done)
        end = min(run.end, run.begin + high - done)
        if begin < end:
            kept.append(_Run(run.file, begin, end))
        done += run.end - run.begin
    return kept


def _mean(
    files: Mapping[ShardFile, int], blocks: Sequence[int]
) -> dict[int, tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"]]]:
    """Return block -> the means of several shards' windows, weighted by the shards' tokens."""
    weights = torch.tensor(list(files.values()), dtype=torch.float32)
    weights /= weights.sum()
    means = [file.means(blocks) for file in files]
    return {
        block: (
            weights @ torch.stack([m[block][0] for m in means]),
            weights @ torch.stack([m[block][1] for m in means]),
        )
        for block in blocks
    }


def _opened(store: Store, shards: Iterable[Shard], depth: int) -> Iterator[ShardFile]:
    """Open shards in order, while threads fetch and verify the next ``depth``, up to four at a time."""
    rest = iter(shards)
    with ThreadPoolExecutor(min(depth, 4), "mxd-shards") as pool:
        try:
            pending = deque(pool.submit(ShardFile, store, shard) for shard in islice(rest, depth))
            while pending:
                file = pending.popleft().result()
                pending.extend(pool.submit(ShardFile, store, shard) for shard in islice(rest, 1))
                yield file
        finally:  # shards that nobody will read are not waited for
            pool.shutdown(cancel_futures=True)

"""Which rows of which shards make up the batches of a cache that is read in another order.

An epoch's shards are shuffled and cut into groups. The tokens of a group are used up batch by batch. Each batch takes
from every shard in proportion to what is left of it, so that all run out together. Tokens left over at the end begin a
batch that the next group completes. Only the position of a batch is saved: to resume, its group is counted through
again.

For example, with shards of 6, 3, 6 and 3 tokens, two at a time, in batches of 4 (seed 0):

group 0: shards 2 and 0, from rows 0 and 1 on  12 tokens: three batches, each of 2 rows of either shard;
                                               the third takes rows 4 and 5 of shard 2, and 5 and 0 of shard 0
group 1: shards 1 and 3, from row 0 on         6 tokens: a batch, and row 2 of both, which begin another
group 2: shards 3 and 0 (the next epoch)       9 tokens: 2 complete that batch, 4 are the next, 3 begin another
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from jaxtyping import Int

from mxd.data.activations import Cursor


@dataclass(frozen=True)
class Take:
    """The rows of one batch, or of the part of a batch that one group of shards supplies."""

    group: int
    """The group's number, counted over all epochs."""
    members: tuple[int, ...]
    """The group's shards."""
    runs: tuple[tuple[int, int, int], ...]
    """(shard, first row, row after the last)."""
    end: Cursor | None = None
    """Where the next batch is; ``None`` where the next group completes the batch."""


def mixed_runs(
    lengths: Int[np.ndarray, " shards"], batch_tokens: int, shards_at_once: int, seed: int, start: Cursor
) -> Iterator[Take]:
    """Yield the rows of shards that make up the batches of ``mixed_batches``.

    Args:
        lengths: tokens in each shard.
        batch_tokens: tokens in a batch.
        shards_at_once: shards in a group, about.
        seed: determines the order of the shards.
        start: where to begin: ``context`` is a group, ``offset`` the tokens with which it completes a batch begun
            before, ``batch`` the batches after these.
    """
    lacking = start.offset % batch_tokens or batch_tokens  # tokens that the current batch still needs
    for group in count(start.context):
        members, begins = group_of(lengths, shards_at_once, seed, group)
        sizes = left = lengths[members]
        total, used = int(sizes.sum()), 0
        carried = min(lacking % batch_tokens, total)  # they complete a batch that began in the group before
        before_start = start.offset + start.batch * batch_tokens if group == start.context else 0
        while used < total:
            tokens = min(lacking, total - used)  # a whole batch, or as much of it as this group has
            taken = _share(left, tokens)
            rows = (begins + sizes - left) % sizes  # each shard continues where the batch before stopped
            take = Take(group, tuple(members.tolist()), _runs(members, rows, taken, sizes))
            is_new = used >= before_start  # a resumed group is counted through from its beginning, without yielding
            left, used, lacking = left - taken, used + tokens, lacking - tokens
            if lacking == 0:
                lacking = batch_tokens
                end = Cursor(group, carried, (used - carried) // batch_tokens) if used < total else Cursor(group + 1)
                take = replace(take, end=end)
            if is_new:
                yield take


def group_of(
    lengths: Int[np.ndarray, " shards"], shards_at_once: int, seed: int, group: int
) -> tuple[Int[np.ndarray, " members"], Int[np.ndarray, " members"]]:
    """Return a group's shards, and the row at which each begins in this epoch.

    Args:
        lengths: tokens in each shard.
        shards_at_once: shards in a group, about.
        seed: determines the order of the shards.
        group: its number, counted over all epochs.
    """
    groups = -(-len(lengths) // shards_at_once)
    epoch, index = divmod(group, groups)
    rng = np.random.default_rng([seed, epoch])
    members = np.array_split(rng.permutation(len(lengths)), groups)[index]
    return members, rng.integers(lengths)[members]


def _share(left: Int[np.ndarray, " members"], tokens: int) -> Int[np.ndarray, " members"]:
    """Divide tokens over shards in proportion to what is left of each; the largest remainders are rounded up.

    4 tokens of shards with 6 and 3 left: 8/3 and 4/3, so 2 and 1, and one more of the first, whose remainder is larger.
    """
    exact, rest = np.divmod(left * tokens, left.sum())
    up = np.argsort(-rest, kind="stable")[: tokens - exact.sum()]
    exact[up] += 1
    return exact


def _runs(
    members: Int[np.ndarray, " members"],
    begins: Int[np.ndarray, " members"],
    taken: Int[np.ndarray, " members"],
    sizes: Int[np.ndarray, " members"],
) -> tuple[tuple[int, int, int], ...]:
    """Return (shard, first row, row after the last); a run beyond a shard's end continues at its beginning."""
    runs = []
    for shard, begin, tokens, size in zip(*(part.tolist() for part in (members, begins, taken, sizes)), strict=True):
        runs += [(shard, begin, min(begin + tokens, size)), (shard, 0, begin + tokens - size)]
    return tuple(run for run in runs if run[1] < run[2])

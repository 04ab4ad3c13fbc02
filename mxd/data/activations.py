"""Contexts of token ids -> shuffled batches of activations, as one plain generator.

The stream is cut into windows of ``buffer_tokens`` tokens. The base model runs over a window's contexts, the inputs
and outputs of the chosen MLPs are kept, and the window's tokens are permuted and yielded in batches. Only a position in
the text carries over from one window to the next, so a run resumes exactly by recomputing one window. (The paper
refills a buffer when it is half empty, which mixes as many tokens, but its state depends on the whole past.)

In a launch of several processes each runs the base model over its part of a window's contexts, and receives from the
others the rows of the batches that it trains on. The batches do not depend on the number of processes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mxd.common.errors import MxdError
from mxd.common.processes import ALONE, Processes
from mxd.data.checks import MOST_USELESS, check_activations, check_text
from mxd.data.contexts import Bookmark, Contexts, Finite, Streamed, counted_positions
from mxd.data.exchange import RankPart, WindowActivations, exchange_rows
from mxd.model.frozen import FrozenModel, Record


@dataclass(frozen=True)
class Cursor:
    """A position between batches: a window that begins ``offset`` counted tokens into ``context``, a batch in it."""

    context: int = 0
    offset: int = 0
    batch: int = 0
    text: str = ""
    """Hash of the token ids up to here; "" where it is not known, and at the beginning."""
    bookmark: Bookmark | None = field(default=None, compare=False, repr=False)
    """Where a streamed text can be read from to get to ``context``."""


@dataclass(frozen=True)
class Batch:
    """One batch of shuffled token activations."""

    sites: dict[int, tuple[Float[Tensor, "tokens d_in"], Float[Tensor, "tokens d_out"]]]
    """Block -> (MLP input, MLP output), float32; the same tokens in the same order for every block."""
    ids: Int[Tensor, " tokens"]
    """The token ids."""
    means: dict[int, tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"]]]
    """Block -> (mean MLP input, mean MLP output) over the whole window this batch is from."""
    cursor: Cursor
    """Where the next batch is."""


@dataclass(frozen=True)
class _Window:
    rows: Int[np.ndarray, "contexts context"]
    counted: Bool[np.ndarray, "contexts context"]
    """Which positions belong to the window."""
    next: Cursor
    """Where the next window begins."""

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return int(self.counted.sum())

    def part(self, processes: Processes) -> "_Window":
        """Return the contexts that this process runs the base model over."""
        part = slice(*(len(self.rows) * r // processes.world for r in (processes.rank, processes.rank + 1)))
        if part.start == part.stop:  # fewer contexts than processes: run one to learn the widths, and keep nothing
            return _Window(self.rows[:1], np.zeros_like(self.counted[:1]), self.next)
        return _Window(self.rows[part], self.counted[part], self.next)


def locating(contexts: Finite | Streamed) -> Callable[[Cursor], Cursor]:
    """Return what adds to a cursor the hash of the text up to there, which has been read, and a bookmark."""

    def located(cursor: Cursor) -> Cursor:
        read = cursor.context + bool(cursor.offset)  # also a context cut in two
        return replace(cursor, text=contexts.digest(read), bookmark=contexts.bookmark(cursor.context))

    return located


Counts = Callable[[Int[np.ndarray, "contexts context"]], Bool[np.ndarray, "contexts context"]]
"""Which positions of some contexts count."""

WindowFilter = Callable[[Cursor, int], bool]
"""``accept(start, batches)``: whether the base model runs over a window, given its start and number of batches."""


def buffer_bytes(widths: Sequence[tuple[int, int]], buffer_tokens: int) -> int:
    """Return the bytes of one window of float32 activations, for sites of the given (d_in, d_out)."""
    return buffer_tokens * 4 * sum(d_in + d_out for d_in, d_out in widths)


def activation_batches(
    model: FrozenModel,
    blocks: Sequence[int],
    contexts: Contexts,
    batch_tokens: int = 4096,
    buffer_tokens: int = 131_072,
    excluded_ids: Sequence[int] = (),
    bos_id: int | None = None,
    seed: int = 0,
    forward_contexts: int = 32,
    start: Cursor | None = None,
    processes: Processes = ALONE,
    shares: Sequence[RankPart] | None = None,
    accept: WindowFilter | None = None,
    located: Callable[[Cursor], Cursor] = lambda cursor: cursor,
    record: Record | None = None,
) -> Iterator[Batch]:
    """Yield shuffled batches of MLP inputs and outputs, the same for the same arguments.

    Args:
        model: the frozen base model.
        blocks: the sites; all are recorded from one forward, which stops after the last.
        contexts: the text.
        batch_tokens: tokens in a batch.
        buffer_tokens: tokens in a window, rounded down to whole batches; memory is ``buffer_bytes``.
        excluded_ids: positions that hold one of these tokens are left out.
        bos_id: left out at position 0.
        seed: determines the order of a window's tokens.
        forward_contexts: contexts that the base model runs over at a time.
        start: where to begin.
        processes: those that run this stream together, with the same arguments.
        shares: the part of every batch that each of them takes; by default everything. ``batch_tokens`` is a multiple
            of every share's ``parts``.
        accept: called for every window in turn; windows for which it returns False are skipped.
        located: adds to a cursor the hash of the text up to there, which has been read, and a bookmark.
        record: runs the model; by default ``model.record``.

    Raises:
        MxdError: an activation is not finite, a target has norm zero, all tokens are excluded, or the text up to
            ``start`` has changed.
    """
    cursor = start or Cursor()
    per_window = max(1, buffer_tokens // batch_tokens)
    source = contexts(cursor.context)
    counts = partial(counted_positions, excluded=excluded_ids, bos_id=bos_id)
    split: np.ndarray | None = None
    shares = shares or [RankPart(tuple(blocks))] * processes.world
    share = shares[processes.rank]
    text = cursor.text
    record = record or model.record
    while True:
        with processes.together():
            window, split = _plan(source, split, cursor, per_window * batch_tokens, counts)
            if text:  # a cursor within a window has the hash of the window's end, one between two that of its start
                check_text(text, located(cursor if cursor.batch == 0 or window is None else window.next).text)
                text = ""
            while window is not None and accept is not None and not accept(cursor, window.tokens // batch_tokens):
                cursor = located(window.next)
                window, split = _plan(source, split, cursor, per_window * batch_tokens, counts)
            filled = None
            if window is not None:
                filled = _fill(model, record, blocks, window.part(processes), forward_contexts)
        if window is None or filled is None:
            return
        following = located(window.next)
        total = window.tokens
        means = {
            block: (processes.add(x.sum(0)) / total, processes.add(y.sum(0)) / total)
            for block, (x, y) in filled.sites.items()
        }
        order = _batch_order([seed, cursor.context, cursor.offset], total, batch_tokens)
        batches, order = len(order), order.to(model.device)
        if processes.world > 1:
            filled, order = exchange_rows(filled, order, shares, processes)
        for b in range(cursor.batch, batches):
            rows = order[b]
            here = replace(cursor, batch=b + 1, text=following.text)
            yield Batch(
                sites={block: (filled.sites[block][0][rows], filled.sites[block][1][rows]) for block in share.blocks},
                ids=filled.ids[rows],
                means={block: means[block] for block in share.blocks},
                cursor=here if b + 1 < batches else following,
            )
        if batches < per_window:  # the text has ended
            return
        cursor = following
        del filled, order  # free this window before the next is filled: it is the largest part of a run's memory


def _batch_order(seed: list[int], tokens: int, batch_tokens: int) -> Int[Tensor, "batches batch_tokens"]:
    """Return which of a window's tokens are in each of its batches; tokens that fill no whole batch are left out."""
    generator = torch.Generator().manual_seed(int(np.random.default_rng(seed).integers(2**62)))
    batches = tokens // batch_tokens
    return torch.randperm(tokens, generator=generator)[: batches * batch_tokens].view(batches, batch_tokens)


def _plan(
    source: Iterator[np.ndarray], split: np.ndarray | None, start: Cursor, tokens: int, counts: Counts
) -> tuple[_Window | None, np.ndarray | None]:
    """Take contexts until ``tokens`` positions count.

    Args:
        source: the contexts after ``split``.
        split: a context whose first ``start.offset`` counted positions belong to the window before.
        start: where the window begins.
        tokens: the counted positions of a whole window.
        counts: tells which positions of some contexts count.

    Returns:
        The window, shorter where the text ends, ``None`` where it has ended; and a context that is split again.
    """
    ahead = source if split is None else chain([split], source)
    first = next(ahead, None)
    if first is None:
        return None, None
    ahead = chain([first], ahead)
    rows: list[np.ndarray] = []
    counted: list[np.ndarray] = []
    missing, useless = tokens, 0
    # As many contexts at a time as are needed in any case, even if all of their positions count: none is read in vain.
    while missing > 0 and (taken := list(islice(ahead, -(-missing // len(first))))):
        part = np.stack(taken)
        count = counts(part)
        for useful in count.max(axis=1).tolist():
            useless = 0 if useful else useless + 1
            if useless > MOST_USELESS:
                raise MxdError(
                    f"{MOST_USELESS:,} contexts in a row hold nothing but excluded tokens; check "
                    "data.exclude_special and the text."
                )
        if not rows:
            count[0, np.flatnonzero(count[0])[: start.offset]] = False
        missing -= int(count.sum())
        rows.append(part)
        counted.append(count)
    window, belongs = np.concatenate(rows), np.concatenate(counted)
    end = Cursor(start.context + len(window))
    if missing >= 0:
        return _Window(window, belongs, end), None
    last = np.flatnonzero(belongs[-1])  # more than are missing: only the last of the contexts can be split
    belongs[-1, last[missing:]] = False
    offset = len(last) + missing + (start.offset if len(window) == 1 else 0)
    return _Window(window, belongs, replace(end, context=end.context - 1, offset=offset)), window[-1]


def _fill(
    model: FrozenModel, record: Record, blocks: Sequence[int], window: _Window, forward_contexts: int
) -> WindowActivations:
    """Run the base model over a window and keep the counted positions' activations."""
    total, width = window.tokens, window.rows.shape[1]
    buffers: dict[int, tuple[Tensor, Tensor]] = {}
    ids = torch.from_numpy(window.rows).to(model.device, torch.int64)
    places = torch.from_numpy(np.flatnonzero(window.counted)).to(model.device)
    done = 0
    for first in range(0, len(ids), forward_contexts):
        part = slice(first, first + forward_contexts)
        stop = done + int(window.counted[part].sum())
        keep = places[done:stop] - first * width
        for block, pair in record(ids[part], blocks).items():
            if block not in buffers:
                buffers[block] = tuple(torch.empty(total, t.shape[-1], device=t.device) for t in pair)  # type: ignore[assignment]
            for buffer, tensor in zip(buffers[block], pair, strict=True):
                buffer[done:stop] = rearrange(tensor, "context position d -> (context position) d")[keep]
        done = stop
    kept_ids = ids.reshape(-1)[places]
    for block, (x, y) in buffers.items():
        check_activations(block, x, y, kept_ids, model)
    return WindowActivations(kept_ids, buffers)

"""Exchange of a window's rows between the processes that have computed them and those that train on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mxd.common.processes import Processes


class WindowActivations(NamedTuple):
    """The base model's activations for the tokens of a window, or for those that one process has."""

    ids: Int[Tensor, " tokens"]
    """The token ids."""
    sites: dict[int, tuple[Float[Tensor, "tokens d_in"], Float[Tensor, "tokens d_out"]]]
    """Block -> (MLP input, MLP output), float32; the same tokens in the same order for every block."""


@dataclass(frozen=True)
class RankPart:
    """What one process takes from the stream: the activations of some blocks, and one of equal parts of each batch."""

    blocks: tuple[int, ...]
    part: int = 0
    parts: int = 1

    def rows(self, tokens: int) -> slice:
        """Return its rows of a batch of ``tokens`` tokens."""
        size = tokens // self.parts
        return slice(self.part * size, (self.part + 1) * size)


def exchange_rows(
    computed: WindowActivations, order: Int[Tensor, "batches tokens"], shares: Sequence[RankPart], processes: Processes
) -> tuple[WindowActivations, Int[Tensor, "batches part"]]:
    """Exchange rows, so that each process has exactly those of its share, in the order of their use.

    Args:
        computed: the rows that this process has computed; those of rank 0 are the window's first, and so on.
        order: the window's rows in each batch.
        shares: what each process takes.
        processes: all of them.

    Returns:
        The rows of this process's share, and which of them are in each batch.
    """
    rank = processes.rank
    ends = torch.tensor(processes.gather(len(computed.ids)), device=order.device).cumsum(0)  # of each rank's rows
    first = int(ends[rank]) - len(computed.ids)
    needed = [order[:, share.rows(order.shape[1])].reshape(-1) for share in shares]  # by each rank, batch by batch
    sent = [rows[(rows >= first) & (rows < ends[rank])] - first for rows in needed]  # to each rank, in its order
    sender = torch.bucketize(needed[rank], ends, right=True)  # of each row that this rank needs
    # Rows arrive rank by rank, and within a rank in the order of their use: the i-th belongs at position[i].
    position = sender.argsort(stable=True)
    incoming = torch.bincount(sender, minlength=processes.world).tolist()

    def exchanged(tensor: Tensor, block: int | None) -> Tensor:
        takes = [block is None or block in share.blocks for share in shares]
        rows = torch.cat([tensor[m] for m, taken in zip(sent, takes, strict=True) if taken] or [tensor[:0]])
        counts = [len(m) if taken else 0 for m, taken in zip(sent, takes, strict=True)]
        received = processes.exchange(rows, counts, incoming if takes[rank] else [0] * processes.world)
        if not takes[rank]:
            return received
        in_order = torch.empty_like(received)
        in_order[position] = received
        return in_order

    ids = exchanged(computed.ids, None)
    sites = {block: (exchanged(x, block), exchanged(y, block)) for block, (x, y) in computed.sites.items()}
    return WindowActivations(ids, sites), torch.arange(len(ids), device=order.device).view(len(order), -1)

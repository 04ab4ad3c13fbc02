"""The processes of one launch (torchrun, accelerate launch, SLURM), and what they tell each other.

A launch of one process is the same with nobody to talk to: every function here then returns at once.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from mxd.errors import MxdError, SharedError

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """All processes of a launch, or some of them, as one of them sees it."""

    rank: int = 0
    """This process among them, from 0."""
    world: int = 1
    """How many they are."""
    group: Any = None
    """torch.distributed's handle; ``None`` for all of the launch."""

    @property
    def many(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks for all."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return every process's (picklable, own) value, in the order of ranks, to each of them."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.group)
        return found

    def add(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum over the processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return tensor

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the processes, in place."""
        if self.world == 1:
            return
        for work in [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in tensors]:
            work.wait()
        for tensor in tensors:
            tensor /= self.world

    def any(self, flag: bool) -> bool:
        """Whether the flag of any process is set."""
        return bool(self.largest(torch.tensor(int(flag))))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let a block fail everywhere or nowhere: an ``MxdError`` of one process is raised by all, after the block.

        Every process must enter; without this one would leave and the others wait for it for ever.
        """
        if self.world == 1:
            yield
            return
        own: MxdError | None = None
        try:
            yield
        except MxdError as error:
            own = error
        errors = self.gather(None if own is None else str(own))
        for message in errors:
            if message is not None:
                raise SharedError(message) from own

    def exchange(self, rows: Tensor, counts: Sequence[int], expected: Sequence[int]) -> Tensor:
        """Send rows to every process and return those received, in the order of ranks.

        Args:
            rows: ``[sum(counts), width]``, those for rank 0 first.
            counts: rows for each rank.
            expected: rows from each rank.
        """
        if self.world == 1:
            return rows
        found = rows.new_empty(sum(expected), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), list(expected), list(counts), group=self.group)
        return found

    def mesh(self, device: str) -> DeviceMesh:
        """Return the processes as torch's sharding tools want them."""
        return DeviceMesh.from_group(self.group or cast(dist.ProcessGroup, dist.group.WORLD), device)

    def split(self, groups: int) -> "tuple[int, Processes]":
        """Divide the processes into equal groups of neighbours; return this one's group number and its group.

        Raises:
            MxdError: they cannot be divided so.
        """
        if groups < 1 or self.world % groups:
            raise MxdError(f"{self.world} processes cannot be divided into {groups} equal groups.")
        size = self.world // groups
        number, place = divmod(self.rank, size)
        if groups == 1 or size == 1:
            return number, Processes(place, size, self.group if size > 1 else None)
        handles = [dist.new_group(list(range(g * size, (g + 1) * size))) for g in range(groups)]
        return number, Processes(place, size, handles[number])


ALONE = Processes()
"""A launch of one process."""


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may be divided among processes, whole; all of them call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_as(model: Tensor | None, tensor: Tensor) -> Tensor:
    """Return a whole tensor, divided among processes as ``model`` is; each process has the whole to begin with."""
    if not isinstance(model, DTensor):
        return tensor
    moved = tensor.to(model.device, model.dtype)
    return distribute_tensor(moved, model.device_mesh, model.placements, src_data_rank=None)


def local_device(device: str) -> str:
    """Return the device of this process: where ``auto`` or ``cuda`` is asked for, each takes a GPU of its own."""
    if "LOCAL_RANK" in os.environ and device in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
    return device


@contextmanager
def launched() -> Iterator[Processes]:
    """Join the processes that this one was started with, for the length of the block.

    torchrun and accelerate launch say in ``WORLD_SIZE`` and ``RANK`` how many there are.

    Raises:
        MxdError: the variables are wrong, or the others cannot be reached.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "0" if world == "1" else "")
    if not (world.isdigit() and rank.isdigit() and int(rank) < int(world)):
        raise MxdError(
            f"WORLD_SIZE={world!r} and RANK={rank!r} do not name a process of a launch; start with torchrun or "
            "accelerate launch, or unset them."
        )
    if world == "1" or dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Processes()
        return
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except (ValueError, RuntimeError) as error:
        raise MxdError(f"the {world} processes of the launch did not find each other: {error}") from error
    try:
        yield Processes(int(rank), int(world))
    finally:
        dist.destroy_process_group()

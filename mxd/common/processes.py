"""The processes of one launch (torchrun, accelerate launch, SLURM), and their communication.

A launch of one process needs none: every function here then returns at once.

A process that waits for the others still handles signals, and learns which one is gone: from a connection that ends, or
from signs of life in the launch's store.
"""

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from mxd.common.errors import LostError, MxdError, SharedError
from mxd.common.stop import asked_to_stop

if TYPE_CHECKING:  # takes a third of the time of importing torch, and few runs are sharded
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

SIGN = 0.5
"""Seconds between two signs of life."""

QUIET = 3.0
"""Seconds without a sign after which a process counts as gone, once a call has failed."""

PATIENCE = 15.0
"""The same for a process that was asked to stop and waits for the others; torchrun kills after 30."""

BUCKET = 2**20
"""Bytes of a tensor up to which it is averaged together with others: less would take longer to begin than to send."""

_LOSS = re.compile(r"gloo/|pair closure|NCCL|[Cc]onnection|[Tt]imed out")
"""How torch's errors read when another process is gone."""


class Signs:
    """Signs of life: each process increments a count in the launch's store, and looks for counts that stand still.

    It does so in a thread of its own with its own connection, so that neither long work nor a lost store blocks anyone.
    All processes report what the first of them to look has found.

    Args:
        store: the launch's store.
        rank: this process.
        world: number of processes of the launch.
        minutes: how long they wait for one another.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, minutes: float) -> None:
        self.rank, self.world, self.minutes = rank, world, minutes
        self.gone: dict[int, str] = {}
        """Processes that are gone -> why, as far as they could say; empty while all are there."""
        self._quiet = math.inf
        self._finder = rank
        self._last_words = ""
        self._known, self._over = Event(), Event()
        self._seen: dict[int, tuple[int, float]] = {}
        self._thread = Thread(target=self._run, args=(store,), name="mxd-signs", daemon=True)
        self._thread.start()

    def look(self, quiet: float) -> None:
        """From now on, look for processes that gave no sign for ``quiet`` seconds."""
        self._quiet = quiet

    @contextmanager
    def named(self) -> Iterator[None]:
        """Where a call in the block fails because a process is gone, find out which one; this takes some seconds.

        Raises:
            LostError: in place of torch's error.
        """
        try:
            yield
        except RuntimeError as error:
            if not _LOSS.search(str(error)):
                raise
            self.look(QUIET)
            self._known.wait(QUIET + 4 * SIGN)
            raise self.error(str(error)) from error

    def error(self, reason: str) -> LostError:
        """Return the error that names the processes that are gone, or else gives the reason of the failure."""
        remedy = "The last save is intact: end the remaining processes, and start the whole launch again with --resume."
        if self.gone:
            verb = "ended or do not answer" if len(self.gone) > 1 else "ended or does not answer"
            reasons = "".join(f"\n{_ranks([rank])}: {why}" for rank, why in self.gone.items() if why)
            speaks = self.rank == self._finder and 0 in self.gone  # otherwise the first process speaks
            return LostError(f"{_ranks(list(self.gone))} of {self.world} {verb}. {remedy}{reasons}", shared=not speaks)
        if re.search("[Tt]imed out", reason):
            late = (
                f"the {self.world} processes of the launch are alive but did not meet within {self.minutes:g} minutes"
            )
            return LostError(f"{late}; allow more time with --timeout MINUTES. {remedy}", shared=False)
        reason = re.sub(r"^\[\S*\] |\. This is typically.*", "", _line(reason))
        return LostError(f"the connection to another process of the launch was lost: {reason}. {remedy}", shared=False)

    def end(self, last_words: str) -> None:
        """Stop; processes that still need this one find these last words in the store."""
        self._last_words = last_words
        self._over.set()
        self._thread.join(10)  # longer only where the store cannot be reached

    def _run(self, store: dist.Store) -> None:
        try:
            while not self._over.wait(SIGN):
                store.add(f"sign/{self.rank}", 1)
                if self._quiet < math.inf and not self.gone:
                    self._look(store)
            if self._last_words:
                store.set(f"words/{self.rank}", self._last_words)
        except RuntimeError:  # the store ended with the process that kept it
            self._known.set()

    def _look(self, store: dist.Store) -> None:
        now, gone = time.monotonic(), {}
        for rank in range(self.world):
            count = store.add(f"sign/{rank}", 0)
            if self._seen.get(rank, (-1, 0))[0] != count:
                self._seen[rank] = count, now
            words = store.get(f"words/{rank}").decode() if store.check([f"words/{rank}"]) else ""
            if words or now - self._seen[rank][1] > self._quiet:
                gone[rank] = words
        if gone or store.check(["gone"]):
            # The first to set the key wins; everybody, the loser of a race included, reads the winner's list.
            finder, ranks = json.loads(store.compare_set("gone", "", json.dumps([self.rank, list(gone.items())])))
            self._finder, self.gone = finder, dict(ranks)
            self._known.set()


@dataclass(frozen=True)
class Processes:
    """All processes of a launch, or a group of them, from the view of one."""

    rank: int = 0
    """The rank of this process among them."""
    world: int = 1
    """How many there are."""
    group: Any = None
    """torch.distributed's handle; ``None`` for all of the launch."""
    signs: Signs | None = field(default=None, compare=False, repr=False)
    """Signs of life of the launch's processes."""

    @property
    def many(self) -> bool:
        """Whether there are others."""
        return self.world > 1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints for all."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the (picklable) values of all processes, in the order of ranks, to each of them."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        self._call(lambda: dist.all_gather_object(gathered, value, group=self.group))
        return gathered

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Refuse processes that were started with different settings.

        Args:
            settings: name -> plain data.

        Raises:
            MxdError: in all of them, with the fields that differ and the ranks that have each value.
        """
        if differences := list(_differences("", self.gather(dict(settings)))):
            raise SharedError(
                f"the processes of this launch have different settings: {'; '.join(differences)}. Start all of them "
                "with the same config, overrides and options."
            )

    def add(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes, in place."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum over the processes, in place."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.world > 1:
            self._call(lambda: dist.all_reduce(tensor, operation, group=self.group), tensor.device)
        return tensor

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Average tensors over the processes, in place; small ones, of one dtype, in one bucket."""
        if self.world == 1 or not tensors:
            return
        buckets: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() * tensor.element_size() <= BUCKET:
                buckets.setdefault(tensor.dtype, []).append(tensor)
        packed = [torch.cat([tensor.reshape(-1) for tensor in bucket]) for bucket in buckets.values()]
        sent = packed + [tensor for tensor in tensors if tensor.numel() * tensor.element_size() > BUCKET]

        def add() -> None:
            for work in [dist.all_reduce(tensor, group=self.group, async_op=True) for tensor in sent]:
                work.wait()

        self._call(add, tensors[0].device)
        for tensor in sent:
            tensor /= self.world
        for bucket, flat in zip(buckets.values(), packed, strict=True):
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Return whether any process has set its flag."""
        return bool(self.largest(torch.tensor(int(flag))))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let a block fail in all processes or in none: they exchange their errors after the block.

        Every process must enter it. Without this, one would leave and the others would wait for it. An ``MxdError`` is
        raised by all. Any other error is unforeseen: its process raises it, and the others raise a ``LostError`` that
        names that process.

        Raises:
            LostError: another process failed with an unforeseen error.
            MxdError: a process raised one.
        """
        if self.world == 1:
            yield
            return
        local: Exception | None = None
        try:
            yield
        except LostError:
            raise
        except Exception as error:
            local = error
        foreseen = isinstance(local, MxdError)
        errors = self.gather(None if local is None else (str(local) if foreseen else _line(local), foreseen))
        unforeseen = {rank: error[0] for rank, error in enumerate(errors) if error is not None and not error[1]}
        if unforeseen and local is not None:
            raise local
        for rank, message in unforeseen.items():
            raise LostError(f"{_ranks([rank])} of {self.world} failed: {message}. Earlier saves are intact.")
        for failure in errors:
            if failure is not None:
                raise SharedError(failure[0]) from local

    def together_on(self, device: torch.device) -> AbstractContextManager[None]:
        """Return ``together`` for what a GPU does before gradients are averaged, and nothing elsewhere.

        Gradients on a GPU are averaged in its queue, which would wait for a process that ran out of memory; gloo, on a
        CPU, notices that one has ended.
        """
        return self.together() if device.type == "cuda" else nullcontext()

    def exchange(
        self, rows: Shaped[Tensor, "sent ..."], counts: Sequence[int], expected: Sequence[int]
    ) -> Shaped[Tensor, "received ..."]:
        """Send rows to every process and return those received, in the order of ranks.

        Args:
            rows: those for rank 0 first; ``sum(counts)`` of them.
            counts: rows for each rank.
            expected: rows from each rank.
        """
        if self.world == 1:
            return rows
        received = rows.new_empty(sum(expected), *rows.shape[1:])
        sent = rows.contiguous()
        self._call(
            lambda: dist.all_to_all_single(received, sent, list(expected), list(counts), group=self.group), rows.device
        )
        return received

    def mesh(self, device: str) -> "DeviceMesh":
        """Return the processes as a device mesh, for torch's sharding."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group or cast(dist.ProcessGroup, dist.group.WORLD), device)

    def split(self, groups: int) -> "tuple[int, Processes]":
        """Divide the processes into equal groups of neighbours; return this one's group number and its group.

        Raises:
            MxdError: their number is not a multiple of ``groups``.
        """
        if groups < 1 or self.world % groups:
            raise MxdError(f"{self.world} processes cannot be divided into {groups} equal groups.")
        size = self.world // groups
        number, rank = divmod(self.rank, size)
        if groups == 1 or size == 1:
            return number, replace(self, rank=rank, world=size, group=self.group if size > 1 else None)
        limit = timedelta(minutes=self.signs.minutes) if self.signs is not None else None
        handles = [dist.new_group(list(range(g * size, (g + 1) * size)), timeout=limit) for g in range(groups)]
        return number, replace(self, rank=rank, world=size, group=handles[number])

    def _call(self, call: Callable[[], Any], device: torch.device | None = None) -> None:
        """Make a call that waits for the others, and handle signals meanwhile.

        Python runs signal handlers in the main thread, but not while it is inside torch; so another thread makes the
        call. On a GPU a call only enqueues work and does not wait: it is made directly.

        Raises:
            LostError: another process is gone; after a request to stop, also while this one waits for it.
        """
        with self.signs.named() if self.signs is not None else nullcontext():
            if device is not None and device.type != "cpu":
                return call()
            answer: Future[None] = Future()
            _calls().put((call, answer))
            while not wait([answer], 1).done:
                if self.signs is not None and asked_to_stop():
                    self.signs.look(PATIENCE)
                    if self.signs.gone:
                        raise self.signs.error("")
            return answer.result()


@cache
def _calls() -> "SimpleQueue[tuple[Callable[[], Any], Future[None]]]":
    """Return the queue of the thread that makes calls, one after the other."""
    calls: SimpleQueue[tuple[Callable[[], Any], Future[None]]] = SimpleQueue()

    def make() -> None:
        while True:
            call, answer = calls.get()
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
            del call, answer  # frees the tensors they hold before waiting for the next

    Thread(target=make, name="mxd-calls", daemon=True).start()  # daemon: a call that never returns delays no exit
    return calls


ALONE = Processes()
"""A launch of one process."""


def _differences(name: str, values: Sequence[Any]) -> Iterator[str]:
    """Describe where plain data of several processes differ, field by field."""
    if all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        values = [dict(enumerate(value)) for value in values]
    if all(isinstance(value, dict) for value in values):
        for key in dict.fromkeys(key for value in values for key in value):
            yield from _differences(f"{name}.{key}".lstrip("."), [value.get(key) for value in values])
        return
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(repr(value), []).append(rank)
    if len(ranks_of) > 1:
        yield f"{name} is " + ", ".join(f"{value:.80} in {_ranks(ranks)}" for value, ranks in ranks_of.items())


def _ranks(ranks: Sequence[int]) -> str:
    """Name some processes: ``ranks 0, 2 and 3``."""
    named = [str(rank) for rank in ranks[:8]] + [f"{len(ranks) - 8} more"] * (len(ranks) > 8)
    return f"rank {named[0]}" if len(named) == 1 else f"ranks {', '.join(named[:-1])} and {named[-1]}"


def _line(error: object) -> str:
    """Return the first line of a text, or of an error with its type."""
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, str | MxdError) else f"{type(error).__name__}: {text}"


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may be sharded over processes as a whole; all of them must call this together."""
    return cast(Tensor, getattr(tensor, "full_tensor", lambda: tensor)())


def placed_as(model: Tensor | None, tensor: Tensor) -> Tensor:
    """Return a whole tensor, which every process has, sharded over the processes as ``model`` is."""
    if model is None or not hasattr(model, "placements"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(model, DTensor)
    moved = tensor.to(model.device, model.dtype)
    return distribute_tensor(moved, model.device_mesh, model.placements, src_data_rank=None)


def local_device(device: str) -> str:
    """Return the device of this process: for ``auto`` or ``cuda``, each process takes another GPU."""
    own = _own_gpu()
    return device if own is None or device not in ("auto", "cuda") else f"cuda:{own}"


def _own_gpu() -> int | None:
    """Return the number of the GPU that belongs to this process of a launch, if there are GPUs."""
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        return None
    return int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()


@contextmanager
def launched(minutes: float = 10.0) -> Iterator[Processes]:
    """Join the processes that this one was started with, while the block runs.

    torchrun and accelerate launch set ``WORLD_SIZE`` and ``RANK``.

    Args:
        minutes: how long they wait for one another at most.

    Raises:
        MxdError: the variables are wrong, or the others cannot be reached.
        LostError: one of the others is gone.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "0" if world == "1" else "")
    if not (world.isdigit() and rank.isdigit() and int(rank) < int(world)):
        raise MxdError(
            f"WORLD_SIZE={world!r} and RANK={rank!r} do not name a process of a launch; start with torchrun or "
            "accelerate launch, or unset them."
        )
    if world == "1" or dist.is_initialized():
        known = Processes(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE
        yield _joined[-1] if _joined else known
        return
    limit = timedelta(minutes=minutes)
    if (own := _own_gpu()) is not None:  # before anything opens a context, which would be one more on the first GPU
        torch.cuda.set_device(own)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=limit)
        store, *_ = next(dist.rendezvous("env://", timeout=limit))
    except (ValueError, RuntimeError) as error:
        raise MxdError(f"the {world} processes of the launch did not find each other: {error}") from error
    signs = Signs(dist.PrefixStore("mxd", store), int(rank), int(world), minutes)
    _joined.append(Processes(int(rank), int(world), signs=signs))
    failed: BaseException | None = None
    try:
        with signs.named():  # covers calls that torch makes by itself, for sharded weights
            yield _joined[-1]
    except BaseException as error:
        failed = error
        raise
    finally:
        _joined.pop()
        alone = failed is not None and (isinstance(failed, LostError) or not getattr(failed, "shared", False))
        signs.end(_line(failed) if alone else "")
        if not isinstance(failed, LostError):  # on a GPU this waits for the others
            dist.destroy_process_group()


_joined: list[Processes] = []
"""The launch that this process has joined, if any."""

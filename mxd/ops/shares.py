"""Many small products at once: each thread of the CPU works through units of its own.

Threads that share one small product spend much of their time waiting for each other at its end, and at the end of the
gathers before it and the sums after it. Here they meet once, when all units are done.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")

MOST = 8
"""Shares at most, since each has sums of its own; where there are more threads, several work on a share."""


def in_shares(work: Callable[[Sequence[int]], T], costs: Sequence[int], device: torch.device) -> list[T]:
    """Return what ``work`` returns for each share of the numbers 0 to ``len(costs) - 1``; there is at least one share.

    On a CPU there are as many shares as torch has threads, worked on at the same time; elsewhere there is one. How
    numbers are dealt out depends on costs and threads alone, so the same results come out again.

    Args:
        work: a function of the numbers of one share; shares must not write to the same memory.
        costs: about what each number takes, in any unit.
        device: where the work is done.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    count = min(threads, MOST, len(costs))
    if count <= 1:
        return [work(range(len(costs)))]
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(share: Sequence[int]) -> T:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):  # both are a thread's own
            return work(share)

    return list(_pool(os.getpid(), count, threads).map(run, _deal(costs, count)))


def _deal(costs: Sequence[int], count: int) -> list[list[int]]:
    """Deal out numbers, the dearest first, each to the share that costs least so far."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += costs[number]
    return shares


@lru_cache(1)
def _pool(process: int, count: int, threads: int) -> ThreadPoolExecutor:
    """Start the threads of this process (a fork has none of its parent's), each with its part of torch's threads."""
    met = Barrier(count)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first look would undo what was set before it
        torch.set_num_threads(threads // count)

    pool = ThreadPoolExecutor(count, "mxd-shares", begin)
    list(pool.map(lambda _: met.wait(), range(count)))
    torch.set_num_threads(threads)  # what threads that start later get; a thread that runs keeps its own
    return pool

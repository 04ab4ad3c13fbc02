"""Items of a stream, prepared in a thread while earlier ones are used."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mxd.common.stop import Stopped

T = TypeVar("T")


def ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the same items, while a thread prepares the next ``depth`` of them.

    For work that waits (on a disk, on the Hub, for the tokenizer); its errors are raised here, in their turn.
    """
    end, wait = object(), True
    worker = ThreadPoolExecutor(1, "mxd-ahead")
    try:
        pending = deque(worker.submit(next, items, end) for _ in range(depth))
        while (item := pending.popleft().result()) is not end:
            pending.append(worker.submit(next, items, end))
            yield item  # type: ignore[misc]
    except Stopped:
        wait = False  # the next item may never come
        raise
    finally:  # items that nobody will read are not waited for
        worker.shutdown(wait, cancel_futures=True)

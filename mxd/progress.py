"""What a person sees while something runs: a bar with rate and time left on a terminal, about ten lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from rich.console import Console

console = Console(stderr=True, highlight=False)


@runtime_checkable
class Advance(Protocol):
    """Reports progress: how much more is done, and a short note."""

    def __call__(self, amount: int, note: str = "") -> None:
        """Advance by ``amount``."""


@contextmanager
def progress(title: str, total: int, unit: str = "tokens", done: int = 0) -> Iterator[Advance]:
    """Show progress from ``done`` to ``total``; on a terminal as a bar, otherwise as about ten lines."""
    if console.is_terminal:
        with _bar(title, total, unit, done) as advance:
            yield advance
    else:
        yield _lines(title, total, unit, done)


@contextmanager
def _bar(title: str, total: int, unit: str, done: int) -> Iterator[Advance]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    start, before = time.monotonic(), done
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, completed=done, rate="", note="")

        def advance(amount: int, note: str = "") -> None:
            nonlocal done
            done += amount
            rate = (done - before) / max(time.monotonic() - start, 1e-9)
            bar.update(task, advance=amount, rate=f"{rate:,.0f} {unit}/s", note=note)

        yield advance


def _lines(title: str, total: int, unit: str, done: int) -> Advance:
    start, before, shown = time.monotonic(), done, done * 10 // max(total, 1)

    def advance(amount: int, note: str = "") -> None:
        nonlocal done, shown
        done += amount
        if done * 10 // max(total, 1) > shown:
            shown = done * 10 // max(total, 1)
            elapsed = time.monotonic() - start
            rate = (done - before) / max(elapsed, 1e-9)
            left = (total - done) / max(rate, 1e-9)
            sys.stderr.write(f"{title}: {done:,}/{total:,} {unit}, {rate:,.0f} {unit}/s, {left:,.0f} s left {note}\n")
            sys.stderr.flush()

    return advance

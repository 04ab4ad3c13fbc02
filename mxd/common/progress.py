"""Progress of long work: a bar with rate and time left on a terminal, about ten lines elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, runtime_checkable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from mxd.common.errors import printable

WIDTH = 160
"""Columns of text where no terminal is known."""


class PlainConsole(Console):
    """A console that prints text literally: no markup, no emoji codes, no control characters.

    Without a terminal it is ``WIDTH`` columns wide.
    """

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)
        if not self.is_terminal:
            self.width = WIDTH

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text of a string, with control characters replaced first, so that its width is right."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as any console does, but make all text printable, also that of ready-made ``Text`` objects."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


console = PlainConsole(stderr=True)


@cache
def say_once(line: str) -> None:
    """Print a line, the first time that this process is asked to."""
    console.print(line, soft_wrap=True)


@runtime_checkable
class Advance(Protocol):
    """Reports progress: the amount done since the last call, and a short note."""

    def __call__(self, amount: int, note: str = "") -> None:
        """Advance by ``amount``."""


@contextmanager
def progress(title: str, total: int, unit: str = "tokens", done: int = 0) -> Iterator[Advance]:
    """Show progress from ``done`` to ``total``; on a terminal as a bar, otherwise as about ten lines.

    Args:
        title: the name of the work.
        total: the amount of work.
        unit: of the amounts.
        done: the amount that is done already; it does not count towards the rate.
    """
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
            line = f"{title}: {done:,}/{total:,} {unit}, {rate:,.0f} {unit}/s, {left:,.0f} s left {note}"
            sys.stderr.write(printable(line) + "\n")
            sys.stderr.flush()

    return advance

"""Progress of long work: a bar with rate and time left on a terminal, about ten lines elsewhere."""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from textwrap import fill
from typing import Any, Protocol, runtime_checkable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from mxd.common.errors import printable
from mxd.common.numbers import shown

WIDTH = 160
"""Columns of text where no terminal is known, nor a width in ``COLUMNS``."""
BAR = 24
"""Columns of a progress bar, where there is room for them."""
_QUOTED = re.compile(r"(?<!\w)(['\"`]).*?\1(?!\w)")  # not an apostrophe within a word
BESIDE_BAR = 54
"""Columns left to the title, the percentage, the rate and the time before a bar gets narrower."""


class PlainConsole(Console):
    """A console that prints text literally: no markup, no emoji codes, no control characters.

    It is as wide as ``COLUMNS`` says or else the terminal; without either, ``WIDTH`` columns.
    """

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)
        if not self.watched and not os.environ.get("COLUMNS", "").isdecimal():
            self.width = WIDTH

    @property
    def watched(self) -> bool:
        """Whether this prints to a terminal; ``FORCE_COLOR`` asks for colours elsewhere, too, and for nothing else."""
        return self.is_terminal and self.file.isatty()

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text of a string, with control characters replaced first, so that its width is right."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as any console does, but make all text printable, also that of ready-made ``Text`` objects."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def tell(self, text: str) -> None:
        """Print sentences; on a terminal broken between words, with what a person may copy left whole.

        That is each word, so also a path, and what stands in quotation marks; where it is longer than a line, the
        terminal breaks it without a line end.
        """
        if self.watched:
            whole = _QUOTED.sub(lambda quoted: quoted[0].replace(" ", "\0"), printable(text))
            text = "\n".join(self._broken(line) for line in whole.splitlines()).replace("\0", " ")
        self.print(text, soft_wrap=True)

    def _broken(self, line: str) -> str:
        indent = line[: len(line) - len(line.lstrip())]
        return fill(line, self.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


console = PlainConsole(stderr=True)


@contextmanager
def quiet(when: bool = True) -> Iterator[None]:
    """Keep notes and progress from being shown in a block, if ``when``; errors and results are not its concern."""
    before = console.quiet
    console.quiet = before or when
    try:
        yield
    finally:
        console.quiet = before


@cache
def say_once(line: str) -> None:
    """Print a line, the first time that this process is asked to."""
    console.tell(line)


@runtime_checkable
class Advance(Protocol):
    """Reports progress: the amount done since the last call, and a short note."""

    def __call__(self, amount: int, note: str = "") -> None:
        """Advance by ``amount``."""


@contextmanager
def progress(title: str, total: int, unit: str = "tokens", done: int = 0) -> Iterator[Advance]:
    """Show progress from ``done`` to ``total``; on a terminal as a bar, otherwise as about ten lines.

    A note stands on lines of its own below the bar, cut at the terminal's width, so that it never takes room from the
    bar, the rate or the time left.

    Args:
        title: the name of the work.
        total: the amount of work.
        unit: of the amounts, in the plural; in the rate its first word alone.
        done: the amount that is done already; it does not count towards the rate.
    """
    if console.quiet:
        yield _nothing
    elif console.watched:
        with _bar(title, total, unit, done) as advance:
            yield advance
    else:
        yield _lines(title, total, unit, done)


def _nothing(amount: int, note: str = "") -> None:
    """Report nothing."""


@contextmanager
def _bar(title: str, total: int, unit: str, done: int) -> Iterator[Advance]:
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.table import Column

    class Title(ProgressColumn):
        """The name of the work: the only column that gives way where there is no room for all."""

        def render(self, task: Task) -> Text:
            return Text(task.description, no_wrap=True, overflow="ellipsis")

    class Bar(Progress):
        """A bar with its note below."""

        def get_renderables(self) -> Iterator[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            for task in self.tasks:
                for line in task.fields["note"].splitlines():
                    yield Text(line, style="dim", no_wrap=True, overflow="ellipsis")

    whole = [Column(no_wrap=True) for _ in range(4)]
    columns = (
        Title(),
        BarColumn(max(8, min(BAR, console.width - BESIDE_BAR)), table_column=whole[0]),
        TextColumn("{task.percentage:>3.0f}%", table_column=whole[1]),
        TextColumn("{task.fields[rate]}", table_column=whole[2]),
        TimeRemainingColumn(table_column=whole[3]),
    )
    start, before = time.monotonic(), done
    with Bar(*columns, console=console) as bar:
        task = bar.add_task(title, total=total, completed=done, rate="", note="")

        def advance(amount: int, note: str = "") -> None:
            nonlocal done
            done += amount
            rate = (done - before) / max(time.monotonic() - start, 1e-9)
            bar.update(task, advance=amount, rate=_rate(rate, unit), note=note)

        yield advance
        bar.update(task, total=done)  # the work may have ended early, as a text does


def _rate(rate: float, unit: str) -> str:
    """Return a rate as text; a slow one keeps the digits that tell it from none."""
    return f"{shown('{:,.0f}' if rate >= 10 else '{:.1f}', rate)} {unit.partition(' ')[0]}/s"


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
            noted = "  ".join(note.splitlines())
            line = f"{title}: {done:,}/{total:,} {unit}, {_rate(rate, unit)}, {left:,.0f} s left"
            sys.stderr.write(printable(f"{line}; {noted}" if noted else line) + "\n")
            sys.stderr.flush()

    return advance

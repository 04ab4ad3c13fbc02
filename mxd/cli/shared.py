"""What the commands share: the app, the text and model that evaluations run on, printing and saving."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cyclopts import App, CycloptsError, CycloptsPanel, Parameter
from pydantic import ValidationError

from mxd import __version__
from mxd.common.errors import MxdError, printable
from mxd.questions import refusal

if TYPE_CHECKING:
    from mxd.evaluation.checkpoints import Subject

N = TypeVar("N")

MOST_UNITS = 100_000
"""Most units that can be named at a time."""

FLAT = Parameter(name="*", negative_iterable=())
"""Marks a question's config: its fields are the command's options."""


def _mistake(error: CycloptsError) -> Any:
    """Return what is shown for a mistake on the command line.

    Raises:
        MxdError: the mistake is in a question's config; the message is that of ``checked``.
    """
    if isinstance(error.__cause__, ValidationError):
        raise refusal(error.__cause__) from None
    return CycloptsPanel(error)


app = App(
    name="mxd",
    version=__version__,
    help="Train, share and splice faithful sparse replacement layers for the MLPs of frozen language models.",
    error_formatter=_mistake,
    suppress_keyboard_interrupt=False,  # ``main`` reports it
)


@Parameter(name="*")
@dataclass(frozen=True)
class HeldOut:
    """The text an evaluation reads and the base model it runs."""

    source: str | None = None
    """Text to read; by default that of training."""
    split: str | None = None
    """Split of it; by default validation."""
    column: str | None = None
    """Field that holds the text."""
    context: int | None = None
    """Tokens in a context."""
    model: str | None = None
    """Base model in place of the one named in the checkpoints."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda."""

    def open(self, command: str, checkpoints: Sequence[str]) -> "Subject":
        """Load the checkpoints a command was given.

        Raises:
            MxdError: there are none, or as ``open_checkpoints``.
        """
        if not checkpoints:
            raise MxdError(f"give at least one checkpoint: mxd {command} checkpoints/RUN")
        from mxd.evaluation.checkpoints import open_checkpoints

        text = {k: v for k, v in asdict(self).items() if k not in ("model", "device") and v is not None}
        return open_checkpoints(checkpoints, text, self.model, self.device)


HELD_OUT = HeldOut()


def show_faithfulness(results: dict[str, Any]) -> None:
    """Print the tables of faithfulness."""
    from mxd.common.progress import PlainConsole
    from mxd.report.tables import tasks_table, terminal_tables

    show(*terminal_tables(results, PlainConsole().width))
    if "lm_eval" in results:
        show(tasks_table(results["lm_eval"]))


def save_table(results: dict[str, Any], numbers: Path) -> Path:
    """Write the tables of faithfulness with all their columns, in Markdown, beside the numbers; return the file.

    Args:
        results: of ``mxd evaluate``.
        numbers: the file that holds them; ``table.md`` goes beside ``faithfulness.json``.
    """
    from mxd.common.files import atomic_file
    from mxd.report.tables import markdown_tables

    path = numbers.with_name(f"{numbers.stem.replace('faithfulness', 'table')}.md")
    with atomic_file(path) as file:
        file.write_text(printable(markdown_tables(results)), encoding="utf-8")
    return path


def save(results: dict[str, Any], checkpoints: Sequence[str], name: str, out: Path | None) -> Path:
    """Write results to a JSON file, and say where; return the file.

    Args:
        results: of a question.
        checkpoints: layers, folders or Hub references, as the command was given them.
        name: the file's name, without its ending.
        out: the file; by default in the first checkpoint's folder, for a Hub reference in the working directory.
    """
    from mxd.artifacts.hub import reference_of
    from mxd.evaluation.checkpoints import save_results

    reference = reference_of(checkpoints[0])
    default = Path(f"{name}-{reference.name}.json") if reference else Path(checkpoints[0], f"{name}.json")
    path = save_results(results, out or default)
    say(f"numbers: {path}")
    return path


def show(*lines: Any) -> None:
    """Print texts and tables with rich; a table that is wider than the terminal in parts, one below the other."""
    from rich.table import Table

    from mxd.common.progress import PlainConsole
    from mxd.report.tables import fitted

    console = PlainConsole()
    for line in lines:
        for part in fitted(line, console.width) if isinstance(line, Table) else [line]:
            console.print(part)


def numbers(option: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """Return the numbers of a list such as 3,17.

    Args:
        option: its name, for the message.
        text: the list.
        kind: ``int``, ``float`` or ``fraction``.

    Raises:
        MxdError: something else than numbers.
    """
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError as error:
        raise MxdError(f"{option} is {text!r}; expected numbers divided by commas.") from error


def fraction(text: str) -> float:
    """Return the value of a fraction such as 1/8, or of a decimal.

    Raises:
        ValueError: something else, or a denominator of zero.
    """
    try:
        return float(Fraction(text))
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(text) from error


def ranges(option: str, text: str) -> list[int]:
    """Return the numbers of a list such as 3,17,40-49.

    Raises:
        MxdError: something else than numbers and ranges, or too many numbers.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdecimal() or not (last or first).strip().isdecimal():
            raise MxdError(f"{option} is {text!r}; expected numbers and ranges such as 3,17,40-49.")
        span = range(int(first), int(last or first) + 1)
        if len(numbers) + len(span) > MOST_UNITS:
            raise MxdError(f"{option} is {text!r}; expected {MOST_UNITS:,} numbers at most.")
        numbers += span
    return numbers


def say(text: str) -> None:
    """Print a text; in a launch of many processes only the first prints."""
    if not rank():
        sys.stdout.write(printable(text) + "\n")


def suggest(command: str) -> None:
    """Print what may be typed next; not under ``--quiet``."""
    from mxd.common.progress import console

    if not console.quiet:
        say(f"next: {command}")


def rank() -> int:
    """Return this process's rank in its launch; rank 0 speaks for all."""
    return int(os.environ.get("RANK", 0)) if os.environ.get("WORLD_SIZE", "1") != "1" else 0

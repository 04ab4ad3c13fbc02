"""What the commands share: the app, the text and model that evaluations run on, printing and saving."""

import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, CycloptsError, Parameter, Token
from pydantic import ValidationError

from mxd import __version__
from mxd.common.bundled import check_model
from mxd.common.errors import MxdError, UsageError, nearest, printable
from mxd.common.overrides import read_fields
from mxd.common.parsing import spans, whole_number
from mxd.questions import refusal

if TYPE_CHECKING:
    from mxd.config import RunConfig
    from mxd.evaluation.checkpoints import Subject

N = TypeVar("N")

MOST_UNITS = 100_000
"""Most units that can be named at a time."""

FLAT = Parameter(name="*", negative_iterable=())
"""Marks a question's config: its fields are the command's options."""


def _whole(_: Any, words: Sequence[Token]) -> int:
    """Return the number that an option's word writes.

    Raises:
        ValueError: it writes none.
    """
    try:
        return int(whole_number(words[0].value))
    except ValueError:
        raise ValueError(f"expected a whole number, got {words[0].value!r}") from None


def _positive(_: Any, number: float | None) -> None:
    """Refuse a rate that is no rate.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    if number is not None and not 0 < number < float("inf"):
        raise ValueError(f"expected a finite number greater than 0, got {number}")


Rate = Annotated[float, Parameter(validator=_positive)]
"""A finite number above 0."""

Whole = Annotated[int, Parameter(converter=_whole)]
"""A whole number, also written 1e6, 10k or 1M, as the fields of configs are."""


def _check_file(_: Any, path: Path | None) -> None:
    """Refuse a path that no file can be written to, before there is anything to lose.

    Raises:
        MxdError: it is a folder, or lies where nothing can be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise MxdError(f"{str(path)!r} is a folder; give the file to write, such as {str(path / 'results.json')!r}.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(path if path.exists() else above, os.W_OK)):
        raise MxdError(f"cannot write {str(path)!r}: {above} is not a folder to write to; choose another file.")


OutFile = Annotated[Path | None, Parameter(validator=_check_file)]
"""A file that a command writes at its end."""


def mistake(error: CycloptsError) -> MxdError:
    """Return what is told of a mistake on the command line; in a question's config, as ``checked`` tells it."""
    return refusal(error.__cause__) if isinstance(error.__cause__, ValidationError) else UsageError(str(error))


app = App(
    name="mxd",
    version=__version__,
    help="Train, share and splice faithful sparse replacement layers for the MLPs of frozen language models.",
    exit_on_error=False,  # ``run`` reports mistakes
    print_error=False,
    suppress_keyboard_interrupt=False,  # ``mxd.cli.main`` reports it
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
    context: Whole | None = None
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
        check_checkpoints(checkpoints)
        if self.source is not None:
            _check_text(self.source, self.split or "validation")
        if self.model is not None:
            check_model(self.model)
        from mxd.evaluation.checkpoints import open_checkpoints

        text = {k: v for k, v in asdict(self).items() if k not in ("model", "device") and v is not None}
        return open_checkpoints(checkpoints, text, self.model, self.device)


HELD_OUT = HeldOut()


@Parameter(name="*")
@dataclass(frozen=True)
class LmEval:
    """Tasks of the lm-evaluation-harness that are scored as well."""

    lm_eval: str | None = None
    """Tasks of the lm-evaluation-harness to score as well: arc_easy,hellaswag. Needs pip install 'mxd[lm-eval]'."""
    lm_eval_limit: Whole | None = None
    """Documents of each task to use, at most."""
    lm_eval_include: Path | None = None
    """Folder with task files of your own."""

    def names(self, groups: str | None = None) -> list[str] | None:
        """Return what the tasks are called, ``None`` where there are none.

        Args:
            groups: an option that needs tasks, too, where the command has it.

        Raises:
            MxdError: options without tasks.
        """
        if self.lm_eval is not None:
            return self.lm_eval.split(",")
        given = {"limit": self.lm_eval_limit, "include": self.lm_eval_include, "groups": groups}
        if options := [f"--lm-eval-{name}" for name, value in given.items() if value is not None]:
            raise MxdError(f"{options[0]} is given without tasks; add --lm-eval TASKS.")
        return None


NO_TASKS = LmEval()


def configured(path: Path, overrides: Sequence[str], options: Sequence[str] = ()) -> "RunConfig":
    """Read a run's config; what shows in the file is refused before torch is imported.

    Args:
        path: the YAML file.
        overrides: fields to set, as ``read_fields`` takes them.
        options: the command's own options, for the message where one is mistyped.

    Raises:
        MxdError: as ``mxd.config.load_config``; no such option, model or text.
    """
    for word in overrides:
        if guess := nearest(word.partition("=")[0], [f"--{option}" for option in options]):
            raise MxdError(f"unknown option {word!r}.{guess}")
    raw = read_fields(path, overrides)
    model, data = (raw[name] if isinstance(raw.get(name), dict) else {} for name in ("model", "data"))
    if isinstance(model.get("source"), str):
        check_model(model["source"])
    if isinstance(source := data.get("source", "bundled"), str) and isinstance(
        split := data.get("split", "train"), str
    ):
        _check_text(source, split)
    from mxd.config import parse_config

    return parse_config(raw, str(path))


def _check_text(source: str, split: str) -> None:
    from mxd.data.text import check_source

    check_source(source, split)


def check_checkpoints(checkpoints: Sequence[str]) -> None:
    """Refuse local paths that hold no layer.

    Raises:
        MxdError: one of them holds none.
    """
    from mxd.artifacts.hub import reference_of
    from mxd.artifacts.listing import layers_in

    for checkpoint in checkpoints:
        if reference_of(checkpoint) is None:
            layers_in(Path(checkpoint), "*", checkpoint)


def check_answers(results: dict[str, Any]) -> None:
    """Refuse to call it done where a judge gave no answer at all; what was generated is saved by then.

    Args:
        results: of steering or of explanations.

    Raises:
        MxdError: a judge never answered.
    """
    asked: dict[str, int] = {}
    failed: dict[str, Counter[str]] = {}
    for result in results["results"].values():
        for judge, one in (result.get("judges") or {}).items():
            asked[judge] = asked.get(judge, 0) + one["asked"]
            failed[judge] = failed.get(judge, Counter()) + Counter(one["reasons"])
    for judge, number in asked.items():
        if number and failed[judge].total() >= number:
            reasons = ", ".join(f"{reason} ({times})" for reason, times in failed[judge].most_common())
            raise MxdError(f"{judge} gave no answer that counts, of {number} asked for: {reasons}.")


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
    from rich.text import Text

    from mxd.common.progress import PlainConsole
    from mxd.report.tables import fitted, hanging

    console = PlainConsole()
    for line in lines:
        if isinstance(line, Table):
            console.print(*fitted(line, console.width), sep="\n")
        elif isinstance(line, Text):
            console.print(*hanging(line, console), sep="\n")
        else:
            console.print(line)


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
    try:
        numbers = spans(text, MOST_UNITS)
    except ValueError as error:
        raise MxdError(f"{option} is {text!r}; {error}.") from error
    if min(numbers) < 0:
        raise MxdError(f"{option} is {text!r}; expected numbers and ranges such as 3,17,40-49.")
    return numbers


def say(text: str) -> None:
    """Print sentences, as ``tell`` does; in a launch of many processes only the first prints."""
    from mxd.common.progress import PlainConsole

    if not rank():
        PlainConsole().tell(text)


def suggest(command: str) -> None:
    """Print what may be typed next, without line ends of our own, so that it can be copied; not under ``--quiet``."""
    from mxd.common.progress import console

    if not console.quiet and not rank():
        sys.stdout.write(printable(f"next: {command}\n"))


def same_again() -> AbstractContextManager[None]:
    """Tell whoever interrupts a command that keeps its finished parts to type the same again."""
    from mxd.common.stop import continued_by

    return continued_by(f"mxd {shlex.join(sys.argv[1:])}")


def rank() -> int:
    """Return this process's rank in its launch; rank 0 speaks for all."""
    return int(os.environ.get("RANK", 0)) if os.environ.get("WORLD_SIZE", "1") != "1" else 0

"""The entry point of the command line, where every user's mistake becomes one message."""

import io
import os
import sys
import warnings
from typing import Annotated

from cyclopts import CycloptsError, Parameter

from mxd.cli import evaluate, masks, reproduce, share, train, units  # noqa: F401  the commands, for ``app``
from mxd.cli.shared import app, mistake, rank

NO_BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
"""Variables that switch off other libraries' bars; what a person set stays as it is."""


@app.meta.default
def _run(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Run a command.

    Args:
        words: the command and its options.
        quiet: Print errors and results alone: no progress, no notes, no warnings, no next steps. With any command.
    """
    from mxd.common import progress

    if quiet or not sys.stderr.isatty():
        for name in NO_BARS:
            os.environ.setdefault(name, "1")
    with progress.quiet(quiet), warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        app(words)


app.meta.help_flags = app.meta.version_flags = ()  # the commands' own
app.meta.suppress_keyboard_interrupt = False  # ``mxd.cli.main`` reports it
app.register_install_completion_command(help="Install completion of commands and options for this shell.")


def _end_bars() -> None:
    """Close the progress bars of a failed transfer, so that the message begins on a new line."""
    bars = sys.modules.get("huggingface_hub.utils.tqdm")
    for bar in list(getattr(bars.tqdm, "_instances", ())) if bars else ():  # tqdm has no public list of them
        bar.close()


def _obey(words: list[str]) -> None:
    """Run the command that the words of the command line name.

    Raises:
        MxdError: words that say nothing that can be done, and as the command.
    """
    try:
        app.meta(words)
    except CycloptsError as error:
        raise mistake(error) from None


def run() -> None:
    """Run the command line; a user's mistake is one message and a non-zero exit code, never a traceback.

    Raises:
        KeyboardInterrupt: Ctrl-C, for ``main`` to report.
        SystemExit: with a non-zero code, after a mistake, an interruption or a failure of the disk.
    """
    from mxd.common import errors
    from mxd.common.progress import PlainConsole

    if isinstance(sys.stdout, io.TextIOWrapper):  # a name in a file may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sorted(sys.argv[1:], key=lambda word: word != "--quiet")  # first, before options of a run's config
    command = next((word for word in words if word != "--quiet"), "")
    try:
        if os.environ.get("WORLD_SIZE", "1") != "1" and command not in ("train", "tune", "cache"):
            raise errors.SharedError("only `mxd train`, `tune`, `cache` run in many processes; start this one in one.")
        _obey(words)
    except errors.MxdError as error:
        _end_bars()
        if not (error.shared and rank()):
            PlainConsole(stderr=True).tell(f"mxd: {error}")
        if isinstance(error, errors.LostError):  # a thread may still wait inside torch; a normal exit would abort there
            sys.stderr.flush()
            os._exit(error.exit_code)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _end_bars()
        raise
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a full disk or a lost mount; files are written atomically, so nothing is damaged
        PlainConsole(stderr=True).tell(f"mxd: {errors.redact(str(error))}")
        sys.exit(1)

"""The command line: each command parses its options, then calls one function. Heavy imports are inside commands."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line (``mxd.cli.entry``); Ctrl-C is heard while it is still being imported.

    Raises:
        SystemExit: with a non-zero code, after a mistake, an interruption or a failure of the disk.
    """
    try:
        from mxd.cli.entry import run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("mxd: interrupted\n")
        sys.exit(130)

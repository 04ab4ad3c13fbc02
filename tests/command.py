"""The command line, in process."""

import sys
from typing import Any

import pytest


def mxd(capsys: pytest.CaptureFixture, *words: Any) -> tuple[int, str, str]:
    """Run ``mxd WORDS``: exit code, output and messages, in which there is never a traceback."""
    from mxd import cli

    sys.argv = ["mxd", *map(str, words)]
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err

"""The command line: parse, then call one function. Heavy imports stand inside the commands."""

from mxd.cli.main import main
from mxd.cli.shared import app

__all__ = ["app", "main"]

"""The command line: each command parses its options, then calls one function. Heavy imports are inside commands."""

from mxd.cli.main import main
from mxd.cli.shared import app

__all__ = ["app", "main"]

"""The command line: parse, then call one function. Heavy imports stand inside the commands."""

from mxd.cli.main import app, main

__all__ = ["app", "main"]

"""What a script says and how it ends where it is asked to check what it measured."""

import sys
from collections.abc import Sequence
from typing import NoReturn


def conclude(missed: Sequence[str], met: str = "every target is met") -> NoReturn:
    """Print what is missed, a line each, or that nothing is, and end with exit code 1 or 0."""
    print("\n".join(missed) or met)
    sys.exit(1 if missed else 0)

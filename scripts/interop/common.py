"""What the scripts of the peers share: noting a check, calling the step that was asked for."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor


def check(work: Path, name: str, got: Tensor, expected: Tensor, limit: float = 0.0) -> None:
    """Compare two tensors; print and note the largest difference, which must not exceed ``limit``."""
    same_shape = got.shape == expected.shape
    difference = float((got.double() - expected.double()).detach().abs().max()) if same_shape else float("nan")
    ok = difference <= limit
    print(f"{'ok    ' if ok else 'FAILED'} {name}: largest difference {difference:.3g} (limit {limit:.3g})", flush=True)
    with (work / "checks.jsonl").open("a") as file:
        file.write(json.dumps({"check": name, "difference": difference, "limit": limit, "ok": ok}) + "\n")


def main(*steps: Callable[[Path], None]) -> None:
    """Call the step named on the command line, with the work folder that follows it."""
    name, work = sys.argv[1:]
    {step.__name__: step for step in steps}[name](Path(work))

"""The state of a run under way, on disk: written whole or not at all, the newest good one found again."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mxd.checkpoint import FORMAT, atomic_folder, read_json, write_json
from mxd.errors import MxdError


def save_state(folder: Path, step: int, tensors: Mapping[str, Tensor], info: Mapping[str, Any], keep: int = 2) -> Path:
    """Write the state of a run after a step, and remove all but the newest ``keep``."""
    target = folder / f"step-{step:09d}"
    with atomic_folder(target) as partial:
        save_file({k: v.detach().contiguous() for k, v in tensors.items()}, partial / "state.safetensors")
        write_json(partial / "state.json", {"format": FORMAT, "step": step, **info})
    for old in _states(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def load_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Load the newest state of a run, or ``None`` where there is none.

    Raises:
        MxdError: the newest state is damaged.
    """
    states = _states(folder)
    if not states:
        return None
    try:
        return load_file(states[-1] / "state.safetensors"), read_json(states[-1] / "state.json")
    except (OSError, SafetensorError) as error:
        raise MxdError(f"cannot read {states[-1]}: {error}. Delete it to continue from the state before it.") from error


def _states(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*")) if folder.is_dir() else []

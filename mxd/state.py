"""The state of a run under way, on disk: written whole or not at all; the newest good one is found again.

state/step-000001000/NAME.safetensors  one part of it: weights, moments and counters of one replacement
state/step-000001000/state.json        everything else
state/step-000001000/manifest.json     size and SHA-256 of each of those files
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mxd.checkpoint import clear_partials, partial_name, publish, read_json, settle, write_json, writing
from mxd.distributed import ALONE, Processes
from mxd.errors import MxdError
from mxd.plain import file_sha256, regular
from mxd.progress import console

FORMAT = 2


class Written(BaseModel):
    """What a file is when it is whole."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The files of a state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[2] = 2
    files: dict[Annotated[str, Field(pattern=r"^[^/\\]+$")], Written]


@dataclass(frozen=True)
class State:
    """A state on disk whose files were found to be whole."""

    folder: Path
    step: int
    info: dict[str, Any]
    parts: tuple[str, ...]

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Read one part, into memory of its own: the file goes while training goes on.

        Raises:
            MxdError: the state has no such part, or it cannot be read.
        """
        if part not in self.parts:
            raise MxdError(f"{self.folder} has no {part!r}; it has: {', '.join(self.parts)}.")
        try:
            with safe_open(self.folder / f"{part}.safetensors", "pt") as file:
                return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise MxdError(f"cannot read {part} of {self.folder}: {error}.") from error


def save_state(
    folder: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    info: Mapping[str, Any],
    processes: Processes = ALONE,
    keep: int = 2,
) -> Path:
    """Write the state of a run after a step; when it is on the disk, remove all but the newest ``keep``.

    Args:
        folder: holds the run's states; all processes see the same.
        step: the last finished step.
        parts: name -> tensors, of this process; no other process gives a part of that name.
        info: everything else, as JSON; the first process's counts.
        processes: all that write the state; each of them calls this.
        keep: states to keep, this one included.

    Raises:
        MxdError: some process cannot write; the states before are as they were.
    """
    target = folder / f"step-{step:09d}"
    partial = processes.gather(partial_name(target))[0]
    try:
        with processes.together(), writing(target):
            if processes.first:
                partial.mkdir(parents=True)
        with processes.together(), writing(target):
            own = {f"{name}.safetensors": _write_part(partial, name, tensors) for name, tensors in parts.items()}
        given = [item for files in processes.gather(own) for item in files.items()]
        if len(given) > len(dict(given)):
            raise ValueError(f"a part is given twice: {sorted(name for name, _ in given)}")
        with processes.together(), writing(target):
            if processes.first:
                write_json(partial / "state.json", {"format": FORMAT, "step": step, **info})
                files = dict(given) | {"state.json": _settled(partial / "state.json")}
                write_json(partial / "manifest.json", Manifest(files=files).model_dump())
                settle(partial / "manifest.json")
                publish(partial, target)
                settle(folder.parent)
                for old in _states(folder)[:-keep]:
                    _remove(old)
    finally:
        if processes.first:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def load_state(folder: Path, processes: Processes = ALONE) -> State | None:
    """Find the newest state of a run whose every file is as it was written, or ``None`` where there is no state.

    Damaged states that are newer are renamed to ``damaged-...``, with a message. Remnants of killed saves are removed.

    Raises:
        MxdError: all states are damaged, or one is of an older format.
    """
    found: State | None = None
    with processes.together():
        if processes.first:
            clear_partials(folder)
            with writing(folder):
                found = _newest_whole(folder)
    return processes.gather(found)[0]


def _newest_whole(folder: Path) -> State | None:
    problems: dict[Path, str] = {}
    for place in reversed(_states(folder)):
        try:
            state = _whole(place)
        except _Damaged as error:
            problems[place] = str(error)
            continue
        for damaged, problem in problems.items():
            console.print(
                f"{damaged} is damaged and skipped: {problem}; it is kept as {_set_aside(damaged).name}. "
                f"Continuing from step {state.step:,}.",
                soft_wrap=True,
                markup=False,
            )
        return state
    if problems:
        listed = "; ".join(f"{place.name}: {problem}" for place, problem in problems.items())
        raise MxdError(
            f"every saved state in {folder} is damaged: {listed}. Put back a copy of one of them, or start anew under "
            "another name with --run NAME."
        )
    return None


class _Damaged(Exception):
    """A state is not what was written."""


def _whole(place: Path) -> State:
    """Check every file of a state against its manifest.

    Raises:
        _Damaged: a file is missing, or not what was written.
        MxdError: the state is of an older format, which had no manifest.
    """
    if not (place / "manifest.json").exists() and (place / "state.safetensors").exists():
        raise MxdError(
            f"{place} was saved by an earlier version of mxd (format 1, expected {FORMAT}); finish the run with that "
            "version, or start anew under another name with --run NAME."
        )
    try:
        manifest = Manifest.model_validate_json(regular(place / "manifest.json").read_bytes())
        for name, written in manifest.files.items():
            _compare(place / name, written)
        info = read_json(place / "state.json")
        parts = tuple(name.removesuffix(".safetensors") for name in manifest.files if name.endswith(".safetensors"))
        return State(place, info["step"], info, parts)
    except OSError as error:
        raise _Damaged(f"{Path(error.filename or place).name}: {error.strerror}") from error
    except (ValidationError, MxdError, LookupError, TypeError) as error:
        raise _Damaged("its manifest.json or state.json is not one") from error


def _compare(file: Path, written: Written) -> None:
    size = regular(file).stat().st_size
    if size != written.bytes:
        raise _Damaged(f"{file.name} has {size:,} bytes, {written.bytes:,} were written")
    if file_sha256(file) != written.sha256:
        raise _Damaged(f"{file.name} has another SHA-256 than when it was written")


def _write_part(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> Written:
    file = folder / f"{name}.safetensors"
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, file)
    return _settled(file)


def _settled(file: Path) -> Written:
    settle(file)
    return Written(bytes=file.stat().st_size, sha256=file_sha256(file))


def _states(folder: Path) -> list[Path]:
    """Return the states of a run, oldest first."""
    steps = {path: re.fullmatch(r"step-(\d{9,})", path.name) for path in folder.glob("step-*") if path.is_dir()}
    return sorted((path for path, step in steps.items() if step), key=lambda path: int(path.name[5:]))


def _remove(state: Path) -> None:
    """Remove a state; what a kill leaves of it does not look like one."""
    going = state.rename(partial_name(state))
    shutil.rmtree(going, ignore_errors=True)


def _set_aside(state: Path) -> Path:
    """Rename a damaged state; the name says what it is and no earlier one is overwritten."""
    names = (state.with_name(f"damaged-{state.name}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return state.rename(next(name for name in names if not name.exists()))

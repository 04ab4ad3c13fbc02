"""The state of a run under way, on disk: written whole or not at all; the newest undamaged one is found again.

run_id                                 identifies the run of the folder; its states repeat it
state/step-000001000/NAME.safetensors  one part: weights, moments and counters of one replacement
state/step-000001000/state.json        everything else
state/step-000001000/manifest.json     size and SHA-256 of each of those files
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mxd.common.errors import MxdError, said
from mxd.common.files import (
    atomic_file,
    clear_partials,
    file_sha256,
    partial_name,
    publish,
    read_text,
    regular,
    settle,
    write_json,
    writing,
)
from mxd.common.parsing import parse_json
from mxd.common.processes import ALONE, Processes
from mxd.common.progress import console
from mxd.data.activations import Cursor
from mxd.data.checks import MOST_USELESS

FORMAT = 6
RUN_FILE = "run_id"

HASH = r"^[0-9a-f]{32}$"


class Written(BaseModel):
    """Size and hash of a file as it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: NonNegativeInt
    sha256: str


class Manifest(BaseModel):
    """The files of a state."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[6] = 6
    files: dict[Annotated[str, Field(pattern=r"^[^/\\]+$")], Written]


class Info(BaseModel):
    """What ``state.json`` holds: everything but tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[6] = 6
    run_id: str = Field(pattern=HASH)
    """The run that the state belongs to."""
    step: PositiveInt
    """The last finished step."""
    tokens: PositiveInt
    """Tokens trained on, up to that step."""
    origin: dict[str, Any]
    """What determines the run's layers besides the text: config, base model, cache (``source.origin``)."""
    cursor: Cursor
    """Where the next batch begins, and the hash of the text up to there."""
    counted: dict[str, NonNegativeInt]
    """Replacement -> tokens counted since the last line of metrics."""
    metrics_bytes: NonNegativeInt
    """The size of ``metrics.jsonl``."""
    reported: dict[str, dict[str, float]]
    """Replacement -> its last line of metrics."""

    @model_validator(mode="after")
    def _check(self) -> "Info":
        cursor = self.cursor
        for name, value in {"context": cursor.context, "offset": cursor.offset, "batch": cursor.batch}.items():
            # At most MOST_USELESS contexts without a token to train on lie between two tokens that were trained on.
            if not 0 <= value <= (MOST_USELESS + 1) * self.tokens:
                raise ValueError(f"cursor.{name} = {value} cannot be after {self.tokens} tokens")
        if not re.fullmatch(HASH, cursor.text):
            raise ValueError(f"cursor.text = {cursor.text[:40]!r} is not a hash of a text")
        if cursor.bookmark and not 0 <= cursor.bookmark.context < cursor.context:
            raise ValueError(
                f"cursor.bookmark is after {cursor.bookmark.context} contexts, not before {cursor.context}"
            )
        if max(self.counted.values(), default=0) > self.tokens:
            raise ValueError(f"counted is more than {self.tokens} tokens")
        return self


@dataclass(frozen=True)
class State:
    """A state on disk whose files were verified."""

    folder: Path
    info: Info

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that hold tensors: one for every replacement of the run."""
        return tuple(self.info.counted)

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Read one part, into memory of its own: the file is removed while training continues.

        Raises:
            MxdError: there is no such part, or it cannot be read.
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
    parts: Mapping[str, Mapping[str, Tensor]],
    info: Info,
    processes: Processes = ALONE,
    keep: int = 2,
) -> Path:
    """Write the state of a run after a step, then remove all but the newest ``keep`` states.

    Args:
        folder: holds the run's states; a folder that all processes share.
        parts: name -> tensors, written by this process. Each name in ``info.counted`` comes from exactly one process.
        info: everything else; that of the first process is written.
        processes: all that write the state; each of them calls this.
        keep: states to keep, this one included.

    Raises:
        MxdError: some process cannot write; earlier states are untouched.
    """
    target = folder / f"step-{info.step:09d}"
    partial = processes.gather(partial_name(target))[0]
    try:
        with processes.together(), writing(target):
            if processes.first:
                partial.mkdir(parents=True)
        with processes.together(), writing(target):
            written = {f"{name}.safetensors": _write_part(partial, name, tensors) for name, tensors in parts.items()}
        files = [item for part in processes.gather(written) for item in part.items()]
        if sorted(name for name, _ in files) != sorted(f"{name}.safetensors" for name in info.counted):
            raise ValueError(f"each part must be given once: {sorted(name for name, _ in files)}")
        with processes.together(), writing(target):
            if processes.first:
                write_json(partial / "state.json", info.model_dump())
                listed = dict(files) | {"state.json": _settled(partial / "state.json")}
                write_json(partial / "manifest.json", Manifest(files=listed).model_dump())
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
    """Return the newest undamaged state of a run, or ``None`` where there is no state at all.

    Newer, damaged states are renamed to ``damaged-...``, with a message; remnants of killed saves are removed.

    Raises:
        MxdError: all states are damaged, or one is of an older format.
    """
    state: State | None = None
    with processes.together():
        if processes.first:
            clear_partials(folder)
            with writing(folder):
                state = _newest(folder)
    return processes.gather(state)[0]


def _newest(folder: Path) -> State | None:
    problems: dict[Path, str] = {}
    for path in reversed(_states(folder)):
        try:
            state = _verified(path)
        except _Damaged as error:
            problems[path] = str(error)
            continue
        for damaged, problem in problems.items():
            console.tell(
                f"{damaged} is damaged and skipped: {problem}; it is kept as {_set_aside(damaged).name}. "
                f"Continuing from step {state.info.step:,}."
            )
        return state
    if problems:
        listed = "; ".join(f"{path.name}: {problem}" for path, problem in problems.items())
        raise MxdError(
            f"every saved state in {folder} is damaged: {listed}. Put back a copy of one of them, or start anew under "
            "another name with --run NAME."
        )
    return None


class _Damaged(MxdError):
    """A state differs from what was written."""


def _verified(path: Path) -> State:
    """Check every file of a state against its manifest.

    Raises:
        _Damaged: a file is missing, differs from what was written, or holds values that cannot be.
        MxdError: the state is of an older format.
    """
    if _is_older(path):
        raise MxdError(
            f"{path} was saved by an earlier version of mxd, in another format than this one's ({FORMAT}); finish the "
            "run with that version, or start anew under another name with --run NAME."
        )
    name = "manifest.json"
    try:
        manifest = Manifest.model_validate_json(regular(path / name).read_bytes(), strict=True)
        for file, written in manifest.files.items():
            _compare(path / file, written)
        name = "state.json"
        info = Info.model_validate_json(regular(path / name).read_bytes(), strict=True)
    except OSError as error:
        raise _Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:80]
        problem = said(first)
        raise _Damaged(f"{name}: {where}: {problem}" if where else f"{name}: {problem}") from error
    expected = {"state.json", *(f"{part}.safetensors" for part in info.counted)}
    if manifest.files.keys() != expected:
        odd = ", ".join(sorted(manifest.files.keys() ^ expected))
        raise _Damaged(f"its manifest.json and its state.json disagree on {odd}")
    if path.name != f"step-{info.step:09d}":
        raise _Damaged(f"its state.json is that of step {info.step:,}")
    return State(path, info)


def _is_older(path: Path) -> bool:
    """Whether a state is of an older format: both files must say so, since one of them may be damaged."""
    if not (path / "manifest.json").exists():
        return (path / "state.safetensors").exists()
    formats = []
    for name in ("manifest.json", "state.json"):
        try:
            content = parse_json(regular(path / name).read_bytes())
            formats.append(content.get("format") if isinstance(content, dict) else None)
        except (OSError, ValueError):
            formats.append(None)
    return formats[0] == formats[1] in (2, 3, 4, 5)


def new_run(folder: Path) -> str:
    """Draw an id for the run that begins in a folder, write it there and return it.

    Raises:
        MxdError: it cannot be written.
    """
    run_id = uuid4().hex
    with atomic_file(folder / RUN_FILE) as file:
        file.write_text(f"{run_id}\n", encoding="utf-8")
    return run_id


def run_of(folder: Path) -> str | None:
    """Return the id of a folder's run, or ``None`` where there is no ``run_id``.

    Raises:
        MxdError: the file cannot be read, or holds something else.
    """
    file = folder / RUN_FILE
    try:
        run_id = read_text(file, most=100).strip()
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        run_id = ""
    if not re.fullmatch(HASH, run_id):
        raise MxdError(f"{file} does not name a run; put back the one that was there when the run began.")
    return run_id


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
    """Remove a state; under its new name the remnant of a killed removal is not taken for a state."""
    partial = state.rename(partial_name(state))
    shutil.rmtree(partial, ignore_errors=True)


def _set_aside(state: Path) -> Path:
    """Rename a damaged state to a name that is free."""
    names = (state.with_name(f"damaged-{state.name}{suffix}") for suffix in ("", *(f"-{i}" for i in range(2, 1000))))
    return state.rename(next(name for name in names if not name.exists()))

"""Files: ordinary ones read, files and folders that appear whole or not at all, and JSON in them."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError

from mxd.common.errors import MxdError
from mxd.common.parsing import Hook, parse_json


def regular(path: Path) -> Path:
    """Return the path if it is an ordinary file; reading a pipe might block, and a device might never end.

    Raises:
        OSError: there is no such file, or it is something else.
    """
    try:
        is_regular = S_ISREG(path.stat().st_mode)
    except ValueError as error:  # a NUL in the name
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
    if not is_regular:
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return path


def names_a_path(name: str) -> bool:
    """Return whether a name can only be that of something on this machine, which the Hub need not be asked for.

    These are ``./a``, ``~/a``, ``a/b/c``, and ``a/b`` where there is a folder ``a``; a revision on the Hub, which
    follows ``@``, may hold slashes.
    """
    if "://" in name:
        return False
    first, slash, rest = name.partition("@")[0].partition("/")
    return first in ("", ".", "..", "~") or "\\" in name or "/" in rest or bool(slash and os.path.isdir(first))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of an ordinary file.

    Raises:
        OSError: it cannot be read.
    """
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, most: int | None = None) -> str:
    """Return the text of an ordinary file of at most ``most`` bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger, or not UTF-8.
    """
    with regular(path).open("rb") as file:
        data = file.read(-1 if most is None else most + 1)
    if most is not None and len(data) > most:
        raise ValueError(f"it is larger than {most:,} bytes")
    return data.decode("utf-8-sig")  # without the mark of byte order that some editors write


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder that replaces the target if the block succeeds, and is deleted if it fails.

    Whatever happens, a power cut included, a reader finds the target whole or not at all.

    Raises:
        MxdError: the disk is full or the target cannot be written.
    """
    partial = partial_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise MxdError(f"cannot write to {target.parent}: {error}.") from error
    try:
        with writing(target):
            yield partial
            for path in partial.rglob("*"):
                settle(path)
            publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Give a name for a new file that replaces the target if the block succeeds; as ``atomic_folder``.

    Raises:
        MxdError: it cannot be written.
    """
    partial = partial_name(target)
    with writing(target):
        try:
            yield partial
            settle(partial)
            partial.replace(target)
            settle(target.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Give a name for a file whose path a person chose: as ``atomic_file``, except for links, pipes and devices.

    Parent folders are created, links are followed, and a pipe or device is written to directly, not replaced.

    Raises:
        MxdError: it cannot be written.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():
        with writing(target):
            yield target
    else:
        with atomic_file(target.resolve()) as file:
            yield file


def partial_name(target: Path) -> Path:
    """Return a new name beside the target for an unfinished version of it; ``clear_partials`` recognises such names."""
    return target.with_name(f".{target.name}.{uuid4().hex[:8]}")


def is_partial(path: Path) -> bool:
    """Whether a file or folder has a name that ``partial_name`` gives."""
    return re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name) is not None


def clear_partials(folder: Path) -> None:
    """Remove the unfinished files and folders that killed saves left in a folder that nobody else is writing to."""
    for path in filter(is_partial, folder.glob(".*")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn failures to write in the block into one clear error.

    Raises:
        MxdError: in place of the operating system's or safetensors' error.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise MxdError(
            f"cannot write {target}: {error}. Free space or choose another folder; nothing was lost."
        ) from error


def settle(path: Path) -> None:
    """Give a new file the usual permissions and wait until it, or a folder, is on the disk.

    Raises:
        OSError: it cannot be written to the disk.
    """
    if path.is_file():
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if path.is_file() or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system syncs folders
            raise
    finally:
        os.close(handle)


def publish(partial: Path, target: Path) -> None:
    """Give a finished folder, whose files are settled, its final name, then delete the folder that had it before.

    Raises:
        OSError: renaming failed; the target is as it was.
    """
    settle(partial)
    before = partial_name(target) if target.is_dir() else None
    if before is not None:
        target.rename(before)
    try:
        partial.rename(target)
    except BaseException:
        if before is not None:
            before.rename(target)
        raise
    settle(target.parent)
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)


def write_json(path: Path, value: Any, default: Callable[[Any], Any] = str) -> None:
    """Write JSON that a person can read.

    Args:
        path: the file.
        value: the data.
        default: says what stands for a value that JSON lacks.
    """
    path.write_text(json.dumps(value, indent=2, default=default) + "\n", encoding="utf-8")


def read_json(path: Path, hook: Hook | None = None) -> Any:
    """Read JSON.

    Args:
        path: the file.
        hook: as for ``parse_json``.

    Raises:
        MxdError: the file is not JSON.
    """
    try:
        return parse_json(read_text(path), hook)
    except (OSError, ValueError) as error:
        raise MxdError(f"cannot read {path}: {error}") from error

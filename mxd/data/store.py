"""A folder anywhere: on this machine, or wherever fsspec reaches (``s3://bucket/folder``, ``gs://...``, ``memory://``).

A file is written whole: on this machine under a hidden name and renamed, elsewhere by one upload. What is read as a
file is a file of this machine: the one that is there, or a copy that goes away with its last reader.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mxd.common.errors import MxdError, redact
from mxd.common.files import atomic_file, file_sha256, is_partial, regular, writing

Location = str | Path
"""A folder of this machine, or a URL."""


@dataclass(frozen=True)
class Store:
    """A folder of files, by their names relative to it."""

    name: str
    """The folder as it was given, for messages."""
    root: str
    """Its path in the file system."""
    remote: Any = None
    """fsspec's file system; ``None`` on this machine."""

    def names(self) -> set[str]:
        """Return what stands in the folder and is not just being written; nothing where there is no such folder.

        Raises:
            MxdError: it cannot be read.
        """
        if self.remote is None:
            return {path.name for path in Path(self.root).glob("*") if not is_partial(path)}
        with _in_one_line(f"cannot read {self.name}"):
            self.remote.invalidate_cache()  # another process may have written since it was listed
            try:
                return {path.rpartition("/")[2] for path in self.remote.ls(self.root, detail=False)}
            except FileNotFoundError:
                return set()

    def read(self, name: str) -> bytes | None:
        """Return what a small file holds, or ``None`` where there is none.

        Raises:
            MxdError: it cannot be read.
        """
        with _in_one_line(f"cannot read {self.name}/{name}"):
            try:
                return (
                    self.remote.cat_file(self._at(name)) if self.remote else regular(Path(self.root, name)).read_bytes()
                )
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file whole, in place of what is there.

        Raises:
            MxdError: the place cannot be written.
        """
        with self.new_file(name) as file:
            file.write_bytes(content)

    @contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """Give a name on this machine for a new file, which goes to its place when the block ends well.

        Raises:
            MxdError: it cannot be written.
        """
        if self.remote is None:
            with atomic_file(Path(self.root, name)) as partial:
                yield partial
            return
        with TemporaryDirectory(prefix="mxd-", ignore_cleanup_errors=True) as folder:
            file = Path(folder, "file")
            with writing(file):
                yield file
            with _in_one_line(f"cannot write {self.name}/{name}", "Nothing was lost: run the same again."):
                self.remote.put_file(str(file), self._at(name))

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Give a file as one of this machine: itself, or a whole copy, whose name vanishes with the block.

        Raises:
            MxdError: it cannot be fetched.
        """
        if self.remote is None:
            yield Path(self.root, name)
            return
        with TemporaryDirectory(prefix="mxd-", ignore_cleanup_errors=True) as folder:
            copy = Path(folder, "file")
            with _in_one_line(f"cannot read {self.name}/{name}", f"Copies go to {folder}; TMPDIR names another place."):
                self.remote.get_file(self._at(name), str(copy))
            yield copy

    def _at(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"


def open_store(location: Location) -> Store:
    """Find the file system of a location; nothing is read or written.

    Raises:
        MxdError: fsspec knows none of that name, its driver is not installed, or the URL holds a secret.
    """
    url = os.fspath(location)
    if "://" not in url:
        return Store(url, url)
    if redact(url) != url:
        raise MxdError(
            f"{redact(url)} is given with a user, password or query, which configs and checkpoints would record; give "
            "them to its driver in the environment or in its own files."
        )
    import fsspec

    try:
        found, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # no driver; no such protocol
        raise MxdError(f"cannot open {url}: {redact(str(error))}") from error
    except Exception as error:  # drivers raise what they like, for example where credentials are missing
        raise MxdError(f"cannot open {url}: {_reason(error)}") from error
    if found.protocol == "file" or "file" in found.protocol:
        return Store(url, root)
    return Store(url.rstrip("/"), root, found)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file of this machine; one that has not changed since is not read again.

    Raises:
        OSError: it cannot be read.
    """
    stat = path.stat()
    return _sha256(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@functools.cache
def _sha256(path: Path, *unchanged: int) -> str:
    return file_sha256(path)


def _reason(error: Exception) -> str:
    return redact((str(error) or type(error).__name__).splitlines()[0])


@contextmanager
def _in_one_line(what: str, remedy: str = "") -> Iterator[None]:
    try:
        yield
    except MxdError:
        raise
    except Exception as error:  # drivers raise what they like
        raise MxdError(f"{what}: {_reason(error)}. {remedy}".rstrip()) from error

"""A folder anywhere: on this machine, or wherever fsspec reaches (``s3://bucket/folder``, ``gs://...``, ``memory://``).

Files are written atomically: on this machine under a hidden name and renamed, elsewhere by one upload. Files are read
from this machine: in place, or from a copy that is deleted after its last reader has closed it.
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
"""A local folder, or a URL."""


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
        """Return the names in the folder, without files that are being written; none where there is no such folder.

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
        """Return the content of a small file, or ``None`` where there is none.

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
        """Write a small file atomically, replacing any of that name.

        Raises:
            MxdError: it cannot be written.
        """
        with self.new_file(name) as file:
            file.write_bytes(content)

    @contextmanager
    def new_file(self, name: str) -> Iterator[Path]:
        """Give a local name for a new file, which is moved or uploaded into the folder if the block succeeds.

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
            with _in_one_line(f"cannot write {self.name}/{name}", "Nothing was lost: run the same command again."):
                self.remote.put_file(str(file), self._at(name))

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """Give a file as a local one: itself, or a copy that is deleted after the block (open handles stay valid).

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
        MxdError: fsspec does not know the protocol, its driver is not installed, or the URL holds a secret.
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
        system, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # no driver; no such protocol
        raise MxdError(f"cannot open {url}: {redact(str(error))}") from error
    except Exception as error:  # drivers may raise anything, for example where credentials are missing
        raise MxdError(f"cannot open {url}: {_reason(error)}") from error
    if system.protocol == "file" or "file" in system.protocol:
        return Store(url, root)
    return Store(url.rstrip("/"), root, system)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a local file; an unchanged file is read only once.

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
    except Exception as error:  # drivers may raise anything
        raise MxdError(f"{what}: {_reason(error)}. {remedy}".rstrip()) from error

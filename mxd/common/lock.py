"""One run per folder: a lock that is released when its process ends, however that happens."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from mxd.common.errors import MxdError
from mxd.common.progress import console

LOCK_FILE = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Reserve a folder for this process while the block runs; create it if needed, and remove it again if left empty.

    The kernel holds the lock on an open file, so none outlives its process. Where a file system has no locks, a
    message says so and the block runs.

    Raises:
        MxdError: another process has reserved the folder, or it cannot be written.
    """
    if folder.is_file():
        raise MxdError(f"{folder} is a file; choose another run or out.")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    file = folder / LOCK_FILE
    lock = FileLock(file, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except Timeout:
        raise MxdError(
            f"{folder} is in use by {_holder(file)}; wait until that run ends, or choose another name with --run NAME."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise MxdError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out.") from error
        console.tell(
            f"{folder} lies on a file system without locks ({error.strerror}): make sure that no other run uses it."
        )
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()
        for path in made:
            with suppress(OSError):  # not empty: the run wrote something
                path.rmdir()


def _holder(file: Path) -> str:
    """Return who holds a lock, as far as the file says."""
    try:
        return file.read_text(encoding="utf-8") or "another process"
    except (OSError, UnicodeDecodeError):
        return "another process"

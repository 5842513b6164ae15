"""What a power cut must not take: bytes and names that are on the disk, not only in the system's memory.

A program that is killed loses nothing that it has handed to the system. A machine that loses power loses what no
``fsync`` has waited for: contents of a file, wholly or in part, whatever its name says; and names (of new files and
folders, of renamed and removed ones), each for itself. So a file is flushed before it is renamed to the name under
which it is found, and the folder after that, before anything is done that relies on the new name: saying that it is
there, or removing what it takes the place of.

``tests/distributed/test_checkpoint_power_cuts.py`` replays what saves do, with the power cut at every instant.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

FLUSH_BYTES = 64 << 20
"""The most that one flush of a growing file has to write."""
_CANNOT = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""What file systems say that flush no folder."""


def flush_folder(path: Path) -> None:
    """Let a folder's names reach the disk.

    Raises:
        OSError: the disk fails. A file system that cannot flush folders is taken as it is.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)


def flush_parents(path: Path) -> None:
    """Let a folder that may be new be found after a power cut, whoever has made the folders that it lies in."""
    for parent in path.absolute().parents:
        with contextlib.suppress(PermissionError):  # then they are another user's, and not new
            flush_folder(parent)


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], object], suffix: str = "tmp") -> None:
    """Put a file in its place, whole or not at all; :func:`flush_folder` makes its name last.

    Until then its name has ``suffix``: of this process's own, where several may write. A large ``content`` is a call
    that writes to the file it is given. An ``OSError`` has the name of ``path``.
    """
    temporary = path.with_name(f".{path.name}.{suffix}")
    try:
        with open(temporary, "wb") as file:
            content(file) if callable(content) else file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:  # a full disk keeps no half of a file
        with contextlib.suppress(OSError):
            temporary.unlink()
        # What torch.save makes of the system's word: its archive does not end where it should.
        of_torch = isinstance(error, RuntimeError) and "unexpected pos" in str(error)
        told = error.__context__ if of_torch else error
        if isinstance(told, OSError) and told.errno:
            raise OSError(told.errno, told.strerror, str(path)) from None
        raise


class Flushes:
    """Lets a file that is open for writing reach the disk while it grows, so that no single flush takes long.

    What is written waits in the system's memory, a fifth of all there is. To flush that at once took longer than other
    ranks had patience for, who see nothing of it until it is over.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._waiting = file, 0

    def wrote(self, nbytes: int) -> bool:
        """After every write; True when all bytes so far have just reached the disk."""
        self._waiting += nbytes
        if self._waiting < FLUSH_BYTES:
            return False
        self.flush()
        return True

    def flush(self) -> None:
        """Return when all bytes are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._waiting = 0

"""Room on a disk.

A memory-mapped file without room is a SIGBUS at some later write, and the end of the process. So room is taken before
a file is mapped, or data is written by calls that can fail; either way it is an exception that says needed and free.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path
from typing import Any

from swath.errors import DiskFull

#: No room, as the system says it: the disk's, the user's share of it, a file's.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def reserve(descriptor: int, num_bytes: int) -> None:
    """Make a file that long, with room for every byte of it; what is in it stays. Raises OSError."""
    about, disk = os.fstat(descriptor), os.statvfs(descriptor)
    # Looked at first, because taking all that there is before it fails would hurt others.
    if num_bytes - about.st_blocks * 512 > disk.f_bavail * disk.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    elif about.st_size < num_bytes:  # macOS
        os.ftruncate(descriptor, num_bytes)


def write_all(file: io.FileIO, data: Any, at: int) -> int:
    """Write bytes at a place of a file; how many. Raises OSError where there is no room, unlike a mapped file."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += _write_at(file.fileno(), view[done:] if done else view, at + done)
    return done


def _write_at(descriptor: int, data: memoryview, at: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, data, at)
    os.lseek(descriptor, at, os.SEEK_SET)  # Windows
    return os.write(descriptor, data)


def is_full(error: OSError) -> bool:
    return error.errno in _NO_ROOM


def disk_full(what: str, num_bytes: int, folder: Path, advice: str, error: OSError) -> DiskFull:
    """``what`` needs so many bytes of a folder's disk, which does not give them: ``error``."""
    message = f"{what} {show_bytes(num_bytes)} of disk, and {show_bytes(shutil.disk_usage(folder).free)} are free"
    if error.errno != errno.ENOSPC:  # a quota, or a limit: then there may be free space that we do not get
        message += f" ({error.strerror})"
    return DiskFull(f"{message}; {advice}", error.errno or errno.ENOSPC)


def show_bytes(count: float) -> str:
    """
    >>> show_bytes(999), show_bytes(64_000_000)
    ('999 B', '64.0 MB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:.0f} B"

"""Files in memory, without a name: they go when the last process lets go of them. (Nothing here needs torch.)"""

from __future__ import annotations

import ctypes
import os

from swath import platforms

#: ``MFD_CLOEXEC`` and ``MFD_ALLOW_SEALING``, which ``os`` has only together with ``memfd_create``.
_CLOSE_ON_EXEC = 1
_ALLOW_SEALING = 2
#: Of ``fcntl``, which not every Python was built with: add seals, and ask which there are …
_ADD_SEALS, _GET_SEALS = 1033, 1034
#: … that there will be no others, and that the file never gets smaller.
_SEAL_SEAL, _SEAL_SHRINK = 1, 2


def new_descriptor(name: str, *, flags: int = _CLOSE_ON_EXEC) -> int:
    """A file in memory; the name is for who looks at ``/proc``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    # Pythons of conda and uv are built for a C library that did not have it; the one that they run with does.
    platforms.require("memory for other processes", (platforms.SHARED_MEMORY,), "stay in one process")
    descriptor = platforms.libc().memfd_create(name.encode(), flags)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def new_sealed_descriptor(name: str, num_bytes: int) -> int:
    """One that nobody can make smaller under those who have it mapped (a SIGBUS). Pages are there once written."""
    import fcntl  # not on Windows

    descriptor = new_descriptor(name, flags=_CLOSE_ON_EXEC | _ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def keeps_its_size(descriptor: int) -> bool:
    """Whether it is a file in memory that nobody can make smaller."""
    import fcntl

    try:
        return bool(fcntl.fcntl(descriptor, _GET_SEALS) & _SEAL_SHRINK)
    except OSError:  # no file in memory
        return False

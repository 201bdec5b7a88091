"""What parts of swath need of the system, and what a user is told where it is missing.

Tested is Linux on x86-64. What stays in one process needs none of this. All else asks for it when it is made, so that
users of other systems read what to do instead, and not that ``os`` has no such attribute.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from swath.errors import UnsupportedPlatform


@dataclass(frozen=True)
class Need:
    """Something that not every system has."""

    what: str
    is_met: Callable[[], bool]


@lru_cache(maxsize=1)
def libc() -> Any:
    """The C library that this process runs with; None on Windows, which has none to ask for."""
    return ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def _in_libc(*names: str) -> bool:
    library = libc()
    return all(hasattr(library, name) for name in names)


def _can_open_descriptors() -> bool:
    return os.path.isdir("/proc/self/fd") or os.path.isdir("/dev/fd")


def _can_share_memory() -> bool:
    # Not every Python for Linux knows what its C library can do: see ``workers/memory.py``.
    can_make = hasattr(os, "memfd_create") or _in_libc("memfd_create")
    return can_make and hasattr(os, "posix_fallocate") and _can_open_descriptors()


PROCESSES = Need(
    "processes that can be forked and handed descriptors (fork, SCM_RIGHTS)",
    lambda: hasattr(os, "fork") and hasattr(socket, "SCM_RIGHTS"),
)
SHARED_MEMORY = Need("memory that processes share (memfd_create, posix_fallocate)", _can_share_memory)
FILES_BY_DESCRIPTOR = Need(
    "files that can be opened by their descriptor (/proc/self/fd, /dev/fd)", _can_open_descriptors
)
LOCAL_SOCKETS = Need("sockets within a machine (AF_UNIX)", lambda: hasattr(socket, "AF_UNIX"))
FILE_OWNERS = Need(
    "files with owners, and folders that can be held open (geteuid, openat)",
    lambda: hasattr(os, "geteuid") and os.open in os.supports_dir_fd,
)
INTERFACE_NAMES = Need("Linux's names for network interfaces", lambda: sys.platform == "linux")
SEMAPHORES = Need(
    "semaphores in shared memory (sem_init, sem_timedwait)",  # macOS has the first by name only, and not the second
    lambda: _in_libc("sem_init", "sem_post", "sem_trywait", "sem_timedwait"),
)
#: Without it, a process that reads without a lock could see that data is there before it sees the data.
ORDERED_STORES = Need(
    "a processor on which others see stores in the order in which they are made (x86-64)",
    lambda: platform.machine().lower() in ("x86_64", "amd64"),
)

#: Of worker processes that are told everything through a pipe …
WORKERS = (PROCESSES, SHARED_MEMORY)
#: … and of those that are given orders through shared memory.
STEPPING_WORKERS = (*WORKERS, SEMAPHORES, ORDERED_STORES)


def are_met(*needs: Need) -> bool:
    return all(need.is_met() for need in needs)


def require(who: str, needs: Sequence[Need], instead: str) -> None:
    """Raise ``UnsupportedPlatform`` unless this system has all of it; ``instead`` says what to use, as an order."""
    missing = [need.what for need in needs if not need.is_met()]
    if missing:
        here = f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}"
        raise UnsupportedPlatform(
            f"{who} needs {' and '.join(missing)}, which this system ({here}) does not have; {instead}, or run it on "
            "Linux on x86-64 (WSL2 or a container will do)"
        )

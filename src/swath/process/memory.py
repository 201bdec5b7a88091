"""Memory that several processes see.

It has no name: nothing appears in ``/dev/shm``, whose size (64 MB in a container) is no limit, and nothing can stay
behind. It is handed to another process as a descriptor, and goes when the last process lets go of it.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

import torch

from swath.disk import show_bytes
from swath.errors import OutOfSharedMemory
from swath.process import cgroups
from swath.process.memory_files import new_descriptor

#: Descriptors under this folder can be opened again by path; not so on macOS.
_DESCRIPTORS = "/proc/self/fd"


class SharedMemory:
    """So many bytes, zeroed; ``bytes_`` is a tensor over them. ``descriptor`` is what to give to other processes."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        free = free_bytes()
        if free is not None and num_bytes > free:
            raise out_of_memory(num_bytes, free)
        try:
            self.descriptor: int | None = new_descriptor("swath")
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise out_of_descriptors("make shared memory") from error
            raise
        try:
            # Pages are reserved now: where there are none, this fails, instead of a SIGBUS later.
            os.posix_fallocate(self.descriptor, 0, num_bytes)
            self.bytes_ = map_descriptor(self.descriptor, num_bytes)
        except (OSError, RuntimeError) as error:  # torch has no type of its own for what the system says
            self.close_descriptor()
            if "Too many open files" in str(error):
                raise out_of_descriptors("make shared memory") from error
            raise out_of_memory(num_bytes, free) from error

    def close_descriptor(self) -> None:
        """Keep the memory, but give it to nobody any more."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self) -> None:
        if self.__dict__.get("descriptor") is not None:
            self.close_descriptor()


def map_descriptor(descriptor: int, num_bytes: int) -> torch.Tensor:
    """The memory behind a descriptor, which may be closed afterwards."""
    path = f"{_DESCRIPTORS}/{descriptor}" if os.path.isdir(_DESCRIPTORS) else f"/dev/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def map_and_close(descriptor: int, num_bytes: int) -> torch.Tensor:
    """The memory behind a descriptor that was received for it alone."""
    try:
        return map_descriptor(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def map_of_process(pid: int, descriptor: int, num_bytes: int) -> torch.Tensor:
    """The memory behind a descriptor of another process, of the same user."""
    return torch.from_file(f"/proc/{pid}/fd/{descriptor}", shared=True, size=num_bytes, dtype=torch.uint8)


def free_bytes() -> int | None:
    """What this machine, or the control group of this process, has left; None where nobody says."""
    free: list[int] = []
    # Not pathlib's: a Ctrl-C in there is shown with an AttributeError that pathlib handles inside.
    with suppress(OSError), open("/proc/meminfo") as lines:
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    left = cgroups.read_limits().memory_left
    if left is not None:
        free.append(left)
    return min(free, default=None)


def out_of_descriptors(what: str) -> OutOfSharedMemory:
    import resource  # not on Windows, where this module is imported, too

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return OutOfSharedMemory(
        f"cannot {what}: this process has as many files open as it may ({limit}); raise the limit (ulimit -n), use "
        "fewer workers, or let go of batches that were delivered earlier"
    )


def require_descriptors(count: int, what: str) -> None:
    """Fail now if there are not so many descriptors left, rather than in the middle of something."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise out_of_descriptors(what) from error
    finally:
        for descriptor in opened:
            os.close(descriptor)


def out_of_memory(needed: int, free: int | None) -> OutOfSharedMemory:
    there = "" if free is None else f", and {show_bytes(free)} are free"
    return OutOfSharedMemory(
        f"a batch needs {show_bytes(needed)} of shared memory{there}; lower frames_per_batch, or let go of batches "
        "that were delivered earlier"
    )

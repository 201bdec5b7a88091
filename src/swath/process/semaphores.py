"""Semaphores in shared memory: how one process wakes another within a step.

POSIX semaphores without a name, in memory that both processes have mapped: nothing is left behind by whoever is
killed, and nothing that a killed process was doing can corrupt them. Raising one that nobody waits for is one call
of some hundred nanoseconds; so is taking one that is up.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from swath import platforms

if TYPE_CHECKING:
    import torch

#: Bytes of shared memory that a semaphore takes (``sem_t`` has 32 on 64-bit Linux).
SEMAPHORE_BYTES = 64
#: A sleep that was shorter than this need not have been one.
_SHORT_S = 0.001


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@lru_cache(maxsize=1)
def _libc() -> Any:
    platforms.require("a semaphore of several processes", (platforms.SEMAPHORES,), "use threads")
    libc = platforms.libc()
    libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    libc.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_TimeSpec))
    for name in ("sem_post", "sem_wait", "sem_trywait"):
        getattr(libc, name).argtypes = (ctypes.c_void_p,)
    return libc


class Semaphore:
    """A counter in ``memory`` (``SEMAPHORE_BYTES`` of it, aligned to 8) that can be waited for.

    One process makes it with ``initial``; others look at the same memory with ``initial=None``.

    >>> semaphore = Semaphore(private_memory(), initial=0)
    >>> semaphore.release()
    >>> semaphore.acquire(timeout_s=1), semaphore.acquire(timeout_s=0)
    (True, False)
    """

    __slots__ = ("_address", "_memory", "_post", "_timed_wait", "_try_wait", "_wait")

    def __init__(self, memory: torch.Tensor | ctypes.Array[Any], initial: int | None = None) -> None:
        libc = _libc()
        self._memory = memory  # kept mapped as long as this lives
        address = ctypes.addressof(memory) if isinstance(memory, ctypes.Array) else memory.data_ptr()
        self._address = ctypes.c_void_p(address)
        if initial is not None and libc.sem_init(self._address, 1, initial):
            raise OSError(ctypes.get_errno(), "sem_init")
        self._post = libc.sem_post
        self._try_wait = libc.sem_trywait
        self._timed_wait = libc.sem_timedwait
        self._wait = libc.sem_wait

    def release(self) -> None:
        self._post(self._address)

    def is_up(self) -> bool:
        """Lower it if that needs no waiting."""
        return not self._try_wait(self._address)

    def acquire(self, timeout_s: float | None) -> bool:
        """Wait until it can be lowered; False when the time is over, or earlier, when a signal came. None: for ever."""
        if not self._try_wait(self._address):
            return True
        if timeout_s is None:
            failed = self._wait(self._address)
        elif timeout_s <= 0:
            return False
        else:
            until = time.time() + timeout_s
            moment = _TimeSpec(int(until), int(until % 1 * 1e9))
            failed = self._timed_wait(self._address, ctypes.byref(moment))
        if not failed:
            return True
        if ctypes.get_errno() in (errno.ETIMEDOUT, errno.EINTR):
            return False
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class ThreadSemaphore:
    """A ``Semaphore`` of threads, for systems that have no other."""

    __slots__ = ("_semaphore",)

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)

    def release(self) -> None:
        self._semaphore.release()

    def is_up(self) -> bool:
        return self._semaphore.acquire(blocking=False)

    def acquire(self, timeout_s: float) -> bool:
        return self._semaphore.acquire(timeout=max(timeout_s, 0.0))


def private_memory() -> ctypes.Array[Any]:
    """Room for one that no other process sees."""
    return (ctypes.c_uint64 * (SEMAPHORE_BYTES // 8))()


def semaphore_of_threads() -> Semaphore | ThreadSemaphore:
    """One that is down, in memory of this process."""
    if platforms.are_met(platforms.SEMAPHORES):
        return Semaphore(private_memory(), initial=0)
    return ThreadSemaphore()


class Watch:
    """Waits for a semaphore that mostly goes up soon: for a moment without sleeping.

    Waking a process takes 50 µs and more, as long as a step of a cheap env. So whoever waits looks again and again,
    and offers its core to everybody else in between (``sched_yield``): it takes what nobody needs. That is bounded,
    and done only as long as it pays: after a long wait the next one sleeps at once.

    Args:
        tries: how often to look before going to sleep, about 1 µs each.
    """

    __slots__ = ("_pays", "_semaphore", "_tries")

    def __init__(self, semaphore: Semaphore | ThreadSemaphore, tries: int) -> None:
        self._semaphore = semaphore
        self._tries = tries
        self._pays = True

    def wait(self, timeout_s: float) -> bool:
        """As ``Semaphore.acquire``."""
        semaphore = self._semaphore
        if semaphore.is_up():
            return True
        if self._pays:
            for _ in range(self._tries):
                os.sched_yield()
                if semaphore.is_up():
                    return True
        started = time.perf_counter()
        is_up = semaphore.acquire(timeout_s)
        self._pays = time.perf_counter() - started < _SHORT_S
        return is_up

"""Semaphores in shared memory: how one process wakes another within a step.

POSIX semaphores without a name, in memory that both processes have mapped: nothing is left behind by whoever is
killed, and nothing that a killed process was doing can corrupt them. Raising one that nobody waits for is one call
of some hundred nanoseconds; so is taking one that is up.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from functools import lru_cache
from typing import Any

import torch

#: Bytes of shared memory that a semaphore takes (``sem_t`` has 32 on 64-bit Linux).
SEMAPHORE_BYTES = 64


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "sem_init") or os.uname().sysname == "Darwin":
        raise NotImplementedError(
            "envs in processes that step together need POSIX semaphores in shared memory, which this system does not "
            "have; use SerialEnv, or a MultiCollector"
        )
    libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    libc.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_TimeSpec))
    for name in ("sem_post", "sem_wait", "sem_trywait"):
        getattr(libc, name).argtypes = (ctypes.c_void_p,)
    return libc


class Semaphore:
    """A counter in ``memory`` (``SEMAPHORE_BYTES`` of it, aligned to 8) that can be waited for.

    One process makes it with ``initial``; others look at the same memory with ``initial=None``.

    >>> semaphore = Semaphore(torch.zeros(SEMAPHORE_BYTES, dtype=torch.uint8), initial=0)
    >>> semaphore.release()
    >>> semaphore.acquire(timeout_s=1), semaphore.acquire(timeout_s=0)
    (True, False)
    """

    __slots__ = ("_address", "_memory", "_post", "_timed_wait", "_try_wait")

    def __init__(self, memory: torch.Tensor, initial: int | None = None) -> None:
        libc = _libc()
        self._memory = memory  # kept mapped as long as this lives
        self._address = ctypes.c_void_p(memory.data_ptr())
        if initial is not None and libc.sem_init(self._address, 1, initial):
            raise OSError(ctypes.get_errno(), "sem_init")
        self._post = libc.sem_post
        self._try_wait = libc.sem_trywait
        self._timed_wait = libc.sem_timedwait

    def release(self) -> None:
        self._post(self._address)

    def acquire(self, timeout_s: float, spins: int = 0) -> bool:
        """Wait until it can be lowered; False when the time is over, or earlier, when a signal came.

        ``spins``: how often to try before going to sleep, where there is a core to spare for that.
        """
        for _ in range(spins + 1):
            if not self._try_wait(self._address):
                return True
        if timeout_s <= 0:
            return False
        until = time.time() + timeout_s
        moment = _TimeSpec(int(until), int(until % 1 * 1e9))
        if not self._timed_wait(self._address, ctypes.byref(moment)):
            return True
        if ctypes.get_errno() in (errno.ETIMEDOUT, errno.EINTR):
            return False
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

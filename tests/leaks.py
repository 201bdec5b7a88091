"""What a test leaves behind: processes, descriptors, shared memory."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed

from swath.workers.start import server


def children(pid: int | None = None) -> set[int]:
    """All processes below one, the server that workers are forked from and its tracker left out."""
    found: set[int] = set()
    own_servers = {server()._forkserver_pid, getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)}
    _collect(pid or os.getpid(), found)
    return found - own_servers


def _collect(pid: int, found: set[int]) -> None:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        try:
            below = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, below):
            found.add(child)
            _collect(child, found)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> set[str]:
    """Named memory. (Named semaphores are left out: swath makes none, other programs on the machine may.)"""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """For what another process does in its own time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@functools.lru_cache(maxsize=1)
def _open_what_stays_open() -> None:
    """The first store of torch.distributed in a process opens a pipe (libuv's, for signals) that is never closed."""
    torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Nothing is left behind, 5 seconds after the test at the latest."""
    server().ensure_running()
    _open_what_stays_open()
    gc.collect()
    before = children(), descriptors(), shared_memory()
    yield
    gc.collect()
    assert wait_until(lambda: children() <= before[0]), f"processes left: {children() - before[0]}"
    assert wait_until(lambda: descriptors() <= before[1]), f"descriptors: {before[1]} before, {descriptors()} after"
    assert shared_memory() <= before[2], f"shared memory left: {shared_memory() - before[2]}"

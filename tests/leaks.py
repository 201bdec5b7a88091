"""What a test leaves behind: processes, descriptors, shared memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import multiprocessing.resource_tracker
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch.distributed

from swath.process.start import server
from warned import warned_here


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


def descriptors() -> dict[int, str]:
    """What is open, by its number."""
    opened = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            opened[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return opened


def _new_descriptors(before: dict[int, str]) -> dict[int, str]:
    return {number: what for number, what in descriptors().items() if before.get(number) != what}


def shared_memory() -> set[str]:
    """Named memory, but for that of programs beside this one, such as another process that runs tests.

    Torch and multiprocessing write the number of the process into the name. (Named semaphores are left out: swath
    makes none, other programs on the machine may.)
    """
    ours = {os.getpid(), *children()}
    return {
        name
        for name in os.listdir("/dev/shm")
        if not name.startswith("sem.") and not any(_is_alive(pid) for pid in _numbers(name) - ours)
    }


def _numbers(name: str) -> set[int]:
    return {int(number) for number in re.findall(r"(?<![0-9a-f])[0-9]+(?![0-9a-f])", name)}


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    """For what another process does in its own time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def warned(text: str) -> contextlib.AbstractContextManager[Any]:
    """By any thread; at the line that began it."""
    return warned_here(match=text)


@functools.lru_cache(maxsize=1)
def _open_what_stays_open() -> None:
    """What the first of a kind in a process opens, and nobody closes.

    A store of torch.distributed has a pipe (libuv's, for signals); an array that multiprocessing shares, as Gymnasium's
    AsyncVectorEnv does, the file of its heap; a connection that is pickled, the socket that it is fetched from.
    """
    ours, theirs = multiprocessing.Pipe()
    pickle.loads(ForkingPickler.dumps(theirs)).close()
    ours.close()
    theirs.close()
    multiprocessing.RawArray("c", 1)
    store = torch.distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]  (public, but not in an __all__)
    store("127.0.0.1", 0, None, True, wait_for_workers=False)


@contextlib.contextmanager
def nothing_is_left() -> Iterator[None]:
    """Nothing is left behind, 5 seconds after the test at the latest."""
    server().ensure_running()
    _open_what_stays_open()
    gc.collect()
    before = children(), descriptors(), shared_memory()
    yield
    gc.collect()
    assert wait_until(lambda: children() <= before[0]), f"processes left: {children() - before[0]}"
    fits = wait_until(lambda: len(descriptors()) <= len(before[1]))
    assert fits, f"descriptors: {len(before[1])} before, {len(descriptors())} after; new: {_new_descriptors(before[1])}"
    assert shared_memory() <= before[2], f"shared memory left: {shared_memory() - before[2]}"

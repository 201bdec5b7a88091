"""Processes, as whoever started them holds them: whether they have ended, and how; ending them, also at exit."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, Generic, TypeVar

from swath.process.owner import descriptor_of
from swath.process.start import StartMethod, start_process

#: The server of a forked process tells its exit code a little later: on a busy machine, after seconds.
_SECONDS_TO_BE_TOLD = 10.0
#: Of the time that processes have to end: until they are told to (SIGTERM), and from then on until they are killed.
_SHARE_TO_LEAVE = 0.6
_SHARE_TO_TERMINATE = 0.14

Thing = TypeVar("Thing")


class Process:
    """Starts a process (see ``start_process``), and holds it until ``close``. Any thread may ask."""

    def __init__(self, method: StartMethod, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
        self._process = start_process(method, target, args, name)
        self.pid: int = self._process.pid
        descriptor = descriptor_of(self.pid)
        #: Ready when it has ended; -1 once it is closed. (Not ``multiprocessing``'s: a child of it may hold that open.)
        self.sentinel: int = os.dup(self._process.sentinel) if descriptor is None else descriptor
        self._owner_pid = os.getpid()
        self._exit_code: int | None = None
        self._lock = threading.RLock()

    @property
    def is_ours(self) -> bool:
        """False in a forked copy of its owner: it is not that one's child."""
        return self._owner_pid == os.getpid()

    @property
    def is_closed(self) -> bool:
        return self.sentinel == -1

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Now, or within some time."""
        sentinel = self.sentinel  # another thread may close it: before this line, or within the next
        try:
            return sentinel == -1 or bool(wait([sentinel], timeout_s))
        except (OSError, ValueError):
            return True

    def exit_code(self) -> int | None:
        """None while it runs, or if nobody tells."""
        with self._lock:  # of two that ask ``multiprocessing`` at a time, one would be told 255
            if self._exit_code is None and self.has_ended():
                self._exit_code = _exit_code_of(self._process)
            return self._exit_code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if not self.has_ended():  # else the number may be another's
            with suppress(OSError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Once it has ended: nothing that belongs to it stays open."""
        with self._lock:
            if not self.is_closed:
                self.exit_code()
                sentinel, self.sentinel = self.sentinel, -1
                os.close(sentinel)
                with suppress(OSError, ValueError, AssertionError):
                    self._process.close()


def _exit_code_of(process: Any) -> int | None:
    deadline = time.monotonic() + _SECONDS_TO_BE_TOLD
    with suppress(ValueError, AssertionError):  # closed; or asked in a forked copy of its owner
        while process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return process.exitcode
    return None


def exit_text(code: int | None) -> str:
    """
    >>> exit_text(1), exit_text(-9), exit_text(-77)
    ('exit code 1', 'killed by SIGKILL', 'killed by signal 77')
    """
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def how_it_ended(code: int | None) -> str:
    """
    >>> how_it_ended(1), how_it_ended(-9)
    ('left with exit code 1', 'was killed by SIGKILL')
    """
    return f"{'left with' if code is None or code >= 0 else 'was'} {exit_text(code)}"


def end_processes(
    processes: Sequence[Process],
    timeout_s: float,
    ask: Callable[[], Any] = lambda: None,
    *,
    terminates: bool = True,
    seconds_to_die: float = 1.0,
) -> None:
    """Ask processes to leave, then tell them (unless not ``terminates``), then kill them, in ``timeout_s`` at most.

    Ctrl-C kills them at once, and comes afterwards. ``seconds_to_die`` is how long to wait for the killed.
    """
    try:
        ask()
        left = _still_there(processes, timeout_s * (_SHARE_TO_LEAVE if terminates else 1.0))
        if terminates:
            for process in left:
                process.terminate()
            _still_there(left, timeout_s * _SHARE_TO_TERMINATE)
    finally:
        left = _still_there(processes, 0.0)
        for process in left:
            process.kill()
        _still_there(left, seconds_to_die)


def _still_there(processes: Sequence[Process], timeout_s: float) -> list[Process]:
    """Wait for the end of processes; those that have not ended."""
    deadline = time.monotonic() + timeout_s
    left = {process.sentinel: process for process in processes if not process.is_closed}
    while left:
        ended = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
        for sentinel in ended:
            del left[sentinel]  # type: ignore[arg-type]
        if not ended:
            break
    return list(left.values())


class EndedAtExit(Generic[Thing]):
    """What is ended when the interpreter is about to leave, if it was not before. Things are not kept by it.

    (Before ``multiprocessing`` waits for children, which would be for ever, and before threads lose what they use.)

    Args:
        end: is given all that are left, of this process or of the one that it was forked from.
    """

    def __init__(self, end: Callable[[list[Thing]], Any]) -> None:
        self._end = end
        self._things: weakref.WeakSet[Any] = weakref.WeakSet()
        self._registered_in: int | None = None

    def add(self, thing: Thing) -> None:
        self._things.add(thing)
        if self._registered_in != os.getpid():
            self._registered_in = os.getpid()
            atexit.register(lambda: self._end(list(self._things)))

    def discard(self, thing: Thing) -> None:
        self._things.discard(thing)

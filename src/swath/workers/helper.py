"""A process that does one thing after another for its owner."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from swath.errors import WorkerDied
from swath.workers.channel import Channel, close_when_forked
from swath.workers.endings import exit_code_of, how_it_ended, let_go
from swath.workers.owner import when_owner_is_gone
from swath.workers.start import StartMethod, start_process

#: A process whose owner is gone has so long to end by itself.
_SECONDS_TO_LEAVE = 1.0


class Helper:
    """The process, as its owner holds it.

    Args:
        main: what it runs, with its end of the pipe; calls ``leave_with_owner`` first, and returns when it is told
            "close", or when its pipe is closed.
        what: for messages: what it is there for.
    """

    def __init__(self, main: Callable[[Connection], None], what: str, method: StartMethod = "forkserver") -> None:
        ours, theirs = Pipe(duplex=True)
        try:
            self._process = start_process(method, main, (theirs,), f"swath-{what}")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._what = what
        self._channel = Channel(ours)
        close_when_forked(self._channel)
        self._sending = threading.Lock()
        self.pid: int = self._process.pid
        # (Not process.sentinel: a child of the process may hold that open.)
        self._sentinel = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else os.dup(self._process.sentinel)

    @property
    def who(self) -> str:
        return f"the {self._what}'s process (pid {self.pid})"

    def ask(self, message: bytes) -> tuple[Any, ...]:
        """Send a message, and wait for the answer.

        Raises:
            WorkerDied: there will be none.
        """
        try:
            with self._sending:
                self._channel.send_pickled(message)
            wait([self._channel.connection, self._sentinel])
            return self._channel.receive()
        except (EOFError, OSError) as error:
            raise self._died() from error

    def tell_to_close(self) -> None:
        """Does not wait for long, should the process not read what it is being sent."""
        if self._sending.acquire(timeout=0.2):
            try:
                with contextlib.suppress(OSError):
                    self._channel.send("close")
            finally:
                self._sending.release()

    def kill(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._process.kill()

    def close(self, timeout_s: float) -> None:
        """Let it end, by force if need be; once, and by nobody else while one asks."""
        self.tell_to_close()
        if not wait([self._sentinel], timeout=timeout_s):
            self.kill()
            wait([self._sentinel], timeout=timeout_s)
        self._channel.close()
        os.close(self._sentinel)
        let_go(self._process)

    def _died(self) -> WorkerDied:
        wait([self._sentinel], timeout=1.0)
        how = how_it_ended(exit_code_of(self._process))
        return WorkerDied(f"{self.who} {how}; what it printed may say more. Make a new {self._what}", worker=0)


def leave_with_owner() -> None:
    """In the process: Ctrl-C is for the owner, and without an owner there is nothing left to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    when_owner_is_gone(seconds=_SECONDS_TO_LEAVE)

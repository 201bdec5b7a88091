"""A process that does one thing after another for its owner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from swath.errors import WorkerDied
from swath.process.channel import new_pipe
from swath.process.start import StartMethod
from swath.process.supervise import Process, end_processes, how_it_ended

#: How long a message to one that does not read may take.
_SECONDS_TO_SEND = 0.2


class Helper:
    """The process, as its owner holds it.

    Args:
        main: what it runs, with its end of the pipe and ``args``; calls ``leave_with_owner`` first, and returns when it
            is told "close", or when its pipe is closed.
        what: for messages: what it is there for.
        died: makes the exception that is raised when it is gone.
    """

    def __init__(
        self,
        main: Callable[..., None],
        what: str,
        method: StartMethod = "forkserver",
        args: tuple[Any, ...] = (),
        died: Callable[[str], Exception] | None = None,
    ) -> None:
        with new_pipe() as (self._channel, theirs):
            self.process = Process(method, main, (theirs, *args), f"swath-{what.replace(' ', '-')}")
        self.who = f"the {what}'s process (pid {self.process.pid})"
        self._make_error = died or (lambda text: WorkerDied(f"{text}. Make a new {what}", worker=0))
        #: Of whoever asks from several threads, lest it is closed meanwhile.
        self.lock = threading.RLock()
        self.kill = self.process.kill

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, message: bytes) -> tuple[Any, ...]:
        """Send a message, and wait for the answer.

        Raises:
            WorkerDied: there will be none.
        """
        self.send(message)
        self.wait()
        return self.receive()

    def send(self, message: bytes) -> None:
        """Lost if the process is gone: ``receive`` tells."""
        with suppress(OSError):
            self._channel.send_pickled(message)

    def wait(self, timeout_s: float | None = None) -> bool:
        """For a message, or the end of the process."""
        return bool(wait([self._channel.connection, self.process.sentinel], timeout_s))

    def receive(self) -> tuple[Any, ...]:
        try:
            return self._channel.receive()
        except (EOFError, OSError) as error:
            self.process.has_ended(1.0)
            how = how_it_ended(self.process.exit_code())
            raise self._make_error(f"{self.who} {how}; what it printed may say more") from error

    def tell_to_close(self) -> None:
        """Does not wait for long, should the process not read what it is being sent."""
        self._channel.send_in_time(_SECONDS_TO_SEND, "close")

    def close(self, timeout_s: float, *, terminates: bool = False) -> None:
        """Let it end, by force if need be."""
        if not self.process.is_ours or self.process.is_closed:
            return
        try:
            end_processes([self.process], timeout_s, self.tell_to_close, terminates=terminates)
        finally:
            with self.lock:
                self._channel.close()
                self.process.close()

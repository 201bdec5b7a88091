"""How others reach a rollout while it collects: between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from swath.timeline.recorder import Recorder


class Control(Protocol):
    """What may reach a rollout from outside while it collects, such as new weights; see ``workers/``."""

    #: A byte that another process sets when there is something to read; looked at after every step.
    waiting: Any
    #: Where the rollout writes how many steps of the batch it took, for whoever watches that it goes on.
    beat: Any
    #: Whether to end the batch after the steps that were taken.
    stop_requested: bool
    #: The version of the weights, as of the last ``read``.
    policy_version: int
    #: Where to write who takes how long, while somebody wants to know.
    recorder: Recorder | None

    def read(self) -> None:
        """Do what is asked. Whatever it raises ends the batch without delivering it."""
        ...

    def commit(self, num_steps: int) -> None:
        """So many steps of this batch are in their final place."""
        ...

    def collecting(self) -> AbstractContextManager[None]:
        """While this lasts, the thread that entered it takes steps."""
        ...

    def run(self, task: Callable[[], Any]) -> Any:
        """Do something while no step is taken, and wait for it."""
        ...


class ThreadControl:
    """Of a rollout in the caller's own process: what other threads ask for is done between two steps."""

    def __init__(self) -> None:
        self.waiting = bytearray(1)
        self.stop_requested = False
        self.beat = [0]
        self.policy_version = 0
        self.recorder: Recorder | None = None
        #: Held while a task is done.
        self._lock = threading.RLock()
        self._tasks: list[tuple[Callable[[], Any], Future[Any]]] = []
        #: The thread that takes steps.
        self._collects: int | None = None

    def ask_to_stop(self) -> None:
        self.stop_requested = True
        self.waiting[0] = 1

    def go_on(self) -> None:
        self.stop_requested = False
        self.waiting[0] = 0

    def commit(self, num_steps: int) -> None: ...

    @contextmanager
    def collecting(self) -> Iterator[None]:
        with self._lock:
            self._collects = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._collects = None
                self._do_all()

    def read(self) -> None:
        with self._lock:
            self.waiting[0] = 0
            self._do_all()

    def _do_all(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task, outcome in tasks:
            try:
                outcome.set_result(task())
            except BaseException as error:
                outcome.set_exception(error)

    def run(self, task: Callable[[], Any]) -> Any:
        """A hook, a policy or an env that asks for something does it itself."""
        with self._lock:
            if self._collects in (None, threading.get_ident()):
                return task()
            outcome: Future[Any] = Future()
            self._tasks.append((task, outcome))
            self.waiting[0] = 1
        return outcome.result()

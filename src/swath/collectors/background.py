"""Collecting in the background: a thread that runs until it is paused, stopped, done, or fails."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from swath.errors import BackgroundFailed

_SECONDS_BETWEEN_LOOKS = 0.002


class Work(Protocol):
    """What a background does, one piece after the other."""

    #: Whether other processes write to the buffer.
    writes_elsewhere: bool

    def may_go_on(self) -> bool:
        """False: the learner is behind; ask again."""
        ...

    def do_some(self) -> bool:
        """The next piece; False when all is done."""
        ...

    def hurry(self) -> None:
        """End the piece under way soon; called from another thread."""
        ...

    def is_still(self) -> bool:
        """Whether nothing is under way, between two pieces."""
        ...

    def go_on(self) -> None:
        """It need not be ended any more."""
        ...


class Background:
    """Runs ``work`` in a thread.

    Pausing and stopping end the piece under way after the step that is being taken, and return when it has ended.
    """

    def __init__(self, name: str, work: Work) -> None:
        self._name = name
        self._work = work
        self._state = threading.Condition()
        self._pauses = 0
        self._stopping = False
        self._idle = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"swath-{name}", daemon=True)

    def start(self) -> None:
        _running.add(self)
        _stop_at_exit()
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._wait_for_turn() and self._work.do_some():
                pass
        except BaseException as error:
            self._failure = error
        finally:
            with self._state:
                self._idle = True
                self._state.notify_all()

    def _wait_for_turn(self) -> bool:
        """False when there is no other turn."""
        while True:
            with self._state:
                if (self._pauses or self._stopping) and not self._work.is_still():
                    return True
                while self._pauses and not self._stopping:
                    self._idle = True
                    self._state.notify_all()
                    self._state.wait()
                self._idle = False
                if self._stopping:
                    return False
                if self._work.may_go_on():
                    self._work.go_on()
                    return True
            time.sleep(_SECONDS_BETWEEN_LOOKS)

    # -- from other threads ----------------------------------------------------------------------------------------

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def is_busy(self) -> bool:
        """Whether it runs, and is not paused."""
        is_still = self._stopping or (self._pauses and self._idle)
        return self.is_running() and not is_still and not self.is_this_thread()

    @property
    def writes_elsewhere(self) -> bool:
        """Whether other processes write to the buffer now."""
        return self._work.writes_elsewhere and self.is_busy()

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def raise_failure(self) -> None:
        """What has ended it, each time that it is asked for."""
        if self._failure is not None:
            raise BackgroundFailed(
                f"{self._name} has stopped collecting in the background: "
                f"{type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def pause(self) -> None:
        with self._state:
            self._pauses += 1
            while not self._idle and self._thread.is_alive():
                self._work.hurry()
                self._state.wait(0.05)  # a piece that was just begun may not have seen it

    def resume(self) -> None:
        with self._state:
            self._pauses -= 1
            self._state.notify_all()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended in time."""
        _running.discard(self)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._state:
            self._stopping = True
            self._state.notify_all()
            while not self._idle and self._thread.is_alive():
                self._work.hurry()
                left = 0.05 if deadline is None else min(0.05, deadline - time.monotonic())
                if left <= 0 or self.is_this_thread():
                    return False
                self._state.wait(left)
        if not self.is_this_thread():
            self._thread.join(1.0)
        return True


class Batches:
    """``Work`` of a collector that has its batches put into the buffer by this process."""

    writes_elsewhere = False

    def __init__(
        self,
        next_batch: Callable[[], Any],
        is_complete: Callable[[], bool],
        may_write: Callable[[], bool],
    ) -> None:
        self._next_batch = next_batch
        self._is_complete = is_complete
        self.may_go_on = may_write
        #: How to reach a rollout of this process.
        self.mail: Any = None

    def do_some(self) -> bool:
        if self._is_complete():
            return False
        self._next_batch()
        return not self._is_complete()

    def is_still(self) -> bool:
        return True

    def hurry(self) -> None:
        if self.mail is not None:
            self.mail.ask_to_stop()

    def go_on(self) -> None:
        if self.mail is not None:
            self.mail.go_on()


#: Those that were not stopped.
_running: weakref.WeakSet[Background] = weakref.WeakSet()
_is_registered = False


def _stop_at_exit() -> None:
    """Before the interpreter takes away what the threads use."""
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(lambda: [each.stop(2.0) for each in list(_running)])

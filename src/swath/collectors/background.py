"""Collecting in the background: a thread that runs until it is paused, stopped, done, or fails."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from swath.collectors.one_thread import OneThread
from swath.errors import BackgroundFailed, CollectorClosed, told
from swath.process.supervise import EndedAtExit
from swath.warn import this_thread_began_at, users_line, warn_user

_SECONDS_BETWEEN_LOOKS = 0.002


class Work:
    """What a background does for a collector, one piece after the other.

    It does not keep the collector: one that nobody else has is to end.
    """

    #: Whether other processes write to the buffer.
    writes_elsewhere = False

    def __init__(self, collector: Any) -> None:
        self.owner = weakref.ref(collector)

    @property
    def _collector(self) -> Any:
        """Within a piece, which the background keeps it for."""
        return self.owner()

    def may_go_on(self) -> bool:
        """False: the learner is behind; ask again."""
        return True

    def do_some(self) -> bool:
        """The next piece; False when all is done."""
        raise NotImplementedError

    def hurry(self) -> None:
        """End the piece under way soon; called from another thread."""

    def is_still(self) -> bool:
        """Whether nothing is under way, between two pieces."""
        return True

    def go_on(self) -> None:
        """It need not be ended any more."""


class Background:
    """Runs ``work`` in a thread.

    Pausing and stopping end the piece under way after the step that is being taken, and return when it has ended.
    """

    def __init__(self, name: str, work: Work) -> None:
        self._name = name
        self._work = work
        self._state = threading.Condition()
        #: Of whoever wants it to be still: one for each.
        self._pauses: set[object] = set()
        self._stopping = False
        self._idle = False
        self._failure: BaseException | None = None
        self._owner_pid = os.getpid()
        #: Where the program began it. (Not once for all: another one may fail in the same way.)
        self._begun_at = users_line()._replace(registry=None)
        self._thread = threading.Thread(target=self._run, name=f"swath-{name}", daemon=True)

    def start(self) -> None:
        _running.add(self)
        self._thread.start()

    def _run(self) -> None:
        this_thread_began_at(self._begun_at)
        try:
            while self._wait_for_turn() and self._do_some():
                pass
        except BaseException as error:  # the buffer's, when it was asked whether it takes more
            self.fail(error)
        finally:
            with self._state:
                self._idle = True
                self._state.notify_all()

    def _do_some(self) -> bool:
        collector = self._work.owner()  # kept for this piece, and not while waiting for the next
        if collector is None:
            return False
        try:
            return self._work.do_some()
        except BaseException as error:
            self.fail(error)
            collector.shutdown(timeout=1.0, raise_on_error=False)  # as everywhere, when something went wrong
            return False

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
        is_still = self._stopping or (bool(self._pauses) and self._idle)
        return self.is_running() and not is_still and not self.is_this_thread()

    @property
    def writes_elsewhere(self) -> bool:
        """Whether other processes write to the buffer now."""
        return self._work.writes_elsewhere and self.is_busy()

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def fail(self, error: BaseException) -> None:
        """Something has ended it: known from now on, before anything is closed because of it, and said at once."""
        is_over = self._stopping and isinstance(error, CollectorClosed)  # nobody waited for the piece to end
        if self._failure is None and not is_over:
            self._failure = error
            text = f"{self._what_failed} The replay buffer gets no more frames"
            try:
                warn_user(text, at=self._begun_at)  # a thread has no line of the program's
            except Warning as as_error:  # which has nobody to go to
                thread = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((type(as_error), as_error, None, thread)))

    def owner_is_gone(self) -> None:
        """Its collector is being garbage-collected."""
        if self._owner_pid == os.getpid() and self.is_running() and not self._stopping:
            self.fail(CollectorClosed("nobody had it any more; keep it, and call shutdown() when it is not needed"))

    @property
    def _what_failed(self) -> str:
        assert self._failure is not None
        return f"{self._name} has stopped collecting in the background: {told(self._failure).removesuffix('.')}."

    @property
    def failure(self) -> BackgroundFailed | None:
        """What has ended it, each time that it is asked for."""
        if self._failure is None:
            return None
        failed = BackgroundFailed(self._what_failed)
        failed.__cause__ = self._failure
        return failed

    def raise_failure(self) -> None:
        if (failed := self.failure) is not None:
            raise failed

    def pause(self, who: object) -> None:
        if self.is_this_thread():
            raise RuntimeError(
                "pause() by the thread that collects (in a hook, a postproc or an env) would wait for itself: nothing "
                "is collected meanwhile anyway, so leave it out there, or call it in another thread"
            )
        with self._state:
            self._pauses.add(who)
            while not self._idle and self._thread.is_alive():
                self._work.hurry()
                self._state.wait(0.05)  # a piece that was just begun may not have seen it

    def resume(self, who: object) -> None:
        """Harmless for who does not pause it: Ctrl-C may have come before, or while it was waited for."""
        with self._state:
            self._pauses.discard(who)
            self._state.notify_all()

    def stop(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended in time."""
        if self._owner_pid != os.getpid():  # a forked copy, which has no such thread
            return True
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


class Batches(Work):
    """``Work`` of a collector that has its batches put into the buffer by this process."""

    def __init__(self, collector: Any, may_write: Callable[[], bool]) -> None:
        super().__init__(collector)
        self._may_write = may_write
        #: How to reach a rollout of this process.
        self.control: Any = None

    def may_go_on(self) -> bool:
        return self._may_write()

    def do_some(self) -> bool:
        return self._collector.collect_one()

    def hurry(self) -> None:
        if self.control is not None:
            self.control.ask_to_stop()

    def go_on(self) -> None:
        if self.control is not None:
            self.control.go_on()


#: Those that were not stopped: before the interpreter takes away what the threads use.
_running = EndedAtExit[Background](lambda backgrounds: [each.stop(2.0) for each in backgrounds])


class InBackground:
    """The part of a collector that collects in the background."""

    _background: Background | None = None
    _buffer_writer: Any = None
    _one_thread: OneThread

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _work(self) -> Any:
        """What ``start`` does in the background."""
        raise NotImplementedError

    def _require_open_unless(self, may_be_closed: bool) -> None:
        raise NotImplementedError

    def _keep_ids_apart(self) -> None:
        raise NotImplementedError

    @property
    def _complete(self) -> bool:
        raise NotImplementedError

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        raise NotImplementedError

    # -- for users -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Collect in the background, into the replay buffer, until ``total_frames`` or ``async_shutdown()``.

        What goes wrong there is said at once, in a warning. It is raised at the next call of the collector and by every
        ``sample(wait=True)`` of the buffer, and stands in ``stats()["failure"]``. A collector that nobody keeps ends.
        """
        if self._buffer_writer is None:
            raise RuntimeError("start() needs a replay_buffer to collect into; give one to the collector")
        self._require_open_unless(False)
        if self.is_running() or self._complete:
            return
        with self._one_thread:  # else the background might take the steps of a batch that is being got
            self._keep_ids_apart()
            background = Background(type(self).__name__, self._work())
            self._buffer_writer.attach(background)
            self._background = background
        background.start()

    def is_running(self) -> bool:
        """Whether it collects in the background."""
        background = self.__dict__.get("_background")
        return background is not None and background.is_running()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While this lasts, nothing is collected in the background.

        The batch under way ends after the step that is being taken, and is written.

        >>> from swath.collectors import Collector
        >>> from swath.data import LazyTensorStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=LazyTensorStorage(1000))
        >>> collector = Collector("CartPole-v1", frames_per_batch=50, replay_buffer=rb)
        >>> collector.start()
        >>> with collector.pause():
        ...     assert len(rb) == rb.write_count
        >>> collector.async_shutdown()
        """
        self._raise_failure()
        background = self._background
        if background is None:
            raise RuntimeError("pause() is for a collector that collects in the background: call start() first")
        me = object()
        try:
            background.pause(me)
            self._raise_failure()
            yield
        finally:
            background.resume(me)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End what runs in the background, in ``timeout`` seconds at most, and close; raise what went wrong there."""
        background = self._background
        if background is not None:
            background.stop(5.0 if timeout is None else timeout)
        self.shutdown(timeout=timeout, close_env=close_env)
        if background is not None:
            background.raise_failure()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """As ``pause``, where there is something to pause."""
        self._raise_failure()
        background = self.__dict__.get("_background")
        with self.pause() if background is not None and background.is_busy() else nullcontext():
            yield

    def _require_still(self, what: str) -> None:
        """For what must not be done while another thread, or the workers, collect."""
        self._raise_failure()
        background = self.__dict__.get("_background")
        if background is not None and background.is_busy():
            raise RuntimeError(f"{what} while it collects in the background: do it within collector.pause()")

    def _raise_failure(self) -> None:
        background = self.__dict__.get("_background")
        if background is not None and not background.is_this_thread():
            background.raise_failure()

    def _failure_text(self) -> str | None:
        """What has ended collecting in the background."""
        failed = None if self._background is None else self._background.failure
        return None if failed is None else str(failed)

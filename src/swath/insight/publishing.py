"""Which collectors of this process ``swath top`` shows, and the thread that answers when it asks.

A process has a board and a thread while there are collectors to show, and neither before nor after. In a process that
was forked, nothing of its parent's is used: it has a ``_Publisher`` of its own, once it makes a collector.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from swath import platforms
from swath.errors import told
from swath.insight.board import NEEDS, OwnBoard
from swath.insight.reading import Reading
from swath.process.ctrl_c import ctrl_c_waits

#: Whoever asks without end is answered so often at most.
_SECONDS_BETWEEN_ANSWERS = 0.1
#: The end of the program waits so long for an answer that is being written.
_SECONDS_AT_EXIT = 1.0

_is_part = ContextVar("_is_part", default=False)
#: By process; there are others than this one's only just after a fork.
_publishers: dict[int, _Publisher] = {}


class Shown(Protocol):
    """A collector."""

    def reading(self) -> Reading:
        """Where it stands; never blocks, and may be called by any thread."""
        ...


@contextlib.contextmanager
def part_of_another() -> Iterator[None]:
    """Collectors that are made within it are parts of something that is shown already, or is elsewhere."""
    token = _is_part.set(True)
    try:
        yield
    finally:
        _is_part.reset(token)


@ctrl_c_waits
def publish(collector: Shown) -> None:
    """Let ``swath top`` see it, until ``withdraw`` or its end. It is not kept, and it never fails."""
    if _is_part.get():
        return
    pid = os.getpid()
    if pid not in _publishers:
        for parent in _publishers.keys() - {pid}:
            _publishers.pop(parent, None)
        atexit.register(_leave, pid)
        _publishers.setdefault(pid, _Publisher())
    _publishers[pid].add(collector)


@ctrl_c_waits
def withdraw(collector: Shown) -> None:
    """It is over. Harmless for one that was not shown."""
    if publisher := _publishers.get(os.getpid()):
        publisher.remove(id(collector))


def _leave(pid: int) -> None:
    """At the end of the program, before its threads are frozen wherever they are."""
    publisher = _publishers.pop(pid, None) if pid == os.getpid() else None
    if publisher is not None:
        publisher.close(_SECONDS_AT_EXIT)


class _Publisher:
    """The collectors of a process, by their ids; kept weakly."""

    def __init__(self) -> None:
        #: Reentrant: a collector may be collected as garbage, and leave, while another one is added.
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._shown: dict[int, tuple[int, weakref.ref[Shown]]] = {}
        self._answering: _Answering | None = None

    def add(self, collector: Shown) -> None:
        key = id(collector)
        with self._lock:
            self._shown[key] = next(self._numbers), weakref.ref(collector, lambda _: self.remove(key))
            if self._answering is not None:
                return
            if not platforms.are_met(*NEEDS):
                return
            try:
                answering = self._answering = _Answering(self)
            except (OSError, ValueError):  # no memory, or no descriptor left: it is not shown
                return
        # Without the lock: the new thread may come upon garbage that wants to leave.
        try:
            answering.start()
        except RuntimeError:  # no thread can be started
            with self._lock:
                if self._answering is answering:
                    self._answering = None
            answering.give_up()

    def remove(self, key: int) -> None:
        with self._lock:
            self._shown.pop(key, None)
            answering = None if self._shown else self._answering
            if answering is not None:
                self._answering = None
        if answering is not None:
            answering.stop()

    def close(self, timeout_s: float) -> None:
        with self._lock:
            self._shown.clear()
            answering, self._answering = self._answering, None
        if answering is not None:
            answering.stop()
            answering.join(timeout_s)

    def tell(self) -> bytes:
        """Where all of them stand."""
        with self._lock:
            shown = list(self._shown.values())
        collectors = [about for number, reference in shown if (about := _about(number, reference))]
        return json.dumps({"at_s": time.monotonic(), "collectors": collectors}, default=_as_number).encode()


def _about(number: int, reference: weakref.ref[Shown]) -> dict[str, Any] | None:
    collector = reference()
    if collector is None:
        return None
    try:
        return {"number": number, "reading": collector.reading().as_json()}
    except Exception as error:  # of one; the others can be shown
        return {"number": number, "error": told(error)}


def _as_number(value: Any) -> Any:
    """Of NumPy's and torch's."""
    if callable(item := getattr(value, "item", None)):
        return item()
    raise TypeError(f"{type(value).__name__} is nothing that JSON has")


class _Answering:
    """A board and the thread that writes it."""

    def __init__(self, publisher: _Publisher) -> None:
        self._board = OwnBoard()
        self._publisher = publisher
        self._stopped = threading.Event()
        #: The board is woken and closed one after the other.
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._answer, name="swath-board", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait: whoever closes a collector may be asked by it just now."""
        with self._lock:
            self._stopped.set()
            self._board.wake()

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def give_up(self) -> None:
        """It could not be started."""
        self._board.close()

    def _answer(self) -> None:
        board, stopped = self._board, self._stopped
        board.wait()
        while not stopped.is_set():
            with contextlib.suppress(Exception):  # who asked sees that there is no answer; who asks again may have one
                board.answer(self._publisher.tell())
            stopped.wait(_SECONDS_BETWEEN_ANSWERS)
            board.wait()
        with self._lock:
            board.close()

"""Ctrl-C: the first asks the collection to stop, the second leaves."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """A collector's interruptor that signals set. Asked after every step, it also counts the steps.

    Until ``polite`` is set there is nothing to keep, and the first signal raises already.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.steps = 0
        self.polite = False
        #: A second signal came while nothing may raise.
        self.in_a_hurry = False
        self._busy = False

    def collection_stopped(self) -> bool:
        self.steps += 1
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or signal.SIGINT)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = self.signal is not None
        self.signal = signal.Signals(number)
        if again or not self.polite:
            if not self._busy:
                raise KeyboardInterrupt
            self.in_a_hurry = True

    @contextlib.contextmanager
    def held_off(self) -> Iterator[None]:
        """Nothing raises in here: what is done whole or not at all, quickly; a second signal sets ``in_a_hurry``."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Receive signals; those that whoever started us wants ignored (``nohup``) stay ignored."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

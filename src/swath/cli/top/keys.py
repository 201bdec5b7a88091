"""A terminal of our own for a while: keys as they are pressed, and everything as it was afterwards."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

#: What ends it from outside, and would leave the terminal as it is now.
_ENDINGS = ("SIGTERM", "SIGHUP")


class Keys:
    """Keys of standard input as they are pressed, without echo; where it is no terminal, nothing comes."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._before: Any = None

    def start(self) -> None:
        descriptor = _terminal_of_stdin()
        if descriptor is not None:
            import termios
            import tty

            self._before = termios.tcgetattr(descriptor)
            self._descriptor = descriptor
            tty.setcbreak(descriptor)

    def stop(self) -> None:
        """The terminal is as it was."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            import termios

            with contextlib.suppress(termios.error):  # it is closed
                termios.tcsetattr(descriptor, termios.TCSADRAIN, self._before)

    def __enter__(self) -> Keys:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, timeout_s: float) -> str:
        """What is pressed until then; empty if nothing is."""
        if self._descriptor is None:
            time.sleep(timeout_s)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], timeout_s)
        if not ready:
            return ""
        try:
            pressed = os.read(self._descriptor, 64)
        except OSError:  # the terminal is gone
            pressed = b""
        if not pressed:
            self.stop()
        return pressed.decode("ascii", "replace")


def _terminal_of_stdin() -> int | None:
    """None where there is none, or where it is another program's: in the background, to change it would stop us."""
    try:
        descriptor = sys.stdin.fileno()
        in_front = os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
    except (AttributeError, OSError, ValueError):
        return None
    return descriptor if in_front else None


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """A signal that ends this process does so by an exception, so that the terminal is put in order first."""
    before: dict[int, Any] = {}
    for name in _ENDINGS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            before[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def stopped_in_order(keys: Keys, live: Any) -> Iterator[None]:
    """Ctrl-Z: the terminal is the shell's until we are called back."""

    def stop(number: int, _: Any) -> None:
        live.stop()
        keys.stop()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, stop)  # it goes on here
        keys.start()
        live.start(refresh=True)

    before = signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)

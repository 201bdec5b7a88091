"""Where a command's output goes, and who may stop to read it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

from swath.cli.errors import on_the_command_line

#: What a terminal has at least.
_COLUMNS = 80


@contextlib.contextmanager
def reader_may_leave(stream: TextIO | None) -> Iterator[None]:
    """Whoever reads our output may stop (``swath collect … | head -1``): nobody need be told."""
    try:
        yield
        if stream is not None:  # Python has none where it was closed before
            stream.flush()
    except BrokenPipeError:
        if stream is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python complains when it flushes at exit


def say(line: str) -> None:
    """To whoever waits, not to whoever reads the result."""
    print(f"swath: {line}", file=sys.stderr)


@contextlib.contextmanager
def stdout_for_result(only_result: bool) -> Iterator[TextIO]:
    """Stdout; with ``only_result``, whatever else is printed in this process (by an env, say) goes to stderr."""
    if not only_result:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(kept, "w", encoding="utf-8", closefd=False) as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def short_warnings() -> Iterator[None]:
    """Warnings as one line each, without the place in the code."""
    told = set()

    def show(message: Warning | str, *place: Any, **more: Any) -> None:
        # Gymnasium colours its own.
        text = re.sub(r"\x1b\[\d*m", "", str(message)).removeprefix("WARN: ")
        if text not in told:
            told.add(text)
            say("; ".join([f"warning: {text}", *on_the_command_line(text)]))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


class StatusLine:
    """What is being done, on a terminal's last line."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if is_terminal(stream) else None
        self._shown = 0

    def show(self, text: str) -> None:
        if self._stream is not None:
            self.clear()
            line = f"{text} …"[: _COLUMNS - 1]
            print(line, end="", file=self._stream, flush=True)
            self._shown = len(line)

    def clear(self) -> None:
        if self._stream is not None and self._shown:
            print(f"\r{' ' * self._shown}\r", end="", file=self._stream, flush=True)
            self._shown = 0

"""A terminal as small as a test needs it: a pseudo-terminal, and what a person would see in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TextIO

from swath.process.start import start_process

#: Up to the last command, or sign of UTF-8, that is there as a whole.
_WHOLE = re.compile(
    rb"(?:[\x00-\x1a\x1c-\x7f]|\x1b[D78]|\x1b\[[?\d;]*[A-Za-z]|[\xc0-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf7][\x80-\xbf]{3})*"
)
_PIECE = re.compile(r"\x1b(?:\[(\??[\d;]*))?([A-Za-z78])|\r\n|[\r\n]|[^\x1b\r\n]+")


class Seen:
    """Lines of a terminal, those that have scrolled away too. Long lines go on in the next one."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self.lines = [""]
        self.row, self.column = 0, 0
        self._saved = (0, 0)
        self.cursor_was_hidden = False

    def feed(self, text: str) -> None:
        for found in _PIECE.finditer(text):
            argument, command = found.group(1), found.group(2)
            if command is not None:
                self._obey(command, argument)
                continue
            for sign in found.group():
                self._put(sign)

    def _put(self, sign: str) -> None:
        if sign == "\r":
            self.column = 0
            return
        if sign == "\n" or self.column == self._columns:
            self._down()
        if sign == "\n":
            return
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + sign + line[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        self.row, self.column = self.row + 1, 0
        if self.row == len(self.lines):
            self.lines.append("")

    def _obey(self, command: str, argument: str) -> None:
        if command in "78":
            if command == "7":
                self._saved = self.row, self.column
            self.row, self.column = self._saved
        elif command == "D":
            column = self.column
            self._down()
            self.column = column
        elif command == "B":
            self.row = min(self.row + int(argument or 1), len(self.lines) - 1)
        elif command == "A":
            self.row -= int(argument or 1)
        elif command == "C":
            self.column += int(argument or 1)
        elif command in "KJ":
            self.lines[self.row] = self.lines[self.row][: self.column]
            if command == "J":
                del self.lines[self.row + 1 :]
        elif command in "lh":
            self.cursor_was_hidden |= (argument, command) == ("?25", "l")
        else:
            assert command == "m", f"what is {command} to a terminal?"


class SmallTerminal:
    """A pseudo-terminal that somebody looks at.

    Args:
        columns, lines: its size.
    """

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self._ours, self._theirs = os.openpty()
        self.resize(columns, lines)
        self.name = os.ttyname(self._theirs)
        self._columns = columns
        self._bytes = b""
        self._lock = threading.Lock()
        self._seen, self._unread = Seen(columns), ""
        self._thread = threading.Thread(target=self._look)
        self._files: list[TextIO] = []
        self._thread.start()

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _look(self) -> None:
        try:
            while part := os.read(self._ours, 65536):
                with self._lock:
                    self._bytes += part
                    self._interpret(part)
        except OSError:  # so Linux says that nobody has the other end
            pass

    def _interpret(self, part: bytes) -> None:
        """All but the beginning of a command, or of a sign, whose end has not come."""
        text = self._unread.encode("latin-1") + part
        whole = _WHOLE.match(text)
        assert whole is not None
        self._unread = text[whole.end() :].decode("latin-1")
        self._seen.feed(whole.group().decode())

    def open(self, encoding: str = "utf-8") -> TextIO:
        """Another file that is this terminal."""
        self._files.append(open(self.name, "w", encoding=encoding))  # noqa: SIM115
        return self._files[-1]

    @contextlib.contextmanager
    def printed_to(self) -> Iterator[None]:
        """What this program prints comes here."""
        with contextlib.redirect_stdout(self.open()), contextlib.redirect_stderr(self.open()):
            yield

    @property
    def raw(self) -> str:
        return self._bytes.decode()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        with self._lock:
            return [line.rstrip() for line in self._seen.lines]

    @property
    def cursor_was_hidden(self) -> bool:
        return self._seen.cursor_was_hidden

    def wait_for(self, what: str | Callable[[], bool], timeout_s: float = 60.0) -> None:
        until = time.monotonic() + timeout_s
        while not (what in self.text if isinstance(what, str) else what()):
            assert time.monotonic() < until, f"{what!r} did not come:\n{self.text}"
            time.sleep(0.01)

    @property
    def attributes(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def settle(self) -> None:
        """All that was written has been seen: what is written now, which nobody sees, comes last."""
        end = f"\x1b[{time.monotonic_ns()}m".encode()
        os.write(self._theirs, end)
        until = time.monotonic() + 60
        while not self._bytes.endswith(end):
            assert time.monotonic() < until
            time.sleep(0.005)
        with self._lock:
            self._bytes = self._bytes.removesuffix(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()
        os.close(self._theirs)
        self._thread.join()
        os.close(self._ours)


def _run(script: str, terminal: str) -> None:
    """In the process: as ``python -c`` does it, with the terminal as its own."""
    import signal
    import sys

    os.setsid()
    descriptor = os.open(terminal, os.O_RDWR)  # which makes it the session's: Ctrl-C comes to it
    for number in range(3):
        os.dup2(descriptor, number)
    os.close(descriptor)
    os.environ["TERM"] = "xterm-256color"
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})


def start_in(terminal: SmallTerminal, script: str) -> object:
    """A program whose terminal it is, in a process that has torch imported already."""
    return start_process("forkserver", _run, (script, terminal.name), "program")

"""A block of lines that stays at the end of a terminal while a program goes on to print above it.

The cursor is never hidden, and stays in the line above the block: what somebody writes past us (a worker, a library in
C, a debugger and who types into it) has that line, and a program that is killed leaves a terminal that works.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, TextIO

_SIZE = (80, 24)
_CLEAR_LINE, _CLEAR_BELOW = "\x1b[K", "\x1b[J"
#: A line down in the same column, for which the screen scrolls; to the beginning of the next line, which is there.
_DOWN, _NEXT_LINE = "\x1bD", "\x1b[B\r"
#: Where the cursor is, and back there.
_SAVE, _BACK = "\x1b7", "\x1b8"


def can_redraw(file: Any) -> bool:
    """Whether this is a terminal whose lines can be written again: by us, and not by a live display of rich's."""
    try:
        is_terminal = not _is_of_rich(file) and bool(file.isatty())
        return is_terminal and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    except (AttributeError, ValueError):  # no file, or one that is closed
        return False


def _is_of_rich(file: Any) -> bool:
    """Whether it is what rich puts in the place of ``sys.stderr`` (Progress, Live): it takes lines, not signs."""
    proxy = getattr(sys.modules.get("rich.file_proxy"), "FileProxy", ())
    return isinstance(file, proxy)


class Terminal:
    """Blocks of several, one below the other, at the end of what is printed.

    While there are any, ``sys.stdout`` and ``sys.stderr`` write above them, if they are this terminal too.

    Args:
        file: the terminal.
    """

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console

        self.file = file
        self._console = Console(file=file, force_terminal=True, force_jupyter=False, highlight=False, markup=False)
        self._lock = threading.RLock()
        #: Lines of each who shows something.
        self._blocks: dict[Any, list[str]] = {}
        self._sharing: Counter[Any] = Counter()
        #: The last line that was printed, where it has not ended: it is printed again above each block.
        self._open_line = ""
        self._streams: list[tuple[str, _Above]] = []
        self._pid = os.getpid()

    # -- for those who show something ------------------------------------------------------------------------------

    def join(self, who: Any) -> None:
        """Have a block here. Several who are equal have one together, until the last of them leaves."""
        with self._lock:
            if not self._sharing:
                self._take_streams()
            self._sharing[who] += 1

    def size(self) -> tuple[int, int]:
        """Columns, and as many lines as each may show."""
        columns, lines = _size_of(self.file)
        return columns, max(1, (lines - 2) // max(1, len(self._sharing)))

    def show(self, who: Any, view: Any) -> None:
        """Something for rich, in the place of what was there before."""
        with self._lock:
            self._blocks[who] = self._rendered(view)
            self._draw()

    def leave(self, who: Any, keep: bool = True) -> None:
        """Show it no more. What was shown last stays as text, if it is to be kept."""
        with self._lock:
            self._sharing[who] -= 1
            if self._sharing[who] > 0:
                return
            del self._sharing[who]
            lines = self._blocks.pop(who, [])
            try:
                begin = "\n" if self._open_line else ""  # what somebody has not ended keeps its line
                self._print(begin + "".join(f"{line}\n" for line in lines) if lines and keep else "")
            finally:
                if not self._sharing:
                    self._open_line = ""
                    self._give_streams_back()

    # -- the program's own output ----------------------------------------------------------------------------------

    def write_above(self, stream: TextIO, text: str) -> None:
        """What the program prints."""
        if os.getpid() != self._pid:  # a forked process, where somebody may have had the lock
            stream.write(text)
            return
        with self._lock:
            if self._sharing:
                self._print(text)
            else:
                stream.write(text)

    def _print(self, text: str) -> None:
        before, newline, rest = (self._open_line + text).rpartition("\n")
        self._open_line = rest.rstrip("\r").rpartition("\r")[2]
        columns, _ = _size_of(self.file)
        self._draw(f"\r{_CLEAR_BELOW}{before}{newline}{self._open_line[: columns - 1]}")

    # -- drawing ---------------------------------------------------------------------------------------------------

    def _draw(self, first: str = _CLEAR_LINE) -> None:
        """All in one piece, below the line that the cursor is in. There it stays: somebody may be typing.

        Cleared is what follows the cursor, before a line is written: behind a full one it would be its last character.
        """
        _, height = _size_of(self.file)
        lines = [line for block in self._blocks.values() for line in block][: max(0, height - 2)]
        if not lines:
            put(self.file, first)
            return
        room = _DOWN * len(lines) + f"\x1b[{len(lines)}A"  # the screen may scroll for it
        *others, last = lines
        block = "".join(f"{_NEXT_LINE}{_CLEAR_LINE}{line}" for line in others) + f"{_NEXT_LINE}{_CLEAR_BELOW}{last}"
        put(self.file, f"{first}{room}{_SAVE}{block}{_BACK}")

    def _rendered(self, view: Any) -> list[str]:
        self._console.width = _size_of(self.file)[0]
        with self._console.capture() as captured:
            self._console.print(view, no_wrap=True, overflow="ellipsis")
        return captured.get().removesuffix("\n").split("\n")

    # -- streams ---------------------------------------------------------------------------------------------------

    def _take_streams(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and _is_same_terminal(stream, self.file):
                stream.flush()
                above = _Above(self, stream)
                setattr(sys, name, above)
                self._streams.append((name, above))

    def _give_streams_back(self) -> None:
        """Unless somebody has put another in the place of ours: who has kept ours can go on to use it."""
        for name, above in self._streams:
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
        self._streams.clear()


class _Above:
    """``sys.stdout`` or ``sys.stderr``, which writes above what is shown; else it is as it was."""

    def __init__(self, terminal: Terminal, stream: TextIO) -> None:
        self._terminal = terminal
        self.stream = stream

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._terminal.write_above(self.stream, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _is_same_terminal(stream: Any, terminal: Any) -> bool:
    try:
        ours, theirs = os.fstat(terminal.fileno()), os.fstat(stream.fileno())
        return stream.isatty() and (ours.st_dev, ours.st_rdev) == (theirs.st_dev, theirs.st_rdev)
    except (AttributeError, OSError, ValueError):
        return False


def put(file: TextIO, text: str) -> None:
    """Write to somebody's file, whatever it can encode. Raises OSError if it cannot be written to any more."""
    if file.closed:
        raise BrokenPipeError(f"{getattr(file, 'name', 'the file')} was closed")
    encoding = getattr(file, "encoding", None) or "utf-8"
    file.write(text.encode(encoding, "replace").decode(encoding))
    file.flush()


def _size_of(file: TextIO) -> tuple[int, int]:
    """Columns and lines, as of now."""
    try:
        known = os.get_terminal_size(file.fileno())
    except (OSError, AttributeError, ValueError):
        known = (0, 0)
    asked = (os.environ.get("COLUMNS", ""), os.environ.get("LINES", ""))
    columns, lines = (int(text) if text.isdigit() else there for text, there in zip(asked, known, strict=True))
    return columns or _SIZE[0], lines or _SIZE[1]


#: By device. Those that nobody uses any more are gone.
_terminals: weakref.WeakValueDictionary[int, Terminal] = weakref.WeakValueDictionary()
_finding = threading.Lock()


def terminal_of(file: TextIO) -> Terminal:
    """The one that this file is: whoever shows something there shares it."""
    file = file.stream if isinstance(file, _Above) else file
    device = os.fstat(file.fileno()).st_rdev
    with _finding:
        found = _terminals.get(device)
        if found is None or found.file.closed:
            found = _terminals[device] = Terminal(file)
        return found

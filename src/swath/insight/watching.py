"""Shows a program while it collects: in a terminal, in a notebook, as lines of a log."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TextIO

from swath.insight.history import History
from swath.insight.reading import Reading
from swath.insight.screen import Reword, in_words, live_view, plain_line
from swath.insight.terminal import can_redraw, put, terminal_of
from swath.process.supervise import EndedAtExit

_REDRAW_EVERY_S = 0.5
#: Lines of a log: the first comes after so long, later ones when it has lasted a tenth longer.
_LINE_EVERY_S, _LONGEST_BETWEEN_LINES_S = 2.0, 60.0
#: Drawing for the first time imports rich, and a machine may be busy.
_SECONDS_TO_END = 10.0
_NOTEBOOK_WIDTH = 110


class Outlet(Protocol):
    """Where a history is shown; all of it by one thread."""

    #: How often it is worth looking.
    every_s: float

    def open(self) -> None: ...
    def show(self, history: History, /) -> None: ...
    def close(self, history: History) -> None: ...


class InTerminal:
    """Lines that stay in place.

    Args:
        file: the terminal.
        who: what is shown; equal ones are shown once.
    """

    def __init__(self, file: TextIO, who: Any, every_s: float | None = None) -> None:
        self.every_s = _REDRAW_EVERY_S if every_s is None else every_s
        self._terminal = terminal_of(file)
        self._who = who

    def open(self) -> None:
        self._terminal.join(self._who)

    def show(self, history: History) -> None:
        columns, lines = self._terminal.size()
        self._terminal.show(self._who, live_view(history, columns, lines))

    def close(self, history: History) -> None:
        self._terminal.leave(self._who)


class AsLines:
    """A line now and then.

    Args:
        about: the first line (default: what is watched).
        reword: as of ``plain_line``.
    """

    def __init__(
        self, file: TextIO, every_s: float | None = None, about: str | None = None, reword: Reword = str
    ) -> None:
        self._file = file
        self._asked_s = every_s
        self.every_s = min(_REDRAW_EVERY_S, every_s or _REDRAW_EVERY_S)
        self._about, self._reword = about, reword
        self._began = time.monotonic()
        self._due: float | None = None
        self._said = ""

    def open(self) -> None:
        self._began = time.monotonic()

    def show(self, history: History) -> None:
        now = time.monotonic()
        if self._due is None:
            program = None if history.latest is None else history.latest.program
            self.say(self._about or (f"watching {in_words(program)}" if program else "watching"))
        elif now >= self._due:
            self._said = plain_line(history, self._reword)
            self.say(self._said)
        else:
            return
        slower_s = min(_LONGEST_BETWEEN_LINES_S, max(_LINE_EVERY_S, (now - self._began) / 10))
        self._due = now + (slower_s if self._asked_s is None else self._asked_s)

    def close(self, history: History) -> None:
        line = plain_line(history, self._reword)
        if history.latest is not None and line != self._said:
            self.say(line)

    def say(self, line: str) -> None:
        put(self._file, f"swath: {line}\n")


class Nowhere:
    """Nothing is shown."""

    every_s = _LONGEST_BETWEEN_LINES_S

    def open(self) -> None:
        pass

    def show(self, history: History) -> None:
        pass

    def close(self, history: History) -> None:
        pass


class InNotebook:
    """An output of the cell that is updated in place."""

    def __init__(self, every_s: float | None = None) -> None:
        self.every_s = _REDRAW_EVERY_S if every_s is None else every_s
        self._id = f"swath-{os.getpid()}-{id(self)}"
        self._is_there = False

    def open(self) -> None:
        pass

    def show(self, history: History) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        view = live_view(history, _NOTEBOOK_WIDTH)
        shown = {"text/plain": view.plain, "text/html": as_html(view)}
        display(shown, raw=True, display_id=self._id, update=self._is_there)
        self._is_there = True

    def close(self, history: History) -> None:
        self.show(history)


def as_html(view: Any) -> str:
    """What rich draws, as a piece of a page, in the page's own colours."""
    import io

    from rich.console import Console

    console = Console(
        file=io.StringIO(), record=True, width=_NOTEBOOK_WIDTH, force_jupyter=False, color_system="truecolor"
    )
    console.print(view)
    style = "white-space:pre;overflow-x:auto;line-height:1.25;font-family:Menlo,'DejaVu Sans Mono',consolas,monospace"
    return console.export_html(inline_styles=True, code_format=f'<pre style="{style}"><code>{{code}}</code></pre>')


def is_notebook() -> bool:
    """Whether what is shown goes to a notebook: an IPython that has no terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and not any(kind.__name__ == "TerminalInteractiveShell" for kind in type(shell).__mro__)


def outlet_for(file: Any, who: Any, every_s: float | None = None) -> Outlet:
    """The one that fits where it goes: stderr, or the notebook, if no file is given."""
    if file is None and is_notebook():
        return InNotebook(every_s)
    file = sys.stderr if file is None else file
    if file is None:  # Python has none where it was closed before
        return Nowhere()
    return InTerminal(file, who, every_s) if can_redraw(file) else AsLines(file, every_s)


class Watcher:
    """A thread that reads, and shows what it has read, until there is nothing more to read.

    Args:
        read: the next reading; None when what was read is gone.
        outlet: where it is shown.
    """

    def __init__(self, read: Callable[[], Reading | None], outlet: Outlet) -> None:
        self._read = read
        self._outlet = outlet
        self.history = History()
        self._last: Reading | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swath-watch", daemon=True)

    def start(self) -> None:
        with suppress(OSError):
            self._outlet.open()  # not by the thread: what is printed from now on is printed above
            _running.add(self)
            self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and not self._over.is_set()

    def stop(self) -> None:
        """Show how it stands now, for the last time. Harmless when called again."""
        self._over.set()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(_SECONDS_TO_END)
        _running.discard(self)

    def end_with(self, reading: Reading) -> None:
        """Show this, and nothing after it. Returns at once."""
        self._last = reading
        self._over.set()

    def _run(self) -> None:
        with suppress(OSError):  # whoever looked has left: a pipe or a terminal was closed
            try:
                while self._look() and not self._over.wait(self._outlet.every_s):
                    pass
                if self._over.is_set():
                    self._look()
            finally:
                self._outlet.close(self.history)

    def _look(self) -> bool:
        """Whether there is more to see."""
        reading = self._last or self._read()
        if reading is None:
            return False
        self.history.add(reading)
        self._outlet.show(self.history)
        return not reading.is_closed


#: Those that were not stopped: a terminal must be left in order.
_running = EndedAtExit[Watcher](lambda watchers: [watcher.stop() for watcher in watchers])

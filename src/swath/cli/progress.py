"""What is shown while collecting: a live display in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, TextIO

from swath.cli.options import CollectOptions
from swath.insight.history import History
from swath.insight.quantities import count
from swath.insight.reading import Reading
from swath.insight.screen import live_view
from swath.insight.terminal import can_redraw, terminal_of
from swath.insight.watching import AsLines, Watcher

_LOOK_EVERY_S = 0.25
_LINE_EVERY_S = 2.0
#: What is said of a collector in Python, and what of this command.
_AS_OPTIONS = (
    (r"the learner waits \d+ % of the time, and ", ""),
    (r"\byours (?=\d)", "writing "),
    (r", and training takes \d+ %", ""),
    (r"for you: training takes", "for the disk: writing takes"),
    (r"(MultiCollector with )?num_workers=", "--workers "),
    (r"envs_per_worker=|SerialEnv\(32, \.\.\.\)", "a higher --envs"),
    (r"(MultiCollector with )?sync=False, or a replay buffer and start\(\), collects while you train", "a faster disk"),
    (r"faster updates; .*", "a faster disk"),
    (r"sync=False lets others go on, .*", "without --sync, the others go on"),
    (r"a higher frames_per_batch", "a higher --frames-per-batch"),
    (r", compile_policy=True,| \(RayCollector\)", ""),
)
_STOPPING = "stopping after this step; Ctrl-C again leaves at once"


class Screen:
    """Shows nothing: ``--quiet``."""

    def __init__(self, options: CollectOptions) -> None:
        self._options = options

    def open(self) -> None:
        """From the start, while torch is imported."""

    def begin(self, read: Callable[[], Reading], is_stopping: Callable[[], bool]) -> None:
        """Frames are coming."""

    def close(self) -> None:
        """Leave the terminal as it was; harmless when called again."""


class PlainScreen(Screen):
    """Lines, for logs."""

    def __init__(self, options: CollectOptions) -> None:
        super().__init__(options)
        self._watcher: Watcher | None = None

    def begin(self, read: Callable[[], Reading], is_stopping: Callable[[], bool]) -> None:
        about = f"collecting {self._options.frames:,} frames: {title(self._options)}"
        self._watcher = Watcher(read, CollectingLines(sys.stderr, about, is_stopping))
        self._watcher.start()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()


class CollectingLines(AsLines):
    """Lines of a log, one of which says that it is about to stop."""

    def __init__(self, file: TextIO, about: str, is_stopping: Callable[[], bool]) -> None:
        super().__init__(file, _LINE_EVERY_S, about, reword=as_options)
        self.every_s = _LOOK_EVERY_S
        self._is_stopping = is_stopping
        self._told = False

    def show(self, history: History) -> None:
        if self._is_stopping() and not self._told:
            self._told = True
            self.say(_STOPPING)
        super().show(history)

    def close(self, history: History) -> None:
        """The command says itself how it ended."""


class LiveScreen(Screen):
    """A few lines that stay in place."""

    def __init__(self, options: CollectOptions) -> None:
        super().__init__(options)
        self._terminal = terminal_of(sys.stderr)
        self._is_open = False
        self._watcher: Watcher | None = None
        self._is_stopping: Callable[[], bool] = lambda: False

    # -- for the command -------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._terminal.join(self)
        self._is_open = True
        self._draw(None)

    def begin(self, read: Callable[[], Reading], is_stopping: Callable[[], bool]) -> None:
        self._is_stopping = is_stopping
        self._watcher = Watcher(read, _Drawing(self._draw))
        self._watcher.start()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        if self._is_open:
            self._is_open = False
            self._terminal.leave(self, keep=False)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def _draw(self, history: History | None) -> None:
        view = collecting(self._options, history, *self._terminal.size(), is_stopping=self._is_stopping())
        self._terminal.show(self, view)


def collecting(
    options: CollectOptions, history: History | None, width: int, height: int | None = None, is_stopping: bool = False
) -> Any:
    """The title, all of the path, and how it stands; None while the collector is being made."""
    from rich.text import Text

    out = f"→ {options.out}"
    lines = [Text(title(options), "bold")]
    lines[0].truncate(width, overflow="ellipsis")
    lines += [Text(out[start : start + width], "bold") for start in range(0, len(out), width)]
    if is_stopping:
        lines.append(Text(_STOPPING, "yellow"))
    if history is None:
        workers = "" if options.workers is None else ", starting the workers"
        lines.append(Text(f"loading PyTorch and the env{workers} …", "dim"))
    else:
        room = None if height is None else height - len(lines)
        lines.append(live_view(history, width, room, titled=False, reword=as_options))
    return Text("\n", no_wrap=True).join(lines)


def as_options(said: str) -> str:
    """A verdict, as of a program that only collects and writes, and its advice as options of this command.

    >>> as_options("the learner waits 80 % of the time, and this process is busy: MultiCollector with num_workers=2")
    'this process is busy: --workers 2'
    """
    for pattern, instead in _AS_OPTIONS:
        said = re.sub(pattern, instead, said)
    return said


def title(options: CollectOptions) -> str:
    """What is collected."""
    envs = count(options.envs, "env")
    if options.workers is not None:
        envs += f" in {count(options.workers, 'worker')}{' (sync)' if options.sync else ''}"
    policy = f"policy {options.policy}" if options.policy else "random actions"
    return f"{options.env_id} · {envs} · {policy} · seed {options.seed}"


class _Drawing:
    """A screen that is open already, for a watcher."""

    every_s = _LOOK_EVERY_S

    def __init__(self, draw: Callable[[History], None]) -> None:
        self.show = draw

    def open(self) -> None:
        pass

    def close(self, history: History) -> None:
        pass


def make_screen(options: CollectOptions) -> Screen:
    if options.quiet:
        return Screen(options)
    return LiveScreen(options) if can_redraw(sys.stderr) else PlainScreen(options)

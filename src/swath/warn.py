"""Warnings at the line of the user's program that led to them, however deep in swath they are given."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

_STDLIB = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_SWATH = str(Path(__file__).parent) + os.sep
#: Through which a user's call may come to swath.
_BETWEEN = ("torch", "tensordict")


class Line(NamedTuple):
    """A line of a program, as ``warnings`` wants it."""

    filename: str
    lineno: int
    module: str
    registry: dict[Any, Any] | None


#: Where there is none: in a worker process.
NOWHERE = Line("<swath worker>", 1, "swath", None)  # in brackets: nobody looks for a file
_of_thread = threading.local()


def users_line() -> Line:
    """The nearest caller that is neither swath nor what stands between it and a program."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not _is_between(frame):
            names = frame.f_globals
            registry = names.setdefault("__warningregistry__", {})
            return Line(frame.f_code.co_filename, frame.f_lineno, names.get("__name__") or "<string>", registry)
        frame = frame.f_back
    return getattr(_of_thread, "line", NOWHERE)


def this_thread_began_at(line: Line) -> None:
    """A thread of swath's own has no line of the program's: it warns at the one that led to it."""
    _of_thread.line = line


def warn_user(message: str, category: type[Warning] = UserWarning, at: Line | None = None) -> None:
    """Warn at the user's line, or at a line that was the user's when something began."""
    line = users_line() if at is None else at
    warnings.warn_explicit(message, category, line.filename, line.lineno, line.module, line.registry)


def _began_a_process(frame: FrameType) -> bool:
    """Whether this is the command that Python started a worker with, which nobody wrote."""
    if frame.f_back is not None or frame.f_code.co_filename != "<string>":
        return False
    module = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _is_between(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith((_SWATH, "<frozen ")) or _began_a_process(frame):
        return True
    if file.startswith(_STDLIB) and not any(part in file for part in _PACKAGES):
        return True
    return frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN

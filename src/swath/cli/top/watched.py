"""Programs with what they have told so far, and notes of those that have gone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from swath.insight.from_json import printable
from swath.insight.history import History
from swath.insight.programs import Program, Programs, Told, Unreadable, is_there

#: So long it is said of a program that it has ended.
_SECONDS_TO_SAY = 10.0
#: A program that has not answered for so long is said to be silent.
_SECONDS_OF_PATIENCE = 2.0


class Watched:
    """A program, with a history of each of its collectors."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.command = program.command
        self.histories: dict[int, History] = {}
        self._told: Told | None = None
        self.take()

    @property
    def pid(self) -> int:
        return self.program.pid

    @property
    def errors(self) -> Sequence[str]:
        """What cannot be shown of it."""
        errors = list(self._told.errors.values()) if self._told is not None else []
        return errors if self.program.error is None else [self.program.error, *errors]

    def take(self) -> None:
        """Take what it has told, if that is new."""
        told = self.program.told
        if told is None or told is self._told:
            return
        self._told = told
        histories = {number: self.histories.get(number) or History() for number in told.readings}
        self.histories = histories
        for number, reading in told.readings.items():
            histories[number].add(reading)

    @property
    def age_s(self) -> float | None:
        """Of what it has told."""
        return None if self._told is None else max(0.0, time.monotonic() - self._told.at_s)

    @property
    def silence(self) -> str | None:
        """That it does not answer, in words; None if it does."""
        silent_s = self.program.silent_s
        if self.program.is_stopped:
            said = "is stopped (by a signal, or a debugger)"
        elif silent_s >= _SECONDS_OF_PATIENCE:
            said = f"has not answered for {silent_s:.0f} s"
        else:
            return None
        return f"{said}; this is of {_ago(self.age_s)}" if self._told is not None else f"{said}; nothing is known of it"


def _ago(seconds: float | None) -> str:
    return "long ago" if seconds is None else f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


class Everyone:
    """All programs that run now, or one of them.

    Args:
        only: its pid.
    """

    def __init__(self, only: int | None = None) -> None:
        self._programs = Programs(only)
        self._watched: dict[int, Watched] = {}
        #: By pid: since when it is gone, and that it is.
        self._gone: dict[int, tuple[float, str]] = {}

    def find(self) -> Sequence[Watched]:
        """Those that are there, by their pids; from one call to the next, who has gone is told in ``notes``."""
        found: dict[int, Watched] = {}
        for program in self._programs.find():
            known = self._watched.get(program.pid)
            found[program.pid] = known if known is not None and known.program is program else Watched(program)
        for pid in self._watched.keys() - found.keys():
            self._gone[pid] = time.monotonic(), farewell(self._watched[pid])
        for pid in found:  # it closes one collector and makes the next
            self._gone.pop(pid, None)
        self._watched = found
        return list(found.values())

    @property
    def unreadable(self) -> Sequence[Unreadable]:
        return self._programs.unreadable

    @property
    def notes(self) -> Sequence[str]:
        """Who cannot be shown, or has gone a moment ago."""
        since = time.monotonic() - _SECONDS_TO_SAY
        self._gone = {pid: gone for pid, gone in self._gone.items() if gone[0] > since}
        return [*(f"{each.pid}: {each.why}" for each in self.unreadable), *(said for _, said in self._gone.values())]

    def __enter__(self) -> Everyone:
        return self

    def __exit__(self, *_: Any) -> None:
        self._programs.close()


def farewell(watched: Watched) -> str:
    """Of a program whose board is gone."""
    what = "has closed its last collector" if is_there(watched.pid) else "has ended"
    return f"{watched.pid} ({printable(watched.command)[:60]}) {what}"

"""Programs of this user on this machine that have collectors: found by their boards, and asked where they stand."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swath.insight.board import NAME, Answer, NoBoard, OthersBoard, OtherVersion
from swath.insight.from_json import printable
from swath.insight.reading import Reading

_LINK = f"/memfd:{NAME} (deleted)"
_SECONDS_BETWEEN_LOOKS = 0.005


@dataclass(frozen=True)
class Told:
    """What a program told of itself.

    Args:
        at_s: when, by ``time.monotonic``, which is the same for all processes of a machine.
        readings: of its collectors, by their numbers.
        errors: why one of them cannot be read, by its number.
    """

    at_s: float
    readings: Mapping[int, Reading]
    errors: Mapping[int, str] = field(default_factory=dict)


class Program:
    """One of them, that is asked and answers in its own time."""

    def __init__(self, pid: int, board: OthersBoard) -> None:
        self.pid = pid
        self._board = board
        self._answer: Answer | None = board.read()
        #: The last that is known; also of before it was asked here.
        self.told: Told | None = None
        #: Why what it told cannot be shown.
        self.error: str | None = None
        self._understand()
        self._asked_at_s: float | None = None

    def ask(self) -> None:
        """Does not wait. Who asks again before there was an answer still waits for the first."""
        if self._asked_at_s is None:
            self._asked_at_s = time.monotonic()
        self._board.ask()

    def has_answered(self) -> bool:
        """Whether there is an answer since it was asked first."""
        newest = self._board.read()
        if newest is not None and (self._answer is None or newest.number != self._answer.number):
            self._answer, self._asked_at_s = newest, None
            self._understand()
        return self._asked_at_s is None

    @property
    def silent_s(self) -> float:
        """Since when it has been asked without an answer."""
        return 0.0 if self._asked_at_s is None else time.monotonic() - self._asked_at_s

    @property
    def is_stopped(self) -> bool:
        """By a signal: Ctrl-Z, SIGSTOP, a debugger."""
        return _status(self.pid, "State").startswith(("T", "t"))

    @property
    def command(self) -> str:
        return command_of(self.pid)

    def _understand(self) -> None:
        if self._answer is None:
            return
        try:
            self.told, self.error = _told(json.loads(self._answer.text)), None
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self.error = f"what it tells of itself cannot be read: {printable(str(error))[:200]}"

    def close(self) -> None:
        self._board.close()


def _told(data: Any) -> Told:
    readings: dict[int, Reading] = {}
    errors: dict[int, str] = {}
    for each in data["collectors"]:
        number = int(each["number"])
        if "reading" in each:
            readings[number] = Reading.of_json(each["reading"])
        else:
            errors[number] = printable(str(each["error"]))
    return Told(float(data["at_s"]), readings, errors)


@dataclass(frozen=True)
class Unreadable:
    """A program whose board is of another version of swath."""

    pid: int
    why: str


class Programs:
    """All that run now. Each keeps its board open until it is gone.

    Args:
        only: the process to look at; None for all.
    """

    def __init__(self, only: int | None = None) -> None:
        self._only = only
        self._programs: dict[tuple[int, int], Program] = {}
        self.unreadable: Sequence[Unreadable] = ()

    def find(self) -> list[Program]:
        """Those that are there now, by their pids."""
        found: dict[tuple[int, int], Program] = {}
        unreadable: list[Unreadable] = []
        for pid, path in _boards([self._only] if self._only is not None else _own_processes()):
            with contextlib.suppress(OSError, NoBoard):  # it has ended meanwhile, or is none
                key = pid, os.stat(path).st_ino
                if key in found:
                    continue
                try:
                    program = self._programs.get(key) or _opened(pid, path)
                except OtherVersion as error:
                    unreadable.append(Unreadable(pid, str(error)))
                    continue
                if program is not None:
                    found[key] = program
        for key in self._programs.keys() - found.keys():
            self._programs[key].close()
        self._programs, self.unreadable = found, unreadable
        return [found[key] for key in sorted(found)]

    def close(self) -> None:
        for program in self._programs.values():
            program.close()
        self._programs = {}


def ask_all(programs: Iterable[Program], timeout_s: float) -> None:
    """Ask them, and wait for their answers, so long at most."""
    waiting = list(programs)
    for program in waiting:
        program.ask()
    deadline = time.monotonic() + timeout_s
    while waiting := [program for program in waiting if not program.has_answered()]:
        if time.monotonic() > deadline:
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def command_of(pid: int) -> str:
    """How a program was called, as a terminal can show it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return printable(" ".join(word.decode("utf-8", "replace") for word in words))


def is_there(pid: int) -> bool:
    """Whether it runs. (Of one that has ended, something stays until its parent has looked.)"""
    return not _status(pid, "State").startswith(("Z", "X")) and os.path.exists(f"/proc/{pid}")


def is_anothers(pid: int) -> bool:
    """Whether it is a process of another user (or one that hides what it does, which is as good)."""
    try:
        return os.stat(f"/proc/{pid}").st_uid != os.geteuid()
    except OSError:
        return False


def _own_processes() -> Iterator[int]:
    """Of this user. (Root may look into others' programs, too; what they tell is nothing to act on as root.)"""
    for name in os.listdir("/proc"):
        if name.isdecimal() and not is_anothers(int(name)):
            yield int(name)


def _boards(pids: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Descriptors that lead to boards, of processes of this user that may be looked at."""
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        try:
            numbers = [] if is_anothers(pid) else os.listdir(folder)
        except OSError:
            continue
        for number in numbers:
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{number}") == _LINK:
                    yield pid, f"{folder}/{number}"


def _opened(pid: int, path: str) -> Program | None:
    """None where the board is another process's: a child inherits its parent's descriptors."""
    board = OthersBoard(path)
    if board.pid != _as_it_knows_itself(pid):
        board.close()
        return None
    return Program(pid, board)


def _as_it_knows_itself(pid: int) -> int:
    """In a container a process has another number than here."""
    numbers = _status(pid, "NSpid").split()
    return int(numbers[-1]) if numbers else pid


def _status(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")
    except OSError:
        return ""

"""A program's board: memory in which it tells where it stands, whenever somebody of the same user asks.

The memory has no name. Whoever may look at a program's descriptors in ``/proc``, which the kernel lets the same user
do, can open it there. To ask is to raise a semaphore on the board; a thread of the program sleeps on it and writes an
answer. So it costs nothing until somebody asks.

There are two slots, and the newest answer is the valid one with the higher number: a reader sees whole answers, also of
a program that is stopped in the middle of the next.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from typing import Self

from swath import __version__, platforms
from swath.errors import SwathError
from swath.process.memory_files import keeps_its_size, new_sealed_descriptor
from swath.process.semaphores import SEMAPHORE_BYTES, Semaphore

#: What it takes to see programs, and to be seen.
NEEDS = (
    platforms.SHARED_MEMORY,
    platforms.SEMAPHORES,
    platforms.Need("descriptors of processes in /proc", lambda: os.path.isdir(f"/proc/{os.getpid()}/fd")),
)
#: What descriptors in ``/proc`` are called that lead to a board.
NAME = "swath-board"
#: Of all that follows the head. (The head stays as it is for ever, so that every version can say whose board it is.)
FORMAT = 1

_MAGIC = b"swathtop"
#: Magic, format, the process that writes here (as it knows itself), version of swath.
_HEAD = struct.Struct("<8sII16s")
_SEMAPHORE_AT = 64
#: Number of the answer, how long it is, and a checksum of all of it.
_ANSWER = struct.Struct("<QQI")
_SLOT_BYTES = 2 << 20
_SLOTS_AT = (mmap.PAGESIZE, mmap.PAGESIZE + _SLOT_BYTES)
_BOARD_BYTES = mmap.PAGESIZE + 2 * _SLOT_BYTES


class NoBoard(SwathError):
    """What a descriptor leads to is none, or cannot be read."""


class OtherVersion(NoBoard):
    """It is one of another version of swath; ``version`` is which."""

    def __init__(self, version: str) -> None:
        super().__init__(f"it runs swath {version}, whose boards swath {__version__} cannot read")
        self.version = version


@dataclass(frozen=True)
class Answer:
    """What a program has written: how many answers there were before, and the text."""

    number: int
    text: bytes


def _semaphore(memory: mmap.mmap, initial: int | None) -> Semaphore:
    return Semaphore((ctypes.c_char * SEMAPHORE_BYTES).from_buffer(memory, _SEMAPHORE_AT), initial)


class OwnBoard:
    """The board as its program has it. Its memory is sparse: pages are there once something is written to them.

    >>> board = OwnBoard()
    >>> board.answer(b"here")
    >>> board.close()
    """

    #: What fits.
    most_bytes = _SLOT_BYTES - _ANSWER.size

    def __init__(self) -> None:
        self.pid = os.getpid()
        descriptor = new_sealed_descriptor(NAME, _BOARD_BYTES)
        try:
            os.fchmod(descriptor, 0o600)
            # It keeps a descriptor of its own, by which others find it.
            self._memory = mmap.mmap(descriptor, _BOARD_BYTES)
        finally:
            os.close(descriptor)
        self._asked = _semaphore(self._memory, 0)
        # Last: who finds it may ask, and what was asked before the semaphore is made would be forgotten.
        self._memory[: _HEAD.size] = _HEAD.pack(_MAGIC, FORMAT, self.pid, __version__.encode()[:16])
        self._answers = 0

    def wait(self) -> None:
        """Until somebody asks, or ``wake`` is called. Who asks several times meanwhile gets one answer."""
        while not self._asked.acquire(timeout_s=None):
            pass  # a signal came
        while self._asked.is_up():
            pass

    def wake(self) -> None:
        self._asked.release()

    def answer(self, text: bytes) -> None:
        if len(text) > self.most_bytes:
            raise ValueError(f"an answer has {len(text):,} bytes, more than the {self.most_bytes:,} of a board")
        self._answers += 1
        at = _SLOTS_AT[self._answers % 2]
        self._memory[at + _ANSWER.size : at + _ANSWER.size + len(text)] = text
        self._memory[at : at + _ANSWER.size] = _ANSWER.pack(self._answers, len(text), _sum(self._answers, text))

    def close(self) -> None:
        """By who waits: nobody else may be in ``wait``."""
        del self._asked
        self._memory.close()


class OthersBoard:
    """The board of another program of the same user.

    Args:
        path: a descriptor of that program, in ``/proc``.

    Raises:
        NoBoard: there is none that can be read.
    """

    def __init__(self, path: str) -> None:
        with contextlib.ExitStack() as undo:
            try:
                self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                raise NoBoard(str(error)) from None
            undo.callback(os.close, self._descriptor)
            if os.fstat(self._descriptor).st_uid != os.geteuid():  # root may open it, too
                raise NoBoard("it is another user's")
            # (Reading it is a call, never a look at mapped memory: what is not there cannot end this process.)
            head = os.pread(self._descriptor, _HEAD.size, 0) if keeps_its_size(self._descriptor) else b""
            if len(head) < _HEAD.size:
                raise NoBoard("it is too short")
            magic, number, self.pid, version = _HEAD.unpack(head)
            if magic != _MAGIC:
                raise NoBoard("it is something else")
            if number != FORMAT:
                raise OtherVersion(_plain(version))
            if os.fstat(self._descriptor).st_size < _BOARD_BYTES:
                raise NoBoard("it is too short")
            self._memory = mmap.mmap(self._descriptor, mmap.PAGESIZE)
            self._asks = _semaphore(self._memory, None)
            undo.pop_all()

    def ask(self) -> None:
        self._asks.release()

    def read(self) -> Answer | None:
        """The newest; None before the first."""
        found = [answer for at in _SLOTS_AT if (answer := self._read_slot(at)) is not None]
        return max(found, key=lambda answer: answer.number, default=None)

    def _read_slot(self, at: int) -> Answer | None:
        number, length, checksum = _ANSWER.unpack(os.pread(self._descriptor, _ANSWER.size, at))
        if not 0 < length <= OwnBoard.most_bytes:
            return None
        text = os.pread(self._descriptor, length, at + _ANSWER.size)
        return Answer(number, text) if _sum(number, text) == checksum else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        del self._asks
        self._memory.close()
        os.close(self._descriptor)


def _sum(number: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(number.to_bytes(8, "little")))


def _plain(version: bytes) -> str:
    text = version.rstrip(b"\0").decode("ascii", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in text)

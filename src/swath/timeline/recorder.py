"""What a process did when: records of a fixed size in a ring of memory, which may be shared with whoever reads them.

Times are those of ``time.perf_counter``, which all processes of a machine have in common. Nobody who writes waits for a
reader, and what was written stays readable when the writer was killed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from time import perf_counter

import numpy as np
import torch


class Kind(IntEnum):
    """What a record is of. ``count``, ``x`` and ``y`` mean something else in each."""

    #: A stretch of steps. count: steps; x: seconds in the policy; y: seconds in resets; the rest is steps of envs.
    STEPS = 1
    #: Of an env worker: a stretch of orders. count: orders; x: seconds of waiting for the next.
    ORDERS = 2
    #: One policy for envs elsewhere: a stretch of its turns. count: rows; x: seconds in the policy; y: of waiting.
    TURNS = 3
    #: What is collected for one request, or one batch. count: frames.
    COLLECT = 10
    RESET = 11
    DELIVER = 12
    #: New weights are taken. count: their version.
    WEIGHTS = 13
    #: Into the replay buffer.
    STORE = 14
    WAIT_FOR_REQUEST = 15
    CALL = 16
    #: The owner waits for its workers.
    WAIT_FOR_BATCH = 20
    #: A batch is postprocessed, and handed over.
    HAND_OVER = 21
    #: Between two batches, whoever iterates has the turn.
    CONSUMER = 22
    #: In the background, nobody has: between two batches, there may be no room in the buffer.
    BETWEEN = 27
    #: And while the next one is got, the collector.
    NEXT = 26
    #: ``update_policy_weights_()``. count: the version.
    UPDATE = 23
    EVALUATE = 24
    #: Of an inference server: a stretch of batches. count: requests; x: seconds of answering; y: of waiting.
    SERVE = 25
    #: From now on this version of the weights acts. count: the version.
    VERSION = 30
    #: Something happened in a moment. count: which of ``Moment``.
    MOMENT = 31
    #: count: which of ``Gauge``; x: its value.
    GAUGE = 32


class Gauge(IntEnum):
    """What is measured again and again."""

    FRAMES = 1
    BUFFER_FRAMES = 2
    POLICY_LAG = 3
    SHARED_BYTES = 4


@dataclass(frozen=True, slots=True)
class Record:
    """One record, as it is read."""

    kind: Kind
    start_s: float
    end_s: float
    count: float
    x: float
    y: float
    #: Which thread wrote it.
    thread: int


#: kind, start, end, count, x, y, thread, and one that is not used: 64 bytes, a cache line.
_RECORD = Struct("8d")
_HEADER_BYTES = 64
#: A stretch of steps is a record of its own after so long; so a step that takes longer than this stands alone.
STRETCH_S = 0.002
BYTES_BY_DEFAULT = _HEADER_BYTES + 2**16 * _RECORD.size


class Recorder:
    """Writes records. What is told while something lasts (``since``) is seen before it ends.

    >>> recorder = Recorder(torch.zeros(_HEADER_BYTES + 2 * 64, dtype=torch.uint8))
    >>> for number in range(3):
    ...     recorder.add(Kind.CALL, number, number + 0.5)
    >>> [record.start_s for record in read(recorder.memory)]  # a ring of two: the first one is gone
    [1.0, 2.0]
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        view: memoryview[int] = memory.numpy().data
        self._records = view[_HEADER_BYTES:]
        self._capacity = len(self._records) // _RECORD.size
        #: How many records there were; and, while something lasts, what and since when.
        self._count = view[:8].cast("q")
        self._open = view[8:32].cast("d")
        # Of a collector in its user's process, several threads may write: one iterates, one sends weights.
        self._lock = threading.Lock()
        self._version = -1
        #: Of the last record: where one thread writes, what follows begins there.
        self.last_end_s = perf_counter()

    def add(self, kind: Kind, start_s: float, end_s: float, count: float = 0, x: float = 0.0, y: float = 0.0) -> None:
        with self._lock:
            number = self._count[0]
            at = number % self._capacity * _RECORD.size
            _RECORD.pack_into(self._records, at, kind, start_s, end_s, count, x, y, threading.get_ident(), 0.0)
            self._count[0] = number + 1
        if kind < Kind.VERSION:
            self.last_end_s = end_s

    @contextmanager
    def during(self, kind: Kind, count: float = 0, since_s: float | None = None) -> Iterator[None]:
        """All that is done while this lasts, or since then."""
        started = perf_counter() if since_s is None else since_s
        try:
            yield
        finally:
            self.add(kind, started, perf_counter(), count)

    @contextmanager
    def waiting(self, kind: Kind, since_s: float | None = None) -> Iterator[None]:
        """As ``during``, of what may last long: a reader sees it before its end."""
        self.begin(kind, perf_counter() if since_s is None else since_s)
        try:
            yield
        finally:
            self.end()

    def begin(self, kind: Kind, since_s: float) -> None:
        """Of what lasts, and is seen before ``end()``. (One at a time: what happens within it is told by ``add``.)"""
        self._open[1], self._open[2] = since_s, threading.get_ident()
        self._open[0] = kind

    def end(self) -> None:
        kind, since_s = int(self._open[0]), self._open[1]
        if kind:
            self._open[0] = 0
            self.add(Kind(kind), since_s, perf_counter())

    def acts_with(self, version: int) -> None:
        """Steps are taken with this version of the weights from now on."""
        if version != self._version:
            self._version = version
            now = perf_counter()
            self.add(Kind.VERSION, now, now, version)

    def gauge(self, what: Gauge, value: float) -> None:
        now = perf_counter()
        self.add(Kind.GAUGE, now, now, what, value)


class Stretch:
    """Many short turns, recorded as one: each is told with its end, and what of it was x and y."""

    def __init__(self, recorder: Recorder, kind: Kind) -> None:
        self._recorder = recorder
        self._kind = kind
        self._begin(perf_counter())

    def _begin(self, now: float) -> None:
        self._started = self._last = now
        self._count, self._x, self._y = 0.0, 0.0, 0.0

    def add(self, end_s: float, count: float = 1, x: float = 0.0, y: float = 0.0) -> None:
        self._last = end_s
        self._count += count
        self._x += x
        self._y += y
        if end_s - self._started > STRETCH_S:
            self.end()

    def end(self) -> None:
        """Whatever was told makes a record; what follows begins another."""
        if self._last > self._started:
            self._recorder.add(self._kind, self._started, self._last, self._count, self._x, self._y)
        self._begin(self._last)


def new_memory(num_bytes: int = BYTES_BY_DEFAULT) -> torch.Tensor:
    """For a recorder of this process."""
    # Pages are there once they are written to. (Torch would fill so many with threads, for which a forked child waits.)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))


def read(memory: torch.Tensor, now_s: float | None = None) -> list[Record]:
    """The records that are still there, the oldest first; and what lasts at ``now_s``, if it is given."""
    view = memory.numpy()
    header = view[:8].view(np.int64)
    table = view[_HEADER_BYTES:].view(np.float64).reshape(-1, 8)
    lasting = _lasting(view)  # first: what ends while records are copied is among them, or had not ended
    capacity, count = len(table), int(header[0])
    copy = table.copy()
    written = int(header[0])  # by now: those in their places may have been written over while they were copied
    first = max(0, written + 1 - capacity) if written > count else max(0, count - capacity)
    rows = [copy[number % capacity] for number in range(first, count)]
    records = [record_of(row.tolist()[:7]) for row in rows]
    if now_s is not None:
        records += _until_now(*lasting, records, now_s)
    return records


def _lasting(view: np.ndarray) -> tuple[float, float, float]:
    """What lasts, since when, in which thread: three numbers, which may change while they are read."""
    numbers, before = view[8:32].view(np.float64), None
    while before != (before := tuple(numbers.tolist())):
        pass
    kind, since_s, thread = before
    return kind, since_s, thread


def _until_now(kind: float, since_s: float, thread: float, records: Sequence[Record], now_s: float) -> Iterator[Record]:
    """A record of what lasts; what ended within it did so before it does."""
    own = [record for record in records if record.thread == thread]
    if kind and not any(record.kind == kind and record.start_s == since_s for record in own):
        end_s = max([now_s, since_s, *(record.end_s for record in own)])
        yield Record(Kind(int(kind)), since_s, end_s, 0.0, 0.0, 0.0, int(thread))


def record_of(row: Sequence[float]) -> Record:
    """Of numbers, in the order of its fields."""
    kind, start_s, end_s, count, x, y, thread = row
    return Record(Kind(int(kind)), start_s, end_s, count, x, y, int(thread))

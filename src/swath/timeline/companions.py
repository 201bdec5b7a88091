"""Whoever works beside collectors and is in their traces: an evaluator, an inference server."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

from swath.timeline.recorder import Kind, Record, Recorder, new_memory, read
from swath.timeline.recording import Recording


class Companion:
    """One of them. Records only while a collector of this process is traced.

    >>> companion = Companion("evaluator")
    >>> companion.begin_recording()
    >>> companion.turns_to(Kind.EVALUATE)
    >>> companion.turns_to(Kind.WAIT_FOR_REQUEST)
    >>> (recording,) = companion.end_recording()
    >>> [record.kind.name for record in recording.records]
    ['WAIT_FOR_REQUEST', 'EVALUATE', 'WAIT_FOR_REQUEST']
    """

    def __init__(self, name: str, pid: int | None = None) -> None:
        self.name = name
        self.pid = os.getpid() if pid is None else pid
        #: Where whoever works writes; None while nobody wants to know.
        self.recorder: Recorder | None = None
        #: Who writes.
        self.thread = threading.get_ident()
        self._doing = Kind.WAIT_FOR_REQUEST
        self._traces = 0
        self._lock = threading.Lock()

    def turns_to(self, kind: Kind) -> None:
        """What it has done until now is over."""
        with self._lock:
            self.thread = threading.get_ident()
            recorder, before, self._doing = self.recorder, self._doing, kind
            if recorder is not None:
                recorder.add(before, recorder.last_end_s, perf_counter())

    def begin_recording(self) -> None:
        with self._lock:
            self._traces += 1
            if self.recorder is None:
                self.recorder = Recorder(new_memory())

    def end_recording(self) -> Sequence[Recording]:
        """What was recorded. Another collector that is traced goes on with it."""
        with self._lock:
            recorder = self.recorder
            if recorder is None:
                return []
            self._traces -= 1
            if not self._traces:
                self.recorder = None
            lasts = Record(self._doing, recorder.last_end_s, perf_counter(), 0.0, 0.0, 0.0, self.thread)
            return [Recording(self.name, self.pid, [*read(recorder.memory), lasts], {self.thread: self.name})]


class Recorded(Protocol):
    """A ``Companion``, or what stands for one in another process."""

    def begin_recording(self) -> None: ...

    def end_recording(self) -> Sequence[Recording]: ...


class Companions:
    """Those of this process."""

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Recorded] = weakref.WeakSet()
        #: While a collector is traced, also those that nobody has any more.
        self._recorded: list[Recorded] = []
        self._traces = 0
        self._lock = threading.Lock()

    def add(self, companion: Recorded) -> None:
        """One that begins while a collector is traced is in the trace, too."""
        with self._lock:
            self._all.add(companion)
            traces = self._traces
            if traces:
                self._recorded.append(companion)
        for _ in range(traces):
            companion.begin_recording()

    def begin_recording(self) -> None:
        with self._lock:
            self._traces += 1
            found = list(self._all)
            self._recorded += [companion for companion in found if companion not in self._recorded]
        for companion in found:
            companion.begin_recording()

    def end_recording(self) -> list[Recording]:
        with self._lock:
            self._traces -= 1
            found = list(self._recorded)
            if not self._traces:
                self._recorded.clear()
        return [recording for companion in found for recording in companion.end_recording()]


#: Who works beside the collectors of this process, while anybody else has it.
companions = Companions()

"""Trying an arrangement: a real collector, and how many frames a second it delivers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swath.costs.arrangement import Arrangement, Form
from swath.costs.measuring import torch_threads
from swath.tuning.layouts import Made

#: One that works ahead has up to so many batches of each env ready, which were not collected while it was looked at.
_BATCHES_AHEAD = 3
#: Before each measurement, so much of its time does not count.
SETTLING = 0.3
#: Until those that work ahead rest: looked at so often, for so long at most.
_LOOK_S = 0.05
_MOST_SETTLING_S = 3.0


class Contestant:
    """A collector of one arrangement, measured in turn with others."""

    def __init__(self, made: Made, arrangement: Arrangement, frames_per_batch: int, frames_per_round: int) -> None:
        self.arrangement = arrangement
        self._made = made
        self._frames_per_batch = frames_per_batch
        #: A batch of every env.
        self._frames_per_round = frames_per_round
        self._collector: Any = None
        self._batches: Iterator[Any] = iter(())

    def measure(self, seconds: float) -> float:
        """Frames in a second, over whole rounds, for at least so long."""
        with _quietly(), torch_threads_of(self.arrangement):
            if self._collector is None:
                self._collector = self._made.collector(self.arrangement, self._frames_per_batch)
                self._batches = iter(self._collector)
                self._collect(self._frames_per_round, 0.0)
            if self.arrangement.form == Form.ASYNC:
                self._collect(_BATCHES_AHEAD * self._frames_per_round, 0.0)
            else:
                self._collect(1, SETTLING * seconds)
            started = time.perf_counter()
            frames = self._collect(self._frames_per_round, seconds)
            fps = frames / (time.perf_counter() - started)
            self._settle()
        return fps

    def _collect(self, frames: int, seconds: float) -> int:
        """So many frames, as often as it takes for so long. (Of envs that sleep alike, all comes at once.)"""
        started, delivered = time.perf_counter(), 0
        while not delivered or time.perf_counter() - started < seconds:
            goal = delivered + frames
            while delivered < goal:
                delivered += next(self._batches).numel()
        return delivered

    def _settle(self) -> None:
        """Until it does nothing any more: whoever is measured next needs the cores."""
        if self.arrangement.form != Form.ASYNC:
            return
        deadline, before = time.monotonic() + _MOST_SETTLING_S, -1
        while time.monotonic() < deadline:
            now = sum(worker["frames"] for worker in self._collector.stats()["workers"])
            if now == before:
                return
            before = now
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Until it is measured again."""
        if self._collector is not None:
            self._batches = iter(())
            collector, self._collector = self._collector, None
            with _quietly():
                collector.shutdown(raise_on_error=False)


@contextmanager
def torch_threads_of(arrangement: Arrangement) -> Iterator[None]:
    if arrangement.threads is None:
        yield
        return
    with torch_threads(arrangement.threads):
        yield


@contextmanager
def _quietly() -> Iterator[None]:
    """That envs wait, and that other numbers of workers would be better, is what this is about."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the envs wait rather than compute")
        yield

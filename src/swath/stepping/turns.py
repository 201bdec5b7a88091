"""One policy for envs elsewhere: giving them their actions and waiting for them, in turns, with a clock."""

from __future__ import annotations

from time import perf_counter
from typing import Protocol

from swath.rollout.loop import StepTiming
from swath.timeline.recorder import Kind, Recorder, Stretch


class TurnsOf(Protocol):
    """Who takes turns."""

    timing: StepTiming
    num_forward_rows: int


class Turns:
    """Which takes how long. (Two looks at a clock in each turn, 0.1 µs.)"""

    def __init__(self, timing: StepTiming) -> None:
        self._timing = timing
        self._before = perf_counter()

    def acted(self) -> None:
        now = perf_counter()
        self._timing.policy_s += now - self._before
        self._before = now

    def waited(self) -> None:
        now = perf_counter()
        self._timing.env_s += now - self._before
        self._before = now

    def end(self) -> None:
        """The batch is complete."""


class RecordedTurns(Turns):
    """And a recorder that wants to know."""

    def __init__(self, rollout: TurnsOf, recorder: Recorder) -> None:
        super().__init__(rollout.timing)
        self._rollout = rollout
        self._stretch = Stretch(recorder, Kind.TURNS)
        self._rows = rollout.num_forward_rows

    def acted(self) -> None:
        before, rows = self._before, self._rollout.num_forward_rows
        super().acted()
        self._stretch.add(self._before, rows - self._rows, x=self._before - before)
        self._rows = rows

    def waited(self) -> None:
        before = self._before
        super().waited()
        self._stretch.add(self._before, 0, y=self._before - before)

    def end(self) -> None:
        self._stretch.end()

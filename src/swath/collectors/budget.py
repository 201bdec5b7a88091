"""How many frames are asked for, and how far a collector has come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from swath.collectors.numbers import count_or_none, positive_int
from swath.warn import warn_user


@dataclass(frozen=True)
class Budget:
    """How many frames: in a batch, in all."""

    num_envs: int
    steps_per_batch: int
    #: None: endless.
    total_frames: int | None

    @classmethod
    def resolve(cls, frames_per_batch: Any, total_frames: Any, num_envs: int) -> Budget:
        frames = positive_int("frames_per_batch", frames_per_batch)
        steps = -(-frames // num_envs)
        if steps * num_envs != frames:
            warn_user(
                f"frames_per_batch={frames} does not divide over {num_envs} envs; {steps * num_envs} will be used "
                f"({steps} steps of each)"
            )
        return cls(num_envs, steps, count_or_none("total_frames", total_frames, "endless"))

    @property
    def frames_per_batch(self) -> int:
        return self.steps_per_batch * self.num_envs

    def next_batch(self, frames_so_far: int) -> tuple[int, int | None]:
        """Steps of the next batch, and how many envs deliver them (None: all).

        Totals are exact. What is left at the end and fills no step of all envs comes as one step of the first few.
        """
        if self.total_frames is None:
            return self.steps_per_batch, None
        left = self.total_frames - frames_so_far
        steps = min(self.steps_per_batch, left // self.num_envs)
        return (steps, None) if steps else (1, left)

    def is_spent(self, frames_so_far: int) -> bool:
        return self.total_frames is not None and frames_so_far >= self.total_frames

    @property
    def num_batches(self) -> int | None:
        if self.total_frames is None:
            return None
        full, rest = divmod(self.total_frames, self.frames_per_batch)
        return full + bool(rest // self.num_envs) + bool(rest % self.num_envs)


#: Frames that are older than this many updates are counted as so old.
_OLDEST = 64


class Lags:
    """How many frames were so many updates old when they were delivered.

    >>> lags = Lags()
    >>> lags.add([(0, 3), (10, 4)], num_steps=15, frames_per_step=2, newest=5)
    >>> lags.counts()
    (0, 10, 20)
    """

    def __init__(self) -> None:
        self._counts = [0] * (_OLDEST + 1)

    def add(self, versions: Sequence[tuple[int, int]], num_steps: int, frames_per_step: float, newest: int) -> None:
        """Of a batch of which ``versions`` says from which step on which version of the weights acted."""
        ends = [step for step, _ in versions[1:]] + [num_steps]
        for (step, version), end in zip(versions, ends, strict=True):
            steps = min(end, num_steps) - max(0, min(step, num_steps))
            if steps > 0:
                self._counts[min(_OLDEST, max(0, newest - version))] += round(steps * frames_per_step)

    def counts(self) -> tuple[int, ...]:
        """By how old, up to the oldest that there was."""
        counts = list(self._counts)
        while counts and not counts[-1]:
            counts.pop()
        return tuple(counts)


@dataclass
class Progress:
    """How far a collector has come."""

    frames: int = 0
    batches: int = 0
    #: In which batches were got.
    seconds: float = 0.0
    #: Between two batches: whoever iterates had the turn; or, in the background, there was no room in the buffer.
    yours_s: float = 0.0
    held_back_s: float = 0.0
    lags: Lags = field(default_factory=Lags)
    made_at: float = field(default_factory=time.perf_counter)
    #: Since when a batch is being got, or none is; None before the first.
    _since: float | None = None
    _is_getting: bool = False
    _in_background: bool = False

    def begin_batch(self, in_background: bool) -> None:
        now = time.perf_counter()
        since, self._since = self._since, now
        self._is_getting, self._in_background = True, in_background
        if since is not None:
            if in_background:
                self.held_back_s += now - since
            else:
                self.yours_s += now - since

    def end_batch(self, is_whole: bool = True) -> None:
        now = time.perf_counter()
        if is_whole and self._since is not None:
            self.seconds += now - self._since
        self._since, self._is_getting = now, False

    def spent(self) -> tuple[float, float, float]:
        """``seconds``, ``yours_s``, ``held_back_s``; what lasts now counts, too."""
        seconds, yours_s, held_back_s, since = self.seconds, self.yours_s, self.held_back_s, self._since
        lasts = 0.0 if since is None else max(0.0, time.perf_counter() - since)
        if self._is_getting:
            return seconds + lasts, yours_s, held_back_s
        if self._in_background:
            return seconds, yours_s, held_back_s + lasts
        return seconds, yours_s + lasts, held_back_s

"""How many frames are asked for, and how far a collector has come."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass
class Progress:
    """How far a collector has come."""

    frames: int = 0
    batches: int = 0
    seconds: float = 0.0

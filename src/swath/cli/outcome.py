"""What came of a collection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from swath.cli.episodes import EpisodeStatistics
from swath.cli.errors import FAILED, describe, without_paths

StoppedBy = Literal["SIGINT", "SIGTERM", "error"]


@dataclass(frozen=True)
class Outcome:
    """How much was collected, and what ended it."""

    frames: int
    requested_frames: int
    episodes: EpisodeStatistics
    frames_per_env: list[int]
    #: None: nobody could say.
    seconds: float | None
    stopped_by: StoppedBy | None = None
    error: BaseException | None = None
    #: Frames that were taken, and may have been shown, and did not come to be written.
    lost: int = 0

    @classmethod
    def of_nothing(cls, requested_frames: int, num_envs: int) -> Outcome:
        """What is known while it is collected, and after a kill."""
        return cls(0, requested_frames, EpisodeStatistics(), [0] * num_envs, None)

    @property
    def complete(self) -> bool:
        return self.frames == self.requested_frames

    @property
    def fps(self) -> float:
        return self.frames / self.seconds if self.seconds else 0.0

    @property
    def exit_code(self) -> int:
        """0 if all that was asked for is there, whatever came after the last frame."""
        if self.error is not None:
            return FAILED
        if self.complete or self.stopped_by is None:
            return 0
        return {"SIGINT": 130, "SIGTERM": 143}.get(self.stopped_by, FAILED)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "complete": self.complete,
            "stopped_by": None if self.complete and self.error is None else self.stopped_by,
            "error": None if self.error is None else without_paths("\n".join(describe(self.error))),
            "frames": self.frames,
            "requested_frames": self.requested_frames,
            "frames_per_env": self.frames_per_env,
            "episodes": self.episodes.count,
            "unfinished_episodes": self.episodes.unfinished,
            "return": self.episodes.returns.as_dict(),
            "length": self.episodes.lengths.as_dict(),
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "fps": None if self.seconds is None else round(self.fps, 1),
        }

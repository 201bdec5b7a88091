"""How often a frame is sampled: a limit that holds back whichever of collector and learner is ahead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplesPerInsert:
    """Keeps ``frames sampled / frames written`` near ``ratio``.

    Args:
        ratio: how many frames are sampled for each one that is written.
        min_size: sample nothing before so many frames are there.
        slack: how many samples either side may be ahead. It must be more than one batch of either.

    >>> rate = SamplesPerInsert(ratio=4, min_size=100, slack=1000)
    >>> rate.may_write(written=100, sampled=0), rate.may_write(written=1000, sampled=0)
    (True, False)
    >>> rate.may_sample(256, written=50, sampled=0), rate.may_sample(256, written=100, sampled=0)
    (False, True)
    """

    ratio: float
    min_size: int = 1
    slack: float = 10_000

    def __post_init__(self) -> None:
        if self.ratio <= 0 or self.slack <= 0:
            raise ValueError(f"ratio and slack must be positive, got {self.ratio} and {self.slack}")
        if self.min_size < 1:
            raise ValueError(f"min_size must be at least 1, got {self.min_size}")

    def _due(self, written: int, sampled: int) -> float:
        """Samples that what was written since ``min_size`` entitles to and that were not taken."""
        return self.ratio * (written - self.min_size) - sampled

    def may_write(self, written: int, sampled: int) -> bool:
        return written <= self.min_size or self._due(written, sampled) < self.slack

    def may_sample(self, count: int, written: int, sampled: int) -> bool:
        return written >= self.min_size and self._due(written, sampled) - count >= -self.slack

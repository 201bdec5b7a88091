"""Episodes, found in batches as they come: rows for ``episodes.csv`` and numbers for the screen."""

from __future__ import annotations

import csv
import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from swath.dataset import EPISODE_COLUMNS

RECENT = 100


@dataclass
class Tally:
    """Mean, least and greatest of numbers that are not kept."""

    count: int = 0
    total: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.least = min(self.least, value)
        self.greatest = max(self.greatest, value)

    def spread(self) -> dict[str, float]:
        """All NaN if one number was, or if there was none."""
        if not self.count or math.isnan(self.total):
            return dict.fromkeys(("mean", "min", "max"), math.nan)
        return {"mean": self.total / self.count, "min": self.least, "max": self.greatest}

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which knows neither NaN nor infinity."""
        return {name: value if math.isfinite(value) else None for name, value in self.spread().items()}


@dataclass
class EpisodeStatistics:
    """Of the episodes that ended."""

    returns: Tally = field(default_factory=Tally)
    lengths: Tally = field(default_factory=Tally)
    #: (return, length) of the last few.
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    unfinished: int = 0
    #: Frames of these episodes, and of those under way.
    frames: int = 0

    @property
    def count(self) -> int:
        return self.returns.count

    def add(self, episode_return: float, length: int) -> None:
        self.returns.add(episode_return)
        self.lengths.add(length)
        self.recent.append((episode_return, length))

    def recent_means(self) -> tuple[float, float] | None:
        """Mean return and length of the last few; called while another thread may add to them."""
        recent = list(self.recent)
        if not recent:
            return None
        returns, lengths = zip(*recent, strict=True)
        return sum(returns) / len(recent), sum(lengths) / len(recent)


class EpisodeLog:
    """Writes a row when an episode ends.

    Args:
        path: of the CSV file.
        offsets: where the frames of each env start, as far as that is known.
    """

    def __init__(self, path: Path, offsets: np.ndarray) -> None:
        self._path = path
        self._offsets = offsets
        self._file = path.open("w", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(EPISODE_COLUMNS)
        # Of each env's episode under way:
        self._starts = np.zeros(len(offsets), dtype=np.int64)
        self._returns = np.zeros(len(offsets))
        self._traj_ids = np.zeros(len(offsets), dtype=np.int64)
        self._steps = np.zeros(len(offsets), dtype=np.int64)
        self.statistics = EpisodeStatistics()

    def add(self, batch: TensorDictBase, first_env: int = 0) -> None:
        """The next steps ``[envs, steps]`` of some envs that follow each other."""
        num_envs, num_steps = batch.shape
        outcome = batch.get("next")
        rewards = outcome.get("reward").reshape(num_envs, num_steps, -1).double().sum(-1).numpy()
        terminated = _flags(outcome.get("terminated"))
        done = _flags(outcome.get("done"))
        truncated = _flags(outcome.get("truncated")) if "truncated" in outcome.keys() else done & ~terminated  # noqa: SIM118
        traj_ids = batch.get(("collector", "traj_ids")).numpy()
        first = np.zeros(num_envs, dtype=np.int64)
        for step, row in np.argwhere(done.T).tolist():  # in the order of time
            env = first_env + row
            episode_return = self._returns[env] + rewards[row, first[row] : step + 1].sum()
            start = self._starts[env]
            end = self._steps[env] + step + 1
            self._write(
                env,
                traj_ids[row, step],
                start,
                end - start,
                episode_return,
                terminated[row, step],
                truncated[row, step],
            )
            self.statistics.add(float(episode_return), int(end - start))
            self._returns[env] = 0.0
            self._starts[env] = end
            first[row] = step + 1
        for row in range(num_envs):
            self._returns[first_env + row] += rewards[row, first[row] :].sum()
            self._traj_ids[first_env + row] = traj_ids[row, -1]
        self._steps[first_env : first_env + num_envs] += num_steps
        self.statistics.frames += num_envs * num_steps

    def _write(
        self, env: int, traj_id: int, start: int, length: int, episode_return: float, terminated: Any, truncated: Any
    ) -> None:
        flags = ["true" if flag else "false" for flag in (terminated, truncated)]
        self._rows.writerow(
            [env, int(traj_id), int(self._offsets[env] + start), int(length), float(episode_return), *flags]
        )

    def finish(self, offsets: np.ndarray) -> None:
        """Add the episodes under way, and close; ``offsets`` are where the frames of each env start after all."""
        for env in np.flatnonzero(self._steps > self._starts).tolist():
            length = self._steps[env] - self._starts[env]
            self._write(env, self._traj_ids[env], self._starts[env], length, self._returns[env], False, False)
            self.statistics.unfinished += 1
        self._file.close()
        if not np.array_equal(offsets, self._offsets):
            self._move(offsets - self._offsets)

    def _move(self, by: np.ndarray) -> None:
        moved = self._path.with_suffix(".moved")
        with self._path.open(newline="", encoding="utf-8") as old, moved.open("w", newline="", encoding="utf-8") as new:
            reader = csv.DictReader(old)
            writer = csv.DictWriter(new, list(EPISODE_COLUMNS), lineterminator="\n")
            writer.writeheader()
            for row in reader:
                writer.writerow({**row, "start": int(row["start"]) + int(by[int(row["env"])])})
        moved.replace(self._path)


def _flags(flag: Any) -> np.ndarray:
    return flag.reshape(flag.shape[0], flag.shape[1], -1).any(-1).numpy()

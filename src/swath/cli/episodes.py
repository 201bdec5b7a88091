"""Episodes, found in batches as they come: rows for ``episodes.csv`` and numbers for the screen."""

from __future__ import annotations

import csv
import io
import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from swath.dataset_format import EPISODE_COLUMNS
from swath.disk import write_all

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


@dataclass(frozen=True)
class Ended:
    """An episode that ended, or was under way at the end; ``start`` is counted within its env."""

    env: int
    traj_id: int
    start: int
    length: int
    episode_return: float
    terminated: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class _News:
    """What some steps of envs that follow each other bring; nothing is counted before it is accepted."""

    envs: slice
    num_steps: int
    ended: list[Ended]
    # Of each env's episode that is under way then:
    starts: np.ndarray
    returns: np.ndarray
    traj_ids: np.ndarray


class EpisodeLog:
    """Writes a row when an episode ends.

    Args:
        path: of the CSV file.
        offsets: where the frames of each env start, as far as that is known.
    """

    def __init__(self, path: Path, offsets: np.ndarray) -> None:
        self._path = path
        self._offsets = offsets
        self._file = io.FileIO(path, "w")
        #: Of the file; what is behind it does not count.
        self.num_bytes = write_all(self._file, _as_csv([list(EPISODE_COLUMNS)]), 0)
        # Of each env's episode under way:
        self._starts = np.zeros(len(offsets), dtype=np.int64)
        self._returns = np.zeros(len(offsets))
        self._traj_ids = np.zeros(len(offsets), dtype=np.int64)
        self._steps = np.zeros(len(offsets), dtype=np.int64)
        self.statistics = EpisodeStatistics()

    def look(self, batch: TensorDictBase, first_env: int = 0) -> _News:
        """At the next steps ``[envs, steps]`` of some envs that follow each other."""
        num_envs, num_steps = batch.shape
        envs = slice(first_env, first_env + num_envs)
        outcome = batch.get("next")
        rewards = outcome.get("reward").reshape(num_envs, num_steps, -1).double().sum(-1).numpy()
        terminated = _flags(outcome.get("terminated"))
        done = _flags(outcome.get("done"))
        truncated = _flags(outcome.get("truncated")) if "truncated" in outcome.keys() else done & ~terminated  # noqa: SIM118
        traj_ids = batch.get(("collector", "traj_ids")).numpy()
        first = np.zeros(num_envs, dtype=np.int64)
        starts, returns, before = self._starts[envs].copy(), self._returns[envs].copy(), self._steps[envs]
        ended = []
        for step, row in np.argwhere(done.T).tolist():  # in the order of time
            episode_return = float(returns[row] + rewards[row, first[row] : step + 1].sum())
            start, end = int(starts[row]), int(before[row]) + step + 1
            flags = bool(terminated[row, step]), bool(truncated[row, step])
            ended.append(Ended(first_env + row, int(traj_ids[row, step]), start, end - start, episode_return, *flags))
            returns[row], starts[row], first[row] = 0.0, end, step + 1
        for row in range(num_envs):
            returns[row] += rewards[row, first[row] :].sum()
        return _News(envs, num_steps, ended, starts, returns, traj_ids[:, -1])

    def write(self, news: _News) -> int:
        """Write rows behind those that count; how long the file is then."""
        rows = _as_csv([_row(episode, self._offsets) for episode in news.ended])
        return self.num_bytes + write_all(self._file, rows, self.num_bytes)

    def accept(self, news: _News, num_bytes: int) -> None:
        """From now on it counts."""
        self.num_bytes = num_bytes
        self._starts[news.envs], self._returns[news.envs] = news.starts, news.returns
        self._traj_ids[news.envs] = news.traj_ids
        self._steps[news.envs] += news.num_steps
        for episode in news.ended:
            self.statistics.add(episode.episode_return, episode.length)
        self.statistics.frames += len(news.starts) * news.num_steps

    def close(self) -> None:
        self._file.close()
        self.statistics.unfinished = int((self._steps > self._starts).sum())

    def put_together(self, path: Path, offsets: np.ndarray) -> None:
        """All rows, with the episodes under way; ``offsets`` are where the frames of each env start after all."""
        rows = self._path.read_bytes()[: self.num_bytes]
        if not np.array_equal(offsets, self._offsets):
            rows = _moved(rows, offsets - self._offsets)
        lengths = self._steps - self._starts
        under_way = [
            Ended(env, int(self._traj_ids[env]), int(self._starts[env]), int(lengths[env]), float(self._returns[env]))
            for env in np.flatnonzero(lengths).tolist()
        ]
        path.write_bytes(rows + _as_csv([_row(episode, offsets) for episode in under_way]))


def _row(episode: Ended, offsets: np.ndarray) -> list[Any]:
    flags = ["true" if flag else "false" for flag in (episode.terminated, episode.truncated)]
    start = int(offsets[episode.env]) + episode.start
    return [episode.env, episode.traj_id, start, episode.length, episode.episode_return, *flags]


def _as_csv(rows: list[list[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _moved(rows: bytes, by: np.ndarray) -> bytes:
    """The same, with starts that are further behind."""
    header, *others = csv.reader(io.StringIO(rows.decode()))
    env, start = header.index("env"), header.index("start")
    for row in others:
        row[start] = str(int(row[start]) + int(by[int(row[env])]))
    return _as_csv([header, *others])


def _flags(flag: Any) -> np.ndarray:
    return flag.reshape(flag.shape[0], flag.shape[1], -1).any(-1).numpy()

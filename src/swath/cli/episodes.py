"""Episodes, found in batches as they come: rows for ``episodes.csv`` and numbers for the screen."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from swath.data.episodes import EpisodeTally, Frames, News
from swath.dataset_format import EPISODE_COLUMNS
from swath.disk import write_all


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
    unfinished: int = 0

    @property
    def count(self) -> int:
        return self.returns.count

    def add(self, episode_return: float, length: int) -> None:
        self.returns.add(episode_return)
        self.lengths.add(length)


@dataclass(frozen=True)
class _Row:
    """An episode that ended, or was under way at the end; ``start`` is counted within its env."""

    env: int
    traj_id: int
    start: int
    length: int
    episode_return: float
    terminated: bool = False
    truncated: bool = False

    def as_csv(self, offsets: np.ndarray) -> list[Any]:
        flags = ["true" if flag else "false" for flag in (self.terminated, self.truncated)]
        return [self.env, self.traj_id, int(offsets[self.env]) + self.start, self.length, self.episode_return, *flags]


@dataclass(frozen=True)
class _News:
    """What some steps of envs that follow each other bring; nothing is counted before it is accepted."""

    found: News
    envs: slice
    num_steps: int
    ended: list[_Row]


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
        self._tally = EpisodeTally()
        self._steps = np.zeros(len(offsets), dtype=np.int64)
        self.statistics = EpisodeStatistics()

    def look(self, batch: TensorDictBase, first_env: int = 0) -> _News:
        """At the next steps ``[envs, steps]`` of some envs that follow each other."""
        num_envs, num_steps = batch.shape
        found = self._tally.look(Frames.of_batch(batch), np.arange(first_env, first_env + num_envs))
        ended = found.ended
        starts = self._steps[ended.envs] + ended.last_steps + 1 - ended.lengths
        columns = ended.envs, ended.traj_ids, starts, ended.lengths, ended.returns(), ended.terminated, ended.truncated
        rows = [_Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        return _News(found, slice(first_env, first_env + num_envs), num_steps, rows)

    def write(self, news: _News) -> int:
        """Write rows behind those that count; how long the file is then."""
        rows = _as_csv([episode.as_csv(self._offsets) for episode in news.ended])
        return self.num_bytes + write_all(self._file, rows, self.num_bytes)

    def accept(self, news: _News, num_bytes: int) -> None:
        """From now on it counts."""
        self.num_bytes = num_bytes
        self._tally.accept(news.found)
        self._steps[news.envs] += news.num_steps
        for episode in news.ended:
            self.statistics.add(episode.episode_return, episode.length)

    def close(self) -> None:
        self._file.close()
        self.statistics.unfinished = len(self._tally.under_way())

    def put_together(self, path: Path, offsets: np.ndarray) -> None:
        """All rows, with the episodes under way; ``offsets`` are where the frames of each env start after all."""
        rows = self._path.read_bytes()[: self.num_bytes]
        if not np.array_equal(offsets, self._offsets):
            rows = _moved(rows, offsets - self._offsets)
        rest = self._tally.under_way()
        starts = self._steps[rest.envs] - rest.lengths
        columns = rest.envs, rest.traj_ids, starts, rest.lengths, rest.returns()
        under_way = [_Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        path.write_bytes(rows + _as_csv([episode.as_csv(offsets) for episode in under_way]))


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

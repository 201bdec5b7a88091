"""Batches whose episodes are counted later, many at once: to look at a small one costs as much as at a large one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDictBase

from swath.data.episodes import EpisodeHistory, EpisodeTally, getter_of
from swath.keys import Key, leaves_of
from swath.rollout.delivery import TRAJ_IDS

#: So many frames are counted at once; a batch that has as many is not kept.
_FRAMES_AT_ONCE = 8192
_FRAMES_OF_LARGE = 4096

#: Which worker, or node, envs are in.
WorkersOf = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Waiting:
    """A batch, as far as it is looked at: copies, since its user may change it."""

    #: ``[*lead, steps, *shape]``
    leaves: Mapping[Key, torch.Tensor]
    #: Of each row, or of each frame.
    envs: np.ndarray
    #: How many frames were delivered with it, and with which weights.
    frames: int
    version: int

    @property
    def num_steps(self) -> int:
        return self.leaves[TRAJ_IDS].shape[-1]

    @property
    def num_frames(self) -> int:
        return self.leaves[TRAJ_IDS].numel()

    def flat(self, key: Key) -> torch.Tensor:
        """``[frames, *shape]``"""
        return self.leaves[key].detach().flatten(0, self.leaves[TRAJ_IDS].ndim - 1)

    def env_of_frames(self) -> np.ndarray:
        is_by_row = len(self.envs) * self.num_steps == self.num_frames
        return np.repeat(self.envs, self.num_steps) if is_by_row else self.envs

    def steps(self) -> np.ndarray:
        return np.arange(self.num_frames) % self.num_steps


class EpisodeBacklog:
    """Frames between a collector that delivers them and the history of its episodes."""

    def __init__(self, tally: EpisodeTally, history: EpisodeHistory) -> None:
        self._tally = tally
        self._history = history
        self._waiting: list[_Waiting] = []
        self._num_frames = 0
        #: Who collects adds, and whoever asks counts.
        self._lock = threading.Lock()

    def add(self, batch: TensorDictBase, envs: np.ndarray, frames: int, version: int, workers_of: WorkersOf) -> None:
        """The next batch, with which so many frames are delivered; counted at some time."""
        num_frames = batch.batch_size.numel()
        if num_frames >= _FRAMES_OF_LARGE:
            self.add_and_count(batch, envs, frames, version, workers_of)
            return
        get = getter_of(batch)
        keys = self._tally.keys_looked_at(lambda: (key for key, _ in leaves_of(batch)))
        waiting = _Waiting({key: get(key).clone() for key in keys}, envs.copy(), frames, version)
        with self._lock:
            self._waiting.append(waiting)
            self._num_frames += num_frames
        if self._num_frames >= _FRAMES_AT_ONCE:
            self.count(workers_of)

    def add_and_count(
        self, batch: TensorDictBase, envs: np.ndarray, frames: int, version: int, workers_of: WorkersOf
    ) -> None:
        """As ``add``, counted now."""
        self.count(workers_of)
        with self._lock:
            ended = self._tally.add(batch, envs)
            if len(ended):
                self._history.add(ended, workers_of(ended.envs), version, frames)

    def count(self, workers_of: WorkersOf) -> None:
        """Whatever waits is in the history after this."""
        with self._lock:
            waiting, self._waiting, self._num_frames = self._waiting, [], 0
            if waiting:
                self._count(waiting, workers_of)

    def _count(self, waiting: list[_Waiting], workers_of: WorkersOf) -> None:
        # A frame's turn: its batch, and its step in it.
        stride = max(each.num_steps for each in waiting)
        turns = np.concatenate([number * stride + each.steps() for number, each in enumerate(waiting)])
        envs = np.concatenate([each.env_of_frames() for each in waiting])
        leaves = {key: torch.cat([each.flat(key) for each in waiting]) for key in waiting[0].leaves}
        there = leaves[TRAJ_IDS] >= 0
        if not there.all():  # else what was not collected would part an episode
            leaves = {key: leaf[there] for key, leaf in leaves.items()}
            turns, envs = turns[there.cpu().numpy()], envs[there.cpu().numpy()]
        news = self._tally.look_at(leaves.__getitem__, lambda: leaves, 1, envs, turns)
        self._tally.accept(news)
        ended = news.ended
        if len(ended):
            batches = ended.last_steps // stride
            frames, versions = (np.array([(each.frames, each.version) for each in waiting]).T)[:, batches]
            self._history.add(ended, workers_of(ended.envs), versions, frames)

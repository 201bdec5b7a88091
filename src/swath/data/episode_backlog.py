"""Batches whose episodes are counted later, many at once: to look at a small one costs as much as at a large one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from swath.data.episodes import Ended, EpisodeTally, Frames
from swath.keys import Key
from swath.rollout.delivery import TRAJ_IDS

#: So many frames are counted at once; a batch that has as many is not kept.
_FRAMES_AT_ONCE = 8192
_FRAMES_OF_LARGE = 4096

#: Told of what has ended; of each, which version it is if frames do not say, and how many frames were there with it.
Tell = Callable[[Ended, np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class _Waiting:
    """A batch, as far as it is looked at: copies, since its memory is its user's, or used again."""

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
    """Frames between whoever collects them and who is told what has ended in them."""

    def __init__(self, tally: EpisodeTally) -> None:
        self._tally = tally
        self._waiting: list[_Waiting] = []
        self._num_frames = 0
        self._counted_at_s = time.monotonic()
        #: Who collects adds, and whoever asks counts.
        self._lock = threading.Lock()

    def add(self, frames: Frames, envs: np.ndarray, so_far: int, version: int, tell: Tell) -> None:
        """The next batch, with which there are ``so_far`` frames; counted at some time."""
        num_frames = math.prod(frames.shape)
        if num_frames >= _FRAMES_OF_LARGE:
            self.add_and_count(frames, envs, so_far, version, tell)
            return
        keys = self._tally.keys_looked_at(frames)
        waiting = _Waiting({key: frames.get(key).clone() for key in keys}, envs.copy(), so_far, version)
        with self._lock:
            self._waiting.append(waiting)
            self._num_frames += num_frames
        if self._num_frames >= _FRAMES_AT_ONCE:
            self.count(tell)

    def add_and_count(self, frames: Frames, envs: np.ndarray, so_far: int, version: int, tell: Tell) -> None:
        """As ``add``, counted now."""
        self.count(tell)
        with self._lock:
            ended = self._tally.add(frames, envs)
            if len(ended):
                tell(ended, np.full(len(ended), version), np.full(len(ended), so_far))

    def waits_longer_than(self, seconds: float) -> bool:
        """Whether nothing was counted for so long."""
        return time.monotonic() - self._counted_at_s > seconds

    def count(self, tell: Tell) -> None:
        """Whatever waits has been told of after this."""
        with self._lock:
            waiting, self._waiting, self._num_frames = self._waiting, [], 0
            self._counted_at_s = time.monotonic()
            if waiting:
                self._count(waiting, tell)

    def _count(self, waiting: list[_Waiting], tell: Tell) -> None:
        # A frame's turn: its batch, and its step in it.
        stride = max(each.num_steps for each in waiting)
        turns = np.concatenate([number * stride + each.steps() for number, each in enumerate(waiting)])
        envs = np.concatenate([each.env_of_frames() for each in waiting])
        leaves = {key: torch.cat([each.flat(key) for each in waiting]) for key in waiting[0].leaves}
        there = leaves[TRAJ_IDS] >= 0
        if not there.all():  # else what was not collected would part an episode
            leaves = {key: leaf[there] for key, leaf in leaves.items()}
            turns, envs = turns[there.cpu().numpy()], envs[there.cpu().numpy()]
        ended = self._tally.add(Frames.of_leaves(leaves), envs, turns)
        if len(ended):
            batches = ended.last_steps // stride
            so_far, versions = (np.array([(each.frames, each.version) for each in waiting]).T)[:, batches]
            tell(ended, versions, so_far)

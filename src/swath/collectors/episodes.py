"""What a collector tells of episodes: which have ended, counted in batches as they come."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDictBase

from swath.collectors.budget import Progress
from swath.data.episodes import EpisodeHistory, Episodes, EpisodeTally, needs_ids
from swath.rollout.delivery import TRAJ_IDS


class TellsOfEpisodes:
    """The part of a collector that counts episodes."""

    #: How far it is.
    _progress: Progress
    #: Of the batch that is being counted: the number of its first env.
    _first_env: int

    def _begin_episodes(self) -> None:
        """First of all in a constructor."""
        self._tally = EpisodeTally()
        self._history = EpisodeHistory()

    def episodes(self, last: int | None = None) -> Episodes:
        """Episodes that have ended since the last call; or the ``last`` so many, which does not count as a call.

        Arrays with an entry for each: ``returns``, ``lengths``, ``envs``, ... (see ``Episodes``). An episode is there
        once its last frame was delivered, or is in the replay buffer. May be called at any time, from any thread.

        >>> from swath.collectors import Collector
        >>> collector = Collector("CartPole-v1", frames_per_batch=200, total_frames=400)
        >>> for batch in collector:
        ...     ended = collector.episodes()
        ...     assert ended.returns.tolist() == ended.lengths.tolist()  # CartPole: 1 for each step
        """
        if self._history.refusal is not None:
            raise RuntimeError(self._history.refusal)
        return self._history.take() if last is None else self._history.last(last)

    def _count_episodes(self, batch: TensorDictBase) -> None:
        """Of a batch as it was collected, once its frames are counted."""
        if batch.get(TRAJ_IDS, None) is None:
            self._history.refusal = needs_ids()
        elif batch.batch_size.numel():
            ended = self._tally.add(batch, self._envs_in(batch))
            if len(ended):
                version = int(getattr(self, "policy_version", 0))
                self._history.add(ended, self._workers_of(ended.envs), version, self._progress.frames)

    def _envs_in(self, batch: TensorDictBase) -> np.ndarray:
        """The number of each row's env; or of each frame's, where a row is of several."""
        rows = batch.batch_size[:-1].numel()
        return np.arange(self._first_env, self._first_env + rows)

    def _workers_of(self, envs: np.ndarray) -> np.ndarray:
        """Which worker, or node, these envs are in."""
        return np.zeros_like(envs)

    def _episode_stats(self) -> dict[str, Any]:
        mean_return, mean_length = self._history.recent_means()
        return {"episodes": self._history.count, "episode_return": mean_return, "episode_length": mean_length}

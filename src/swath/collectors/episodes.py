"""What a collector tells of episodes: which have ended, counted in batches as they come."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDictBase

from swath.collectors.budget import Progress
from swath.collectors.numbers import whole_number
from swath.data.episode_backlog import EpisodeBacklog
from swath.data.episodes import Ended, EpisodeHistory, Episodes, EpisodeTally, Frames, needs_ids
from swath.rollout.delivery import TRAJ_IDS


class TellsOfEpisodes:
    """The part of a collector that counts episodes."""

    #: How far it is.
    _progress: Progress
    #: Of the batch that is being counted: the number of its first env.
    _first_env: int
    #: Whether whole episodes are put together of the batches.
    _assembler: Any

    def _begin_episodes(self) -> None:
        """First of all in a constructor."""
        self._tally = EpisodeTally()
        self._all_episodes = EpisodeHistory()
        self._backlog = EpisodeBacklog(self._tally)

    @property
    def _history(self) -> EpisodeHistory:
        """All that have ended."""
        self._backlog.count(self._tell_of)
        return self._all_episodes

    def episodes(self, last: int | None = None) -> Episodes:
        """Episodes that have ended since the last call; or the ``last`` so many, which does not count as a call.

        Arrays with an entry for each: ``returns``, ``lengths``, ``envs``, ... (see ``Episodes``). An episode is there
        once its last frame was delivered, or is in the replay buffer (of workers that fill it, 50 ms later at most).
        May be called at any time, from any thread.

        >>> from swath.collectors import Collector
        >>> collector = Collector("CartPole-v1", frames_per_batch=200, total_frames=400)
        >>> for batch in collector:
        ...     ended = collector.episodes()
        ...     assert ended.returns.tolist() == ended.lengths.tolist()  # CartPole: 1 for each step
        """
        if last is not None:
            last = whole_number("last", last)
        history = self._history
        if history.refusal is not None:
            raise RuntimeError(history.refusal)
        return history.take() if last is None else history.last(last)

    def _count_episodes(self, batch: TensorDictBase) -> None:
        """Of a batch as it was collected, once its frames are counted."""
        if batch.get(TRAJ_IDS, None) is None:
            self._all_episodes.refusal = needs_ids()
        elif batch.batch_size.numel():
            version = int(getattr(self, "policy_version", 0))
            # Who puts episodes together forgets which ids are of no whole ones: then they are counted before that.
            add = self._backlog.add if self._assembler is None else self._backlog.add_and_count
            add(Frames.of_batch(batch), self._envs_in(batch), self._progress.frames, version, self._tell_of)

    def _tell_of(self, ended: Ended, versions: np.ndarray, frames: np.ndarray) -> None:
        self._all_episodes.add(ended, self._workers_of(ended.envs), versions, frames)

    def _envs_in(self, batch: TensorDictBase) -> np.ndarray:
        """The number of each row's env; or of each frame's, where a row is of several."""
        rows = batch.batch_size[:-1].numel()
        return np.arange(self._first_env, self._first_env + rows)

    def _workers_of(self, envs: np.ndarray) -> np.ndarray:
        """Which worker, or node, these envs are in."""
        return np.zeros_like(envs)

    def _episode_stats(self) -> dict[str, Any]:
        history = self._history
        mean_return, mean_length = history.recent_means()
        return {"episodes": history.count, "episode_return": mean_return, "episode_length": mean_length}

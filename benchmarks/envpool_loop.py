"""EnvPool: CartPole in C++, stepped by threads of its own; the ceiling for envs in Python."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from contenders import Contender, Transitions
from setting import ENV_SEED, Setting


class EnvPoolLoop(Contender):
    """A hand-written loop over its synchronous Gymnasium API.

    After an episode's end, EnvPool ignores an action and returns the first observation instead. Such rows are no
    transitions: they are not counted, and the check does not see them.
    """

    def __init__(self, setting: Setting) -> None:
        import envpool

        self.batches = setting
        self.frames_per_round = setting.frames_per_batch
        self._network = setting.make_network()
        self._stored = Transitions.empty(setting)
        self._real = np.empty((setting.steps_per_batch, setting.num_envs), np.bool_)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bounds of its spaces, as float32
            make: Any = envpool.make
            self._envs = make(setting.env_id, env_type="gymnasium", num_envs=setting.num_envs, seed=ENV_SEED)
            self._obs, _ = self._envs.reset()

    def collect(self, frames: int) -> int:
        delivered = 0
        with torch.no_grad():
            while delivered < frames:
                self._collect_batch()
                delivered += int(self._real.sum())
        return delivered

    def _collect_batch(self) -> None:
        stored, real, envs, network = self._stored, self._real, self._envs, self._network
        obs = self._obs
        for t in range(self.batches.steps_per_batch):
            stored.obs[t] = obs
            actions = network(torch.from_numpy(obs)).argmax(-1).numpy()
            stored.actions[t] = actions
            obs, stored.rewards[t], stored.terminated[t], stored.truncated[t], infos = envs.step(actions)
            stored.next_obs[t] = obs
            real[t] = infos["elapsed_step"] > 0
        self._obs = obs

    def last_batch(self) -> Transitions:
        return self._stored

    def checked(self) -> Iterator[tuple[Transitions, Setting]]:
        for index in range(self.batches.num_envs):
            rows = self._real[:, index]
            data = Transitions(**{name: array[rows, index, None] for name, array in vars(self._stored).items()})
            yield data, Setting(self.batches.env_id, 1, int(rows.sum()))

    def close(self) -> None:
        self._envs.close()

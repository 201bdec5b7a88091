"""What every contender shares: the env factory, the network, the batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import nn

#: Of the networks with seeds 0, 1, 2, ... the first that uses both actions of CartPole. (Seed 0 always pushes left,
#: so that a contender which ignores the network would not be found out.)
NETWORK_SEED = 1
ENV_SEED = 0


@dataclass(frozen=True)
class Setting:
    """One env id, so many of it, stepped so often for one batch."""

    env_id: str
    num_envs: int
    steps_per_batch: int

    @classmethod
    def rounded_up(cls, env_id: str, num_envs: int, frames_per_batch: int) -> Setting:
        """At least ``frames_per_batch`` frames, in whole steps of all envs."""
        return cls(env_id, num_envs, -(-frames_per_batch // num_envs))

    @property
    def frames_per_batch(self) -> int:
        return self.steps_per_batch * self.num_envs

    def make_env(self) -> gymnasium.Env:
        return gymnasium.make(self.env_id)

    @cached_property
    def _spaces(self) -> tuple[spaces.Box, spaces.Space[Any]]:
        env = self.make_env()
        observation_space, action_space = env.observation_space, env.action_space
        env.close()
        if not isinstance(observation_space, spaces.Box):
            raise ValueError(f"{self.env_id}: this benchmark needs Box observations, got {observation_space}")
        if not isinstance(action_space, (spaces.Discrete, spaces.Box)):
            raise ValueError(f"{self.env_id}: this benchmark needs Discrete or Box actions, got {action_space}")
        return observation_space, action_space

    @property
    def obs_space(self) -> spaces.Box:
        return self._spaces[0]

    @property
    def obs_size(self) -> int:
        if len(self.obs_space.shape) != 1:
            raise ValueError(f"{self.env_id}: this needs vector observations, got {self.obs_space}")
        return self.obs_space.shape[0]

    @property
    def discrete(self) -> bool:
        return isinstance(self._spaces[1], spaces.Discrete)

    @property
    def num_outputs(self) -> int:
        action_space = self._spaces[1]
        if isinstance(action_space, spaces.Discrete):
            return int(action_space.n)
        return int(torch.Size(action_space.shape or ()).numel())

    def make_network(self) -> nn.Sequential:
        """The same weights on every call."""
        with torch.random.fork_rng():
            torch.manual_seed(NETWORK_SEED)
            return nn.Sequential(nn.Linear(self.obs_size, 64), nn.ReLU(), nn.Linear(64, self.num_outputs))

    def __str__(self) -> str:
        envs = "env" if self.num_envs == 1 else "envs"
        return f"{self.env_id}, {self.num_envs} {envs}"

"""Envs of other packages for tests: what a user would hand to a collector, and small ones of our own.

Packages are imported where an env is made: a test may run without them, a worker has to import them itself.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np


def gym_env(env_id: str, **kwargs: Any) -> Any:
    from swath.envs import GymEnv

    return GymEnv(env_id, **kwargs)


def pool(task: str, **kwargs: Any) -> Any:
    import envpool

    return envpool.make(task, env_type="gymnasium", **kwargs)


def atari_vector(**kwargs: Any) -> Any:
    from ale_py import AtariVectorEnv

    return AtariVectorEnv("breakout", 3, episodic_life=True, noop_max=10, **kwargs)


def dm_suite(domain: str, task: str, **kwargs: Any) -> Any:
    from dm_control import suite

    return suite.load(domain, task, task_kwargs=kwargs)


def zoo(kind: str, task: str, **kwargs: Any) -> Any:
    import pettingzoo

    return pettingzoo.make(kind, task, **kwargs)


def particles(task: str, parallel: bool, **kwargs: Any) -> Any:
    import importlib

    module = importlib.import_module(f"mpe2.{task}")
    return (module.parallel_env if parallel else module.env)(**kwargs)


def countdown(*, lengths: tuple[int, ...] = (3, 5)) -> Any:
    return _countdown_class()(lengths)


@functools.cache
def _countdown_class() -> type:
    import dm_env
    from dm_env import specs

    class Countdown(dm_env.Environment):
        """Counts steps. Its episodes end after ``lengths`` steps, in turns: terminated the first, then truncated."""

        def __init__(self, lengths: tuple[int, ...]) -> None:
            self._lengths = lengths
            self._episode = -1
            self.actions: list[Any] = []

        def _observation(self) -> dict[str, Any]:
            return {
                "arm": {"angle": np.float32(self._steps), "speed": np.array([self._steps, 1.0])},
                "count": np.array([self._steps], dtype=np.int32),
            }

        def reset(self) -> dm_env.TimeStep:
            self._episode += 1
            self._steps = 0
            return dm_env.restart(self._observation())

        def step(self, action: Any) -> dm_env.TimeStep:
            self.actions.append(action)
            self._steps += 1
            if self._steps < self._lengths[self._episode % len(self._lengths)]:
                return dm_env.transition(0.5, self._observation(), discount=0.9)
            if self._episode % 2 == 0:
                return dm_env.termination(1.0, self._observation())
            return dm_env.truncation(2.0, self._observation(), discount=0.9)

        def observation_spec(self) -> Any:
            return {
                "arm": {
                    "angle": specs.Array((), np.float32, "angle"),
                    "speed": specs.BoundedArray((2,), np.float64, 0.0, 100.0, "speed"),
                },
                "count": specs.Array((1,), np.int32, "count"),
            }

        def action_spec(self) -> Any:
            return {"choice": specs.DiscreteArray(3), "force": specs.BoundedArray((2,), np.float32, -1.0, 1.0)}

        def reward_spec(self) -> Any:
            return specs.Array((), np.float32, "reward")

    return Countdown


def leaving(**kwargs: Any) -> Any:
    return _leaving_class()(**kwargs)


@functools.cache
def _leaving_class() -> type:
    from gymnasium import spaces
    from pettingzoo import ParallelEnv

    class Leaving(ParallelEnv):
        """Agent i leaves after ``lives[i]`` steps, terminated or truncated as ``ends[i]`` says."""

        metadata: ClassVar = {"name": "leaving"}

        def __init__(
            self, lives: tuple[int, ...] = (2, 4, 4), ends: tuple[str, ...] = ("terminated", "terminated", "truncated")
        ) -> None:
            self.possible_agents = [f"scout_{i}" for i in range(len(lives))]
            self._lives = dict(zip(self.possible_agents, lives, strict=True))
            self._ends = dict(zip(self.possible_agents, ends, strict=True))
            self.received: list[dict[str, Any]] = []

        def observation_space(self, agent: str) -> Any:
            return spaces.Dict(
                position=spaces.Box(-100, 100, (2,), np.float32),
                item=spaces.Discrete(4),
                action_mask=spaces.Box(0, 1, (3,), np.int8),
            )

        def action_space(self, agent: str) -> Any:
            return spaces.Discrete(3)

        def _observations(self, agents: list[str]) -> dict[str, Any]:
            return {
                agent: {
                    "position": np.array([self._steps, self.possible_agents.index(agent) + 1], np.float32),
                    "item": self._steps % 4,
                    "action_mask": np.array([1, 0, 1], np.int8),
                }
                for agent in agents
            }

        def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
            self._steps = 0
            self.agents = list(self.possible_agents)
            return self._observations(self.agents), {agent: {} for agent in self.agents}

        def step(self, actions: dict[str, Any]) -> tuple[dict, dict, dict, dict, dict]:
            self.received.append(actions)
            self._steps += 1
            acted = self.agents
            over = {agent: self._steps >= self._lives[agent] for agent in acted}
            self.agents = [agent for agent in acted if not over[agent]]
            return (
                self._observations(acted),
                {agent: float(self._steps) for agent in acted},
                {agent: over[agent] and self._ends[agent] == "terminated" for agent in acted},
                {agent: over[agent] and self._ends[agent] == "truncated" for agent in acted},
                {agent: {} for agent in acted},
            )

    return Leaving

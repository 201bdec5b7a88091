"""Envs that number and check their frames: what is lost, doubled or torn in a replay buffer can be seen."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from swath.envs import GymWrapper

ENV, PID, TICK, EPISODE, CHECK = range(5)
_SIZE = 32


class NumberedEnv(gymnasium.Env):
    """Observation: env, process, tick (of every reset and step), episode, then the same check all over.

    Args:
        gate: a file; in each process, an env goes past ``free_ticks`` only when it is there.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, number: int = 0, longest: int = 40, gate: str | None = None, free_ticks: int = 0) -> None:
        self.observation_space = spaces.Box(-(2**62), 2**62, (_SIZE,), np.int64)
        self.action_space = spaces.Discrete(2)
        self.number, self.longest = number, longest
        self.gate, self.free_ticks = gate, free_ticks
        self.tick = self.episode = 0
        self.rng = np.random.default_rng(number)

    def _observe(self) -> np.ndarray:
        self.tick += 1
        observation = np.empty(_SIZE, dtype=np.int64)
        observation[:CHECK] = self.number, os.getpid(), self.tick, self.episode
        observation[CHECK:] = self.number * 1_000_003 + self.tick * 7919 + self.episode
        return observation

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode += 1
        self.left = int(self.rng.integers(1, self.longest + 1))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.left -= 1
        if self.gate is not None and self.tick >= self.free_ticks:
            self._wait_at_the_gate(self.gate)
        return self._observe(), float(self.tick), self.left == 0, False, {}

    def _wait_at_the_gate(self, gate: str) -> None:
        while not os.path.exists(gate):
            time.sleep(0.001)
        self.gate = None


def make_numbered(number: int = 0, **kwargs: Any) -> GymWrapper:
    return GymWrapper(NumberedEnv(number, **kwargs))


def numbered_envs(count: int, **kwargs: Any) -> list[Any]:
    return [partial(make_numbered, number, **kwargs) for number in range(count)]


def assert_frames_whole(frames: TensorDictBase) -> None:
    """Every frame is of one piece."""
    before, after = frames["observation"], frames["next", "observation"]
    for each in (before, after):
        expected = each[:, ENV] * 1_000_003 + each[:, TICK] * 7919 + each[:, EPISODE]
        assert torch.equal(each[:, CHECK:], expected.unsqueeze(1).expand_as(each[:, CHECK:]))
    assert torch.equal(after[:, TICK], before[:, TICK] + 1)
    assert torch.equal(after[:, :TICK], before[:, :TICK])
    assert torch.equal(after[:, EPISODE], before[:, EPISODE])
    assert torch.equal(frames["next", "reward"].reshape(-1), after[:, TICK].float())


def assert_nothing_lost_or_doubled(buffer: Any, num_envs: int) -> None:
    """Each env's frames follow one another, and an episode that does not go on is marked so."""
    frames = buffer[:]
    assert len(frames) == len(buffer)
    assert_frames_whole(frames)
    who = frames["observation"][:, ENV]
    for env in range(num_envs):
        own = frames[who == env]
        before, after = own["observation"], own["next", "observation"]
        done = own["next", "done"].reshape(-1)
        same_life = before[1:, PID] == after[:-1, PID]
        gap = before[1:, TICK] - after[:-1, TICK]
        assert torch.equal(gap[same_life], done[:-1][same_life].long())
        # Where a worker was started again, the episode that it was in has ended.
        assert done[:-1][~same_life].all()
        lives = before[:, PID].unique_consecutive()
        assert len(lives) == len(lives.unique())
        ids = own["collector", "traj_ids"]
        assert torch.equal(ids[1:] != ids[:-1], done[:-1])


def assert_trajectories_in_one_piece(frames: TensorDictBase) -> None:
    """Frames in the order in which they came: those of a trajectory follow one another, whoever else comes between."""
    ids, ticks = frames["collector", "traj_ids"], frames["observation"][:, TICK]
    done = frames["next", "done"].reshape(-1)
    for traj_id in ids.unique():
        own = ids == traj_id
        assert torch.equal(ticks[own][1:], ticks[own][:-1] + 1), f"trajectory {traj_id} has a hole"
        assert not done[own][:-1].any()
        assert len(frames["observation"][own][:, [ENV, PID, EPISODE]].unique(dim=0)) == 1


def assert_tracks_in_one_piece(buffer: Any, num_envs: int) -> None:
    """Of each env: every trajectory is in one piece, and one that does not go on, for whatever reason, is marked."""
    frames = buffer[:]
    assert_frames_whole(frames)
    assert_trajectories_in_one_piece(frames)
    for env in range(num_envs):
        own = frames[frames["observation"][:, ENV] == env]
        ids, done = own["collector", "traj_ids"], own["next", "done"].reshape(-1)
        assert torch.equal(ids[1:] != ids[:-1], done[:-1]), f"env {env} has an end that is not marked"

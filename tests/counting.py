"""An env of which every number can be foretold, and the plain loop that foretells it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from swath.envs import Composite, EnvBase, GymWrapper, OneHot, Unbounded


class CountingEnv(gymnasium.Env):
    """Episodes of random length, 1 to ``longest``; observation (episode, step, last action, noise)."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (as Gymnasium has it)
    #: Every env has randomness of its own, and every test the same: ``conftest`` counts from 0 again.
    made = 0

    def __init__(self, longest: int = 50) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.longest = longest
        self.episode = 0
        self.np_random = np.random.default_rng(CountingEnv.made)
        CountingEnv.made += 1

    def _observe(self, action: float) -> np.ndarray:
        return np.array([self.episode, self.step_count, action, self.np_random.normal()], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode = 1 if seed is not None else self.episode + 1
        self.step_count = 0
        self.length = int(self.np_random.integers(1, self.longest + 1))
        self.ends_by_itself = bool(self.np_random.integers(2))
        return self._observe(-1.0), {"length": self.length}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.step_count += 1
        over = self.step_count >= self.length
        reward = self.step_count + 0.25 * float(action)
        info = {"length": self.length}
        return (
            self._observe(float(action)),
            reward,
            over and self.ends_by_itself,
            over and not self.ends_by_itself,
            info,
        )


class CountingTensorDictEnv(EnvBase):
    """``CountingEnv``, written as an env of swath on TensorDicts."""

    def __init__(self, longest: int = 50) -> None:
        super().__init__()
        self.inner = CountingEnv(longest)
        self.seed: int | None = None
        self.observation_spec = Composite(observation=Unbounded((4,)))
        self.action_spec = OneHot(3)

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDict:
        observation, _ = self.inner.reset(seed=self.seed)
        self.seed = None
        return TensorDict(observation=torch.from_numpy(observation))

    def _step(self, tensordict: Any) -> TensorDict:
        observation, reward, terminated, truncated, _ = self.inner.step(tensordict["action"].argmax(-1).numpy())
        return TensorDict(
            observation=torch.from_numpy(observation),
            reward=torch.tensor([reward]),
            terminated=torch.tensor([terminated]),
            truncated=torch.tensor([truncated]),
        )

    def _set_seed(self, seed: int) -> None:
        self.seed = seed


def plain_loop(
    envs: list[CountingEnv],
    seeds: list[int],
    policy: nn.Module,
    num_steps: int,
    *,
    batched: bool = True,
    state_shapes: dict[str, tuple[int, ...]] | None = None,
) -> TensorDict:
    """What a collector must deliver, made the slow and obvious way: ``[E, T]``."""
    state_shapes = state_shapes or {}
    num_envs = len(envs)
    observations = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    states = {name: [torch.zeros(shape) for _ in envs] for name, shape in state_shapes.items()}
    next_id = num_envs
    traj_ids = list(range(num_envs))
    rows = []
    for _ in range(num_steps):
        root = TensorDict(
            {"observation": torch.stack([torch.from_numpy(o.copy()) for o in observations])}, batch_size=num_envs
        )
        for name, values in states.items():
            root[name] = torch.stack(values)
        root["done"] = root["terminated"] = root["truncated"] = torch.zeros(num_envs, 1, dtype=torch.bool)
        with torch.no_grad():
            acted = policy(root.clone() if batched else root[0].clone())
        acted = acted if batched else acted.unsqueeze(0)
        root.update(acted.exclude("next"))
        after = {"observation": [], "reward": [], "terminated": [], "truncated": []}
        root["collector", "traj_ids"] = torch.tensor(traj_ids)
        for index, env in enumerate(envs):
            observation, reward, terminated, truncated, _ = env.step(root["action"][index].argmax().numpy())
            after["observation"].append(torch.from_numpy(observation.copy()))
            after["reward"].append(torch.tensor([reward], dtype=torch.float32))
            after["terminated"].append(torch.tensor([terminated]))
            after["truncated"].append(torch.tensor([truncated]))
            over = terminated or truncated
            for name in states:
                states[name][index] = torch.zeros(state_shapes[name]) if over else acted["next", name][index].clone()
            if over:
                observation, _ = env.reset()
                traj_ids[index] = next_id
                next_id += 1
            observations[index] = observation
        root["next"] = TensorDict({k: torch.stack(v) for k, v in after.items()}, batch_size=num_envs)
        root["next", "done"] = root["next", "terminated"] | root["next", "truncated"]
        for name in states:
            root["next", name] = acted["next", name]
        rows.append(root)
    whole: Any = torch.stack(rows, 1)
    return whole


def assert_same(got: TensorDict, expected: TensorDict) -> None:
    """Every key there, every entry equal."""
    assert got.shape == expected.shape
    got_keys, expected_keys = (set(map(str, td.keys(True, True))) for td in (got, expected))
    assert got_keys == expected_keys
    for key in expected.keys(True, True):
        mine, theirs = got.get(key), expected.get(key)
        assert mine.dtype == theirs.dtype, key
        if not torch.equal(mine, theirs):
            env, step, *_ = (mine != theirs).nonzero()[0].tolist()
            raise AssertionError(
                f"{key} differs first in env {env}, step {step}: {mine[env, step]} {theirs[env, step]}"
            )


def make_counting(longest: int = 50) -> EnvBase:
    return GymWrapper(CountingEnv(longest))


def assert_consistent(batches: list[TensorDict]) -> None:
    """What must hold of ``CountingEnv``'s data whoever collected it: batches ``[..., T]`` of frames in order.

    Within a trajectory steps count up by one from 0, roots follow from what was next, and only its last step is done.
    """
    rows: dict[int, list[Any]] = {}
    for batch in batches:
        for row in batch.reshape(-1, batch.shape[-1]) if batch.ndim > 1 else batch.unsqueeze(0):
            for frame_ids in (row["collector", "traj_ids"],):
                for traj_id in frame_ids.unique(sorted=False).tolist():
                    rows.setdefault(traj_id, []).append(row[frame_ids == traj_id])
    for traj_id, pieces in rows.items():
        trajectory: Any = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        observation, after = trajectory["observation"], trajectory["next", "observation"]
        steps = torch.arange(len(trajectory), dtype=torch.float32)
        assert torch.equal(observation[:, 1], steps), (traj_id, observation[:, 1])
        assert torch.equal(after[:, 1], steps + 1), traj_id
        assert torch.equal(observation[1:], after[:-1]), traj_id
        assert len(observation[:, 0].unique()) == 1, traj_id
        taken = trajectory["action"].argmax(-1).to(torch.float32)
        assert torch.equal(after[:, 2], taken), traj_id
        assert torch.equal(trajectory["next", "reward"].squeeze(-1), steps + 1 + 0.25 * taken), traj_id
        done = trajectory["next", "done"].squeeze(-1)
        assert not done[:-1].any(), traj_id
        flags = trajectory["next", "terminated"] | trajectory["next", "truncated"]
        assert torch.equal(flags, trajectory["next", "done"]), traj_id
        assert not trajectory["done"].any()

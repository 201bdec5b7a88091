"""Gymnasium envs for tests of transforms, of short episodes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class FloatsEnv(gymnasium.Env):
    """Several observations of another dtype and shape each; a float64 action in [-2, 4]. It draws as it is seeded."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (as Gymnasium has it)

    def __init__(self, longest: int = 6, action_dtype: Any = np.float64) -> None:
        self.longest = longest
        self.observation_space = spaces.Dict(
            {
                "position": spaces.Box(-np.inf, np.inf, (3,), np.float64),
                "velocity": spaces.Box(-10, 10, (2,), np.float64),
                "image": spaces.Box(0, 255, (2, 4, 3), np.uint8),
                "speed": spaces.Box(-np.inf, np.inf, (1,), np.float32),
            }
        )
        self.action_space = spaces.Box(-2, 4, (2,), action_dtype)

    def _observe(self) -> dict[str, np.ndarray]:
        draw = self.np_random
        return {
            "position": draw.normal(size=3) + self.last,
            "velocity": np.clip(draw.normal(size=2) * 3, -10, 10),
            "image": draw.integers(0, 256, (2, 4, 3)).astype(np.uint8),
            "speed": draw.normal(size=1).astype(np.float32),
        }

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.last = 0.0
        self.left = int(self.np_random.integers(1, self.longest + 1))
        self.ends_by_itself = bool(self.np_random.integers(2))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert action.dtype == self.action_space.dtype, action.dtype
        self.last = float(action.sum())
        self.left -= 1
        over = self.left <= 0
        reward = self.np_random.normal() + self.last
        return self._observe(), reward, over and self.ends_by_itself, over and not self.ends_by_itself, {}


class Foretold(gymnasium.Env):
    """What it gives follows from its number, the step of the episode and the action: one reset more changes nothing."""

    def __init__(self, number: int, kind: str) -> None:
        self.number, self.kind = number, kind
        image = spaces.Box(0, 255, (8, 6, 3), np.uint8)
        vector = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        other = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = {
            "vector": vector,
            "dict": spaces.Dict(observation=vector, other=other),
            "pixels": image,
        }[kind]
        self.action_space = spaces.Discrete(3)
        self.count = 0

    def _observe(self, action: int) -> Any:
        drawn = np.random.default_rng((self.number, self.count, action))
        if self.kind == "pixels":
            return drawn.integers(0, 256, (8, 6, 3), dtype=np.uint8)
        vector = drawn.normal(size=3) * 3
        return vector if self.kind == "vector" else {"observation": vector, "other": drawn.normal(size=2).astype("f4")}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self._observe(0), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        terminated = self.count == 4 + self.number
        truncated = not terminated and self.count == 6
        return self._observe(int(action)), 0.3 * self.count - int(action), terminated, truncated, {}

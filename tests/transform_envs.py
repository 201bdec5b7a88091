"""Gymnasium envs for tests of transforms: of short episodes, each number from the env's own random generator."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class FloatsEnv(gymnasium.Env):
    """Several observations of another dtype and shape each; a float64 action in [-2, 4]."""

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

"""What is counted over an episode: steps, rewards, whether it has just begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from swath.envs.transforms.arguments import require_one_episode
from swath.envs.transforms.base import Transform
from swath.envs.transforms.rows import Rows, Stage
from swath.envs.transforms.specs import Specs
from swath.keys import as_key
from swath.specs import Bounded, Categorical, NestedKey, Unbounded


class StepCounter(Transform):
    """Counts the steps of an episode, and truncates it after ``max_steps``.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=3))
    >>> env.rollout(10)["next", "step_count"].squeeze(-1)
    tensor([1, 2, 3])
    """

    _shown = ("max_steps",)

    def __init__(
        self,
        max_steps: int | None = None,
        truncated_key: str = "truncated",
        step_count_key: str = "step_count",
        update_done: bool = True,
    ) -> None:
        if truncated_key != "truncated" or not update_done:
            raise ValueError("StepCounter: an episode that is too long is truncated and done; it has no other flag")
        super().__init__()
        self.max_steps = max_steps
        self.step_count_key = step_count_key

    @property
    def max_steps(self) -> int | None:
        return self._max_steps

    @max_steps.setter
    def max_steps(self, max_steps: int | None) -> None:
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"StepCounter: max_steps must be at least 1, got {max_steps}")
        self._change("_max_steps", max_steps)

    @property
    def ends_episodes(self) -> bool:
        return self.max_steps is not None

    def transform_specs(self, specs: Specs) -> None:
        shape = (*specs.batch_size, 1)
        most = torch.iinfo(torch.int64).max
        specs.put(as_key(self.step_count_key), Bounded(0, most, shape, torch.int64), "observation")
        if self.max_steps is not None and "truncated" not in specs.done:
            specs.done["truncated"] = Categorical(2, shape, torch.bool)

    def bind(self, rows: Rows) -> Stage:
        kind = _OneStepCount if rows.num_envs == 1 else _StepCounterStage
        return kind(rows, self.step_count_key, self.max_steps)


class _StepCounterStage:
    def __init__(self, rows: Rows, key: str, max_steps: int | None) -> None:
        self._count = rows.new(key, (1,), torch.int64).array
        self._flat = self._count.reshape(-1)
        self._one = np.ones_like(self._count)  # a number would be looked at in each step
        self._truncated = rows.truncated
        self._max_steps = max_steps
        #: So many steps are sure not to be too many.
        self._room = max_steps

    def step(self, env_ids: Sequence[int] | None) -> Sequence[int] | None:
        if env_ids is None:
            np.add(self._count, self._one, self._count)
        else:
            self._flat[env_ids] += 1
        if self._room is None:
            return None
        self._room -= 1
        if self._room > 0:
            return None
        over = np.flatnonzero(self._flat >= self._max_steps).tolist()
        if env_ids is not None:
            over = [env for env in over if env in env_ids]
        self._truncated[over] = True
        self.resume()
        return over

    def reset(self, env_ids: Sequence[int]) -> None:
        self._flat[env_ids] = 0
        self.resume()

    def resume(self) -> None:
        """Other counts were written."""
        if self._max_steps is not None:
            self._room = self._max_steps - int(self._flat.max())


class _OneStepCount:
    """Of one env: Python adds two numbers in a tenth of the time that NumPy takes for two arrays."""

    def __init__(self, rows: Rows, key: str, max_steps: int | None) -> None:
        self._count = _number(rows.new(key, (1,), torch.int64).array)
        self._truncated = rows.truncated
        self._max_steps = max_steps

    def step(self, env_ids: Sequence[int] | None) -> Sequence[int] | None:
        self._count[0] = count = self._count[0] + 1
        if self._max_steps is None or count < self._max_steps:
            return None
        self._truncated[0] = True
        return [0]

    def reset(self, env_ids: Sequence[int]) -> None:
        self._count[0] = 0


def _number(array: np.ndarray) -> Any:
    """The memory of an array of one number, to be read and written at 0."""
    return memoryview(array.reshape(-1))  # type: ignore[arg-type]


class RewardSum(Transform):
    """The sum of an episode's rewards so far.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> env = TransformedEnv(GymEnv("CartPole-v1"), RewardSum())
    >>> env.rollout(3)["next", "episode_reward"].squeeze(-1)
    tensor([1., 2., 3.])
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        reset_keys: Sequence[NestedKey] | None = None,
        *,
        reward_spec: bool = False,
    ) -> None:
        require_one_episode("RewardSum", "reset_keys", reset_keys, None, ["_reset"])
        if reward_spec:
            raise ValueError("RewardSum: reward_spec=True is not supported: sums are observations")
        super().__init__(in_keys, [] if out_keys is None and in_keys is None else out_keys)
        if in_keys is not None and out_keys is None:
            self.out_keys = [_sum_key(key) for key in self.in_keys]

    _keys_are_pairs = False

    def transform_specs(self, specs: Specs) -> None:
        if not self.in_keys:
            self.in_keys = list(specs.reward.keys(True, True))
        if not self.out_keys:
            self.out_keys = [_sum_key(key) for key in self.in_keys]
        if len(self.in_keys) != len(self.out_keys):
            raise ValueError(f"RewardSum: in_keys {self.in_keys} and out_keys {self.out_keys} differ in length")
        for in_key, out_key in self._pairs:
            spec = specs.find(as_key(in_key), self)
            specs.put(as_key(out_key), Unbounded(spec.shape, spec.dtype, spec.device), "observation")

    def bind(self, rows: Rows) -> Stage:
        pairs = []
        for in_key, out_key in self._pairs:
            read = rows[in_key]
            pairs.append((rows.new(out_key, read.tensor.shape[1:], read.tensor.dtype).array, read.array))
        if len(pairs) == 1 and pairs[0][0].size == 1 and pairs[0][0].dtype in (np.float32, np.float64):
            return _OneRewardSum(*pairs[0])
        return _RewardSumStage(pairs)


def _sum_key(key: NestedKey) -> NestedKey:
    *path, name = as_key(key)
    name = f"episode_{name}"
    return (*path, name) if path else name


class _OneRewardSum:
    """Of one env and one reward. A sum in double precision, rounded, is the sum in single precision."""

    def __init__(self, total: np.ndarray, reward: np.ndarray) -> None:
        self._arrays = total, reward
        self._total, self._reward = _number(total), _number(reward)

    def step(self, env_ids: Sequence[int] | None) -> None:
        try:
            self._total[0] += self._reward[0]
        except OverflowError:  # too large for single precision: infinite
            total, reward = self._arrays
            with np.errstate(over="ignore"):
                np.add(total, reward, total)

    def reset(self, env_ids: Sequence[int]) -> None:
        self._total[0] = 0.0


class _RewardSumStage:
    def __init__(self, pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self._pairs = pairs

    def step(self, env_ids: Sequence[int] | None) -> None:
        if env_ids is None:
            for total, reward in self._pairs:
                np.add(total, reward, total)
        else:
            for total, reward in self._pairs:
                total[env_ids] += reward[env_ids]

    def reset(self, env_ids: Sequence[int]) -> None:
        for total, _ in self._pairs:
            total[env_ids] = 0


class InitTracker(Transform):
    """Whether an episode begins with this step: a flag at the root; under ``next`` it is never set.

    >>> from swath.envs import GymEnv, TransformedEnv
    >>> TransformedEnv(GymEnv("CartPole-v1"), InitTracker()).rollout(3)["is_init"].squeeze(-1)
    tensor([ True, False, False])
    """

    def __init__(self, init_key: str = "is_init") -> None:
        if not isinstance(init_key, str):
            raise TypeError(f"InitTracker: init_key must be a string, got {init_key!r}")
        super().__init__()
        self.init_key = init_key

    def transform_specs(self, specs: Specs) -> None:
        key = as_key(self.init_key)
        if specs.kind_of(key) is not None:
            raise KeyError(f"InitTracker: the env has {self.init_key!r} already; give another init_key")
        specs.put(key, Categorical(2, (*specs.batch_size, 1), torch.bool), "observation")

    def bind(self, rows: Rows) -> Stage:
        return _InitTrackerStage(rows.new(self.init_key, (1,), torch.bool).array)


class _InitTrackerStage:
    def __init__(self, flags: np.ndarray) -> None:
        self._flags = flags
        self._is_set = True

    def step(self, env_ids: Sequence[int] | None) -> Any:
        if self._is_set:
            self._flags[slice(None) if env_ids is None else env_ids] = False
            self._is_set = bool(self._flags.any())

    def reset(self, env_ids: Sequence[int]) -> None:
        self._flags[env_ids] = True
        self._is_set = True

    def resume(self) -> None:
        self._is_set = True

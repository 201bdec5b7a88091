"""TorchRL's plain Gymnasium envs, on rows: their gymnasium envs are stepped, and what they give is read as there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from swath.envs.gym import PixelsUnderTheirName
from swath.envs.gym_rows import GymRowEnv, GymStepper
from swath.envs.gym_spaces import ObservationLeaf
from swath.envs.recognising import NotLowered, name_of, require_unchanged
from swath.envs.torchrl_internals import (
    encodes_categorical,
    gives_actions_as_numpy,
    gym_env_of,
    remembers_reading,
    resets_by_itself,
)
from swath.errors import EnvDataError
from swath.keys import show
from swath.rollout.strip import Strip


def rows_of(guests: list[Any], batch_size: tuple[int, ...]) -> GymRowEnv:
    gym_envs = [_plain_gym_env(guest) for guest in guests]
    first = gym_envs[0]
    for env in gym_envs:
        if env.observation_space != first.observation_space or env.action_space != first.action_space:
            raise NotLowered("its envs differ in their spaces")
    categorical = encodes_categorical(guests[0])
    if any(encodes_categorical(guest) != categorical for guest in guests):
        raise NotLowered("its envs differ in how actions are encoded")
    env = LoweredGymEnv(gym_envs, batch_size=batch_size, categorical_action_encoding=categorical)
    env.guests = guests
    return env


class LoweredGymEnv(GymRowEnv):
    """Gymnasium envs of TorchRL's wrappers; what they give is read as those do."""

    guests: Sequence[Any] = ()

    def bind_rows(self, strip: Strip) -> GymStepper:
        return LoweredGymStepper(self, strip)


class LoweredGymStepper(GymStepper):
    """What an env gives is taken where it is as its spaces say; else TorchRL's own methods read it."""

    _env: LoweredGymEnv

    def _take(self, t: int, env: int, result: Any, ended: list[int] | None) -> list[int] | None:
        observation, reward, terminated, truncated, _ = result
        try:
            self._rewards[t * self._num_envs + env] = reward
        except (TypeError, ValueError, OverflowError):
            read = self._env.guests[env].read_reward(0 if reward is None else 0 + reward)
            if read.numel() != 1:
                raise EnvDataError(f"the reward is {reward!r}, not a number") from None
            self._rewards[t * self._num_envs + env] = read.item()
        self._write(t + 1, env, observation)
        if terminated or truncated:
            return self._mark_end(t, env, terminated, truncated, ended)
        return ended

    def _result_can_be_mended(self, result: Any) -> bool:
        self.__dict__.pop("step", None)
        return isinstance(result, tuple) and len(result) == 5

    def _casts_can_mend(self, observation: Any, error: Exception) -> bool:
        return False

    def _write(self, row: int, env: int, observation: Any) -> None:
        try:
            super()._write(row, env, observation)
        except Exception:
            given = dict(observation) if isinstance(observation, dict) else observation
            read = self._env.guests[env].read_obs(given)
            index = row * self._num_envs + env
            for leaf, memory, size in self._leaves:
                value = read[leaf.key[0]]
                if value.shape != leaf.spec.shape or value.dtype != leaf.spec.dtype:
                    raise EnvDataError(
                        f"observation {show(leaf.key)} has shape {tuple(value.shape)} and dtype {value.dtype}, its "
                        f"spec says {tuple(leaf.spec.shape)} and {leaf.spec.dtype}"
                    ) from None
                memory[index * size : (index + 1) * size] = value.reshape(-1).numpy()
                self._learn_cast(leaf, observation)

    def _learn_cast(self, leaf: ObservationLeaf, observation: Any) -> None:
        """From one kind of float to another NumPy casts as torch does, without the detour."""
        value = leaf.pick(observation)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f" and leaf.spec.dtype.is_floating_point:
            self._env.declared_casts[leaf.key] = np.dtype(leaf.space.dtype)
            self.__dict__.pop("step", None)  # the generic step knows about casts


def _plain_gym_env(guest: Any) -> gymnasium.Env:
    if name_of(guest) not in ("GymEnv", "GymWrapper"):
        raise NotLowered(f"{type(guest).__name__} is not known")
    require_unchanged(guest)
    env = gym_env_of(guest)
    if not isinstance(env, gymnasium.Env):
        raise NotLowered(f"it wraps {type(env).__module__}.{type(env).__name__}, not a gymnasium.Env")
    if guest.batch_size:
        raise NotLowered("it is a vector env")
    if guest.info_dict_reader:
        raise NotLowered("it reads its info")
    if not gives_actions_as_numpy(guest):
        raise NotLowered("its actions stay tensors")
    if remembers_reading(guest):
        raise NotLowered("it remembers how to read its first observation and reward (fast_encoding)")
    if resets_by_itself(guest):
        raise NotLowered("it resets by itself")
    for what, space in (("observation", env.observation_space), ("action", env.action_space)):
        if not _is_plain(space):
            raise NotLowered(f"its {what} space is {space}")
    if isinstance(env.action_space, spaces.Dict):
        raise NotLowered("it has several actions")
    if guest.from_pixels:
        env = _with_pixels(env)
    elif isinstance(env.observation_space, spaces.Dict) and "state" in env.observation_space.spaces:
        raise NotLowered("an observation is called 'state', which TorchRL renames")
    return env if guest.wrapper_frame_skip == 1 else _Repeating(env, guest.wrapper_frame_skip)


def _with_pixels(env: gymnasium.Env) -> gymnasium.Env:
    """With the names that TorchRL gives to what Gymnasium renders, and to what was there without it."""
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        return PixelsUnderTheirName(env)
    if "state" in space.spaces and "observation" not in space.spaces:
        return _StateAsObservation(env)
    return env


class _StateAsObservation(gymnasium.ObservationWrapper):
    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Dict(_renamed(env.observation_space))

    def observation(self, observation: Any) -> dict[str, Any]:
        return _renamed(observation)


def _renamed(entries: Any) -> dict[str, Any]:
    return {("observation" if name == "state" else name): value for name, value in entries.items()}


class _Repeating(gymnasium.Wrapper):
    """Repeats each action until an episode ends. Rewards add up as they are: of whichever type, from an integer 0."""

    def __init__(self, env: gymnasium.Env, num: int) -> None:
        super().__init__(env)
        self._num = num

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total: Any = 0
        result: Any = None
        for _ in range(self._num):
            result = self.env.step(action)
            total = total + (0 if result[1] is None else result[1])  # as TorchRL takes it
            if result[2] or result[3]:
                break
        return result[0], total, *result[2:]


def _is_plain(space: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return all(isinstance(own, spaces.Box) for own in space.spaces.values())
    return isinstance(space, spaces.Box) or (isinstance(space, spaces.Discrete) and space.start == 0)

"""Any ``gymnasium.vector.VectorEnv`` as one batched env, in each of its autoreset modes.

======================  ============================================================================================
DISABLED                swath resets the envs that ended, with ``options={"reset_mask": …}``
SAME_STEP               the env resets by itself; the last observation comes in ``info["final_obs"]``
NEXT_STEP               the env resets on the step after the last, and ignores that step's action. That step is no
                        transition: it is a *filler*, reported in ``fillers`` and never delivered
======================  ============================================================================================

Gymnasium's own Sync- and AsyncVectorEnv and ale-py's AtariVectorEnv accept a reset mask in NEXT_STEP mode as well, so
they have no fillers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv

from swath.envs.base import next_seed
from swath.envs.gym_spaces import (
    action_builder,
    action_leaves,
    composite_of,
    dict_nodes,
    observation_leaves,
    require_names,
)
from swath.envs.rows import WrappingEnv
from swath.errors import EnvDataError, EnvError
from swath.keys import show
from swath.rollout.strip import Strip


class VectorEnv(WrappingEnv):
    """A ``gymnasium.vector.VectorEnv`` as an env of batch size ``(num_envs,)``; ``GymWrapper`` makes it too.

    >>> import gymnasium
    >>> env = VectorEnv(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"))
    >>> env.rollout(3)["observation"].shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        env: GymnasiumVectorEnv,
        categorical_action_encoding: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(env, GymnasiumVectorEnv):
            raise TypeError(f"VectorEnv takes a gymnasium.vector.VectorEnv, got {type(env).__name__}")
        super().__init__(batch_size=(env.num_envs,), device=device)
        self.env = env
        self.autoreset_mode = _effective_mode(env)
        self.pending_seeds: list[int | None] | None = None
        self.observation_leaves = observation_leaves(env.single_observation_space, categorical_action_encoding)
        self.action_leaves = action_leaves(env.single_action_space, categorical_action_encoding)
        lead = self.batch_size
        self.observation_spec = composite_of(self.observation_leaves, lead)
        self.full_action_spec = composite_of(self.action_leaves, lead)
        #: Envs whose next step will be a filler (NEXT_STEP only).
        self.awaiting_reset: list[int] = []

    #: One that ended is reset by the next step, or refuses it.
    steps_stay_in_episodes = False

    @property
    def has_fillers(self) -> bool:
        return self.autoreset_mode is AutoresetMode.NEXT_STEP

    @property
    def resets_single_envs(self) -> bool:
        return self.autoreset_mode is AutoresetMode.DISABLED

    def bind_rows(self, strip: Strip) -> VectorStepper:
        return VectorStepper(self, strip)

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int | None:
        if seed is None:
            return None
        self.pending_seeds = []
        for _ in range(self.env.num_envs):
            self.pending_seeds.append(int(seed))
            seed = seed if static_seed else next_seed(int(seed))
        return seed

    def as_seed(self, seeds: list[int | None] | None) -> Any:
        """Seeds as this env's reset takes them: only Gymnasium's own promise to take one for each env."""
        if seeds is None or isinstance(self.env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
            return seeds
        if _is_atari(self.env):
            return np.array(seeds) % 2**31
        return seeds[0]

    def _close(self) -> None:
        super()._close()
        if _is_atari(self.env):
            self.env.ale = None  # type: ignore[attr-defined] # its threads end when nobody refers to it any more

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env}, batch_size={tuple(self.batch_size)})"


def _effective_mode(env: GymnasiumVectorEnv) -> AutoresetMode:
    # AtariVectorEnv writes its mode into metadata that all vector envs share; its own attribute is right.
    mode = env.autoreset_mode if _is_atari(env) else env.metadata.get("autoreset_mode")  # type: ignore[attr-defined]
    if mode is None:
        raise EnvError(
            f"{env}: metadata['autoreset_mode'] is missing, so it cannot be told which of its steps are transitions; "
            "set it to a gymnasium.vector.AutoresetMode"
        )
    mode = AutoresetMode(mode)
    takes_mask = type(env) is SyncVectorEnv or (type(env) is AsyncVectorEnv and env.shared_memory) or _is_atari(env)
    return AutoresetMode.DISABLED if mode is AutoresetMode.NEXT_STEP and takes_mask else mode


def _is_atari(env: GymnasiumVectorEnv) -> bool:
    """Whether it is ale-py's own, which takes a seed for each env and a reset mask in each mode."""
    kind = getattr(sys.modules.get("ale_py.vector_env"), "AtariVectorEnv", None)
    if kind is None or type(env) is not kind:
        return False
    if env.batch_size != env.num_envs:  # type: ignore[attr-defined]
        raise EnvError(
            f"AtariVectorEnv with batch_size={env.batch_size} and {env.num_envs} envs steps some of its envs only; "  # type: ignore[attr-defined]
            "make it without batch_size"
        )
    return True


class VectorStepper:
    """``VectorEnv`` bound to a strip."""

    def __init__(self, env: VectorEnv, strip: Strip) -> None:
        self._env = env
        self._strip = strip
        self._num_envs = strip.num_envs
        self._mode = env.autoreset_mode
        #: (step, envs) whose row of that step is no transition.
        self.fillers: list[tuple[int, list[int]]] | None = [] if env.has_fillers else None
        self._columns = [(leaf, strip.carried[leaf.key].in_numpy) for leaf in env.observation_leaves]
        self._action_rows = [(leaf.decode, strip.outputs[leaf.key].in_numpy) for leaf in env.action_leaves]
        self._dict_nodes = dict_nodes(env.env.single_observation_space)
        self._build = action_builder(env.env.single_action_space)
        self._batched_action = len(env.action_leaves) == 1 and env.action_leaves[0].path == ()
        self._rewards = strip.outcomes["reward",].in_numpy
        #: What the env reset by itself in the last step.
        self._fresh: Any = None

    def reset(self, row: int, env_ids: Sequence[int], **kwargs: Any) -> None:
        # What the env reset by itself in the step just taken; a reset asked for at any other time finds nothing here.
        fresh, self._fresh = self._fresh, None
        if self._mode is AutoresetMode.NEXT_STEP and fresh is not None:
            return  # the filler step wrote the first observations already
        if fresh is not None:
            observation = fresh
        elif len(env_ids) == self._num_envs:
            seeds, self._env.pending_seeds = self._env.pending_seeds, None
            observation, _ = self._env.env.reset(seed=self._env.as_seed(seeds), **kwargs)
            self._env.awaiting_reset = []
        elif self._env.resets_single_envs:
            mask = np.zeros(self._num_envs, dtype=np.bool_)
            mask[list(env_ids)] = True
            observation, _ = self._env.env.reset(options={**kwargs.pop("options", {}), "reset_mask": mask})
        else:
            raise EnvError(
                f"{self._env}: its envs cannot be reset one by one in mode {self._mode.name}; make it with "
                "AutoresetMode.DISABLED"
            )
        self._write(row, observation, list(env_ids))

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        if env_ids is not None:
            raise EnvError(f"{self._env} cannot step some of its envs only")
        observation, reward, terminated, truncated, info = self._env.env.step(self._actions(t))
        self._write(t + 1, observation, None)
        self._rewards[t, :, 0] = reward
        ended = terminated | truncated
        if self.fillers is not None:
            return self._step_with_fillers(t, terminated, truncated, ended)
        self._fresh = None
        if not ended.any():
            return None
        self._strip.terminated[t] = terminated
        self._strip.truncated[t] = truncated
        env_ids = np.flatnonzero(ended).tolist()
        if self._mode is AutoresetMode.SAME_STEP:
            self._fresh = observation
            self._write_last(t + 1, env_ids, info)
        return env_ids

    def _step_with_fillers(
        self, t: int, terminated: np.ndarray, truncated: np.ndarray, ended: np.ndarray
    ) -> list[int] | None:
        """NEXT_STEP: an episode's boundary is the filler after its last step."""
        assert self.fillers is not None
        reset_now, self._env.awaiting_reset = self._env.awaiting_reset, []
        if ended.any():
            self._strip.terminated[t] = terminated
            self._strip.truncated[t] = truncated
            self._env.awaiting_reset = np.flatnonzero(ended).tolist()
        if not reset_now:
            return None
        self._fresh = True
        self.fillers.append((t, reset_now))
        return reset_now

    def _actions(self, t: int) -> Any:
        decoded = [decode(array[t]) for decode, array in self._action_rows]
        if self._batched_action:
            return np.asarray(decoded[0], dtype=self._env.env.action_space.dtype)
        actions = [self._build(decoded, env) for env in range(self._num_envs)]
        return _batch(actions)

    def _write(self, row: int, observation: Any, env_ids: list[int] | None) -> None:
        if self._dict_nodes:
            try:
                require_names(observation, self._dict_nodes)
            except KeyError as error:
                raise EnvDataError(f"{self._env}: {error.args[0]}") from None
        for leaf, array in self._columns:
            value = leaf.pick(observation)
            if leaf.prepare is not None and isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)):
                value = np.stack([leaf.prepare(entry) for entry in value]).reshape(array.shape[1:])
            if value.shape != array.shape[1:] or value.dtype != array.dtype:
                raise EnvDataError(
                    f"{self._env}: observation {show(leaf.key)} has shape {value.shape} and dtype {value.dtype}, its "
                    f"space says {array.shape[1:]} and {array.dtype}"
                )
            if env_ids is None:
                array[row] = value
            else:
                array[row, env_ids] = value[env_ids]

    def _write_last(self, row: int, env_ids: list[int], info: dict[str, Any]) -> None:
        """SAME_STEP: put the episodes' true last observations where the reset ones were written."""
        if "final_obs" not in info:
            raise EnvError(
                f"{self._env} is in mode SAME_STEP, but its info has no 'final_obs': the last observation of an "
                "episode is lost"
            )
        last = info["final_obs"]
        for leaf, array in self._columns:
            for env in env_ids:
                # Either one observation per env, or one tree whose leaves are per env.
                value = leaf.pick(last)[env] if isinstance(last, dict) else leaf.pick(last[env])
                value = value if leaf.prepare is None else leaf.prepare(value)
                array[row, env] = np.asarray(value).reshape(array.shape[2:])


def _batch(actions: list[Any]) -> Any:
    if isinstance(actions[0], dict):
        return {name: _batch([action[name] for action in actions]) for name in actions[0]}
    if isinstance(actions[0], tuple):
        return tuple(_batch([action[i] for action in actions]) for i in range(len(actions[0])))
    return np.stack([np.asarray(action) for action in actions])

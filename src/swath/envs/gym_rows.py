"""Gymnasium envs of a kind, stepped one after the other in this process, on rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from swath.envs.base import next_seed
from swath.envs.gym_infos import InfoKeys, describe, info_leaves
from swath.envs.gym_spaces import (
    ObservationLeaf,
    action_builder,
    action_leaves,
    composite_of,
    dict_nodes,
    observation_leaves,
    require_names,
)
from swath.envs.rows import RowEnv
from swath.errors import EnvDataError, add_note
from swath.keys import show
from swath.rollout.strip import Strip
from swath.states import count, mismatch
from swath.warn import warn_user


class GymRowEnv(RowEnv):
    """One or several ``gymnasium.Env`` of the same spaces as one env; ``GymEnv`` and ``SerialEnv`` are made of it."""

    reads_roots = False

    def __init__(
        self,
        gym_envs: Sequence[gymnasium.Env],
        *,
        batch_size: Sequence[int],
        device: torch.device | str | None = None,
        categorical_action_encoding: bool = False,
        info_keys: InfoKeys = (),
    ) -> None:
        super().__init__(batch_size=batch_size, device=device)
        self.gym_envs = list(gym_envs)
        self.categorical_action_encoding = categorical_action_encoding
        #: Seeds that the next reset of each env will use.
        self.pending_seeds: list[int | None] = [None] * len(self.gym_envs)
        first = self.gym_envs[0]
        self.observation_leaves = observation_leaves(first.observation_space, categorical_action_encoding)
        self.action_leaves = action_leaves(first.action_space, categorical_action_encoding)
        self.info_leaves = info_leaves(first, info_keys)
        lead = self.batch_size
        self.observation_spec = composite_of(self.observation_leaves, lead)
        for leaf in self.info_leaves:
            self.observation_spec[leaf.key] = leaf.spec.expand(*lead, *leaf.spec.shape)
        self.full_action_spec = composite_of(self.action_leaves, lead)
        #: Casts that the first reset showed to be needed, by leaf key (see ``GymStepper``).
        self.declared_casts: dict[tuple[str, ...], np.dtype] = {}
        self.casts_are_settled = False

    def plan(self) -> str:
        if self.has_steps_of_its_own:
            return super().plan()
        return f"{count(len(self.gym_envs), 'Gymnasium env')} stepped on rows"

    def bind_rows(self, strip: Strip) -> GymStepper:
        return GymStepper(self, strip)

    def _set_seed(self, seed: int) -> None:
        for index in range(len(self.gym_envs)):
            self.pending_seeds[index] = seed
            seed = next_seed(seed)

    def set_seed(self, seed: int | None, static_seed: bool = False) -> int | None:
        if seed is None:
            return None
        if static_seed:
            self.pending_seeds = [int(seed)] * len(self.gym_envs)
            return seed
        self._set_seed(int(seed))
        for _ in self.gym_envs:
            seed = next_seed(int(seed))
        return seed

    def state_dict(self) -> dict[str, Any]:
        """The envs' random generators; what an episode is in the middle of is the env's own and cannot be saved."""
        states = [env.unwrapped.np_random.bit_generator.state for env in self.gym_envs]
        return {"np_random": states, "pending_seeds": list(self.pending_seeds)}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        is_state = isinstance(state_dict, Mapping)
        states = state_dict.get("np_random", []) if is_state else []
        if len(states) != len(self.gym_envs):
            if strict or not is_state:
                raise mismatch(
                    type(self).__name__, state_dict, f"the state of {count(len(self.gym_envs), 'Gymnasium env')}"
                )
            return
        for env, state in zip(self.gym_envs, states, strict=True):
            env.unwrapped.np_random.bit_generator.state = state
        self.pending_seeds = list(state_dict["pending_seeds"])

    def _close(self) -> None:
        for env in self.gym_envs:
            env.close()


class GymStepper:
    """``GymRowEnv`` bound to a strip. What differs between envs is resolved here, so that ``step`` only steps."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, env: GymRowEnv, strip: Strip) -> None:
        self._env = env
        self._strip = strip
        self._num_envs = strip.num_envs
        self._all = range(strip.num_envs)
        self._steps = [gym_env.step for gym_env in env.gym_envs]
        self._action_rows = [list(strip.outputs[leaf.key].in_numpy) for leaf in env.action_leaves]
        self._decoders = [leaf.decode for leaf in env.action_leaves]
        self._dict_nodes = dict_nodes(env.gym_envs[0].observation_space)
        self._build = action_builder(env.gym_envs[0].action_space)
        self._rewards: Any = strip.outcomes["reward",].flat
        self._infos = [(leaf, strip.carried[leaf.key].in_numpy) for leaf in env.info_leaves]
        # (leaf, flat memory, entries per env)
        self._leaves: list[tuple[ObservationLeaf, Any, int]] = [
            (leaf, strip.carried[leaf.key].flat, leaf.spec.shape.numel()) for leaf in env.observation_leaves
        ]
        simple = len(self._leaves) == 1 and not self._infos and len(self._decoders) == 1
        leaf = env.observation_leaves[0]
        if simple and leaf.prepare is None and leaf.path == () and not env.declared_casts:
            self.step = self._step_vector_observation

    def _step_vector_observation(self, t: int, env_ids: Sequence[int] | None = None) -> list[int] | None:
        """``step`` for the commonest envs: the observation is one vector, the action one leaf."""
        steps, rewards = self._steps, self._rewards
        _, memory, size = self._leaves[0]
        actions = self._decoders[0](self._action_rows[0][t])
        first = t * self._num_envs
        offset = (first + self._num_envs) * size
        ended = None
        env = 0
        result = None
        try:
            for env in self._all if env_ids is None else env_ids:
                result = None
                result = steps[env](actions[env])
                observation, rewards[first + env], terminated, truncated, _ = result
                start = offset + env * size
                memory[start : start + size] = observation
                if terminated or truncated:
                    ended = self._mark_end(t, env, terminated, truncated, ended)
        except Exception as error:
            if not self._result_can_be_mended(result):
                self._explain(error, "step", env, result)
            ended = self._take(t, env, result, ended)
            rest = [other for other in (self._all if env_ids is None else env_ids) if other > env]
            ended = [*(ended or ()), *(self.step(t, rest) or ())] or None
        return ended

    def step(self, t: int, env_ids: Sequence[int] | None = None) -> list[int] | None:
        decoded = [decode(rows[t]) for decode, rows in zip(self._decoders, self._action_rows, strict=True)]
        ended = None
        env = 0
        result = None
        try:
            for env in self._all if env_ids is None else env_ids:
                result = None
                result = self._steps[env](self._build(decoded, env))
                ended = self._take(t, env, result, ended)
        except Exception as error:
            self._explain(error, "step", env, result)
        return ended

    def _take(self, t: int, env: int, result: Any, ended: list[int] | None) -> list[int] | None:
        """Write what an env's step returned."""
        observation, reward, terminated, truncated, info = result
        if np.ndim(reward):  # one number in an array is a number
            reward = np.asarray(reward).item()
        self._rewards[t * self._num_envs + env] = reward
        self._write(t + 1, env, observation)
        for leaf, array in self._infos:
            leaf.write(array, t + 1, env, info, is_step=True)
        if terminated or truncated:
            return self._mark_end(t, env, terminated, truncated, ended)
        return ended

    def _result_can_be_mended(self, result: Any) -> bool:
        """Whether the reward is an array of one number, which the generic step takes; it is used from then on."""
        mendable = isinstance(result, tuple) and len(result) == 5 and np.ndim(result[1]) > 0 and np.size(result[1]) == 1
        if mendable:
            self.__dict__.pop("step", None)
        return mendable

    def _mark_end(self, t: int, env: int, terminated: Any, truncated: Any, ended: list[int] | None) -> list[int]:
        self._strip.terminated[t, env] = terminated
        self._strip.truncated[t, env] = truncated
        if ended is None:
            return [env]
        ended.append(env)
        return ended

    def reset(self, row: int, env_ids: Sequence[int], *, list_of_kwargs: Any = None, **kwargs: Any) -> None:
        env = 0
        result = observation = None
        seeds = self._env.pending_seeds
        try:
            for env in env_ids:
                gym_env = self._env.gym_envs[env]
                result = observation = None
                own = kwargs if list_of_kwargs is None else {**kwargs, **list_of_kwargs[env]}
                if seeds[env] is None:
                    result = gym_env.reset(**own)
                else:
                    result = gym_env.reset(seed=seeds[env], **own)
                    seeds[env] = None
                observation, info = result
                self._write(row, env, observation)
                for leaf, array in self._infos:
                    leaf.write(array, row, env, info, is_step=False)
        except Exception as error:
            if not self._casts_can_mend(observation, error):
                self._explain(error, "reset", env, result)
            self._write(row, env, observation)
            rest = list(env_ids)[list(env_ids).index(env) + 1 :]
            self.reset(row, rest, list_of_kwargs=list_of_kwargs, **kwargs)
        self._env.casts_are_settled = True

    def _write(self, row: int, env: int, observation: Any) -> None:
        index = row * self._num_envs + env
        casts = self._env.declared_casts
        if self._dict_nodes:
            require_names(observation, self._dict_nodes)
        for leaf, memory, size in self._leaves:
            value = leaf.pick(observation)
            if leaf.key in casts:
                value = np.asarray(value).astype(casts[leaf.key])
            if leaf.prepare is not None:
                value = leaf.prepare(value)
            memory[index * size : (index + 1) * size] = value

    # -- what went wrong -----------------------------------------------------------------------------------------

    def _casts_can_mend(self, observation: Any, error: Exception) -> bool:
        """Whether an env's dtype differs from what its space declares; said once, then cast as declared.

        Only in the first reset: an env that changes its dtype later has a bug.
        """
        if (
            self._env.casts_are_settled
            or self._env.declared_casts
            or observation is None
            or not isinstance(error, (ValueError, TypeError))
        ):
            return False
        casts = {}
        for leaf in self._env.observation_leaves:
            if not isinstance(leaf.space, (spaces.Box, spaces.MultiBinary)):
                continue
            try:
                value = np.asarray(leaf.pick(observation))
            except Exception:
                return False
            if value.shape != leaf.space.shape or value.dtype.kind not in "fiub":
                return False
            if value.dtype != leaf.space.dtype:
                casts[leaf.key] = leaf.space.dtype
                warn_user(
                    f"{describe(self._env.gym_envs[0])}: observation {show(leaf.key)} is {value.dtype}, its space says "
                    f"{leaf.space.dtype}; every observation will be cast to {leaf.space.dtype}. To silence this, let "
                    "the env return what its space declares"
                )
        if not casts:
            return False
        self._env.declared_casts = casts
        self.__dict__.pop("step", None)  # the generic step knows about casts
        return True

    def _explain(self, error: Exception, call: str, env: int, result: Any) -> NoReturn:
        """Raise ``error`` with the env named: as it is if the env raised it, else as an ``EnvDataError``.

        ``result`` is what the call returned, None if it did not.
        """
        who = f"env {env + self._env.first_index} ({describe(self._env.gym_envs[env])})"
        traceback = error.__traceback__
        raised_inside_env = False
        while traceback is not None:
            raised_inside_env |= not traceback.tb_frame.f_globals.get("__name__", "").startswith("swath.envs.gym")
            traceback = traceback.tb_next
        if raised_inside_env:
            add_note(error, f"swath: raised by {who} in its {call}")
            raise error
        expected = ("observation", "reward", "terminated", "truncated", "info")
        if call == "reset":
            expected = ("observation", "info")
        if not isinstance(result, tuple) or len(result) != len(expected):
            given = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            problem = f"{call}() must return ({', '.join(expected)}), it returned {given}"
        else:
            said = error.args[0] if isinstance(error, KeyError) and error.args else error
            problem = self._find_problem(result[0]) or str(said)
            if call == "step" and not isinstance(result[1], (int, float, np.number, np.bool_)):
                problem = f"the reward is {result[1]!r}, not a number"
        raise EnvDataError(f"{who}, {call}: {problem}") from error

    def _find_problem(self, observation: Any) -> str | None:
        for leaf in self._env.observation_leaves:
            problem = _leaf_problem(leaf, observation)
            if problem:
                return f"observation {show(leaf.key)} {problem}"
        return None


def _leaf_problem(leaf: ObservationLeaf, observation: Any) -> str | None:
    try:
        value = leaf.pick(observation)
    except (KeyError, IndexError, TypeError):
        return f"is missing from what the env returned ({type(observation).__name__})"
    if isinstance(leaf.space, (spaces.Discrete, spaces.MultiDiscrete)):
        return None if leaf.space.contains(value) else f"is {value!r}, which is not in {leaf.space}"
    if not isinstance(value, (np.ndarray, np.generic)):
        return f"is a {type(value).__name__}, not a NumPy array of {leaf.space.dtype}"
    shape, dtype = value.shape, value.dtype
    if shape != leaf.space.shape:
        return f"has shape {shape}, its space says {leaf.space.shape}"
    if dtype != leaf.space.dtype:
        return f"has dtype {dtype}, its space says {leaf.space.dtype}"
    return None

"""dm_control, and any other ``dm_env.Environment``, on rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from swath.envs.gym_spaces import RESERVED_KEYS, composite_of, torch_dtype
from swath.envs.known import import_extra
from swath.envs.rows import WrappingEnv
from swath.errors import EnvDataError, EnvError, did_you_mean
from swath.keys import Key, show
from swath.rollout.strip import Strip
from swath.specs import Bounded, Categorical, OneHot, Spec, Unbounded


@dataclass(frozen=True)
class _Leaf:
    """One array of a nested spec: its key in the data, and where it stands in what the env gives or takes."""

    key: Key
    path: tuple[str | int, ...]
    array_spec: Any
    spec: Spec

    def pick(self, value: Any) -> Any:
        for part in self.path:
            value = value[part]
        return value


class DMControlWrapper(WrappingEnv):
    """A ``dm_env.Environment`` that you made.

    Each entry of its observation is a key, nested as it is; dtypes (usually float64) and shapes are what its specs say,
    also the reward's dtype. An episode's last step with a discount of zero is terminated, with any other truncated.

    Args:
        env: the env.
        categorical_action_encoding: discrete actions as integers instead of one-hot vectors.

    >>> env = DMControlWrapper(suite.load("cartpole", "balance"))  # doctest: +SKIP
    >>> env.rollout(3)["position"].shape  # doctest: +SKIP
    torch.Size([3, 3])
    """

    def __init__(
        self,
        env: Any,
        categorical_action_encoding: bool = False,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        for method in ("observation_spec", "action_spec", "reward_spec"):
            if not hasattr(env, method):
                raise TypeError(f"DMControlWrapper takes a dm_env.Environment, got {type(env).__name__}")
        super().__init__(device=device)
        self.env = env
        categorical = categorical_action_encoding
        observation, action = env.observation_spec(), env.action_spec()
        flat = not isinstance(observation, (Mapping, list, tuple))
        self.observation_leaves = _leaves(observation, ("observation",) if flat else (), (), categorical)
        for leaf in self.observation_leaves:
            if leaf.key[0] in RESERVED_KEYS:
                raise ValueError(
                    f"{self}: the observation has an entry {leaf.key[0]!r}, which is the name of something else in the "
                    "data; rename it"
                )
        self.action_leaves = _leaves(action, ("action",), (), categorical)
        if not self.action_leaves:
            raise EnvError(f"{self} takes no action")
        self.observation_spec = composite_of(self.observation_leaves, self.batch_size)
        self.full_action_spec = composite_of(self.action_leaves, self.batch_size)
        reward = env.reward_spec()
        if not hasattr(reward, "dtype"):
            raise EnvError(f"{self}: its reward_spec is a {type(reward).__name__}, not one array")
        self.reward_spec = Unbounded(reward.shape or (1,), torch_dtype(reward.dtype, "the reward"))

    def bind_rows(self, strip: Strip) -> DMStepper:
        return DMStepper(self, strip)

    def _set_seed(self, seed: int) -> None:
        """Seed the generator that the env has: the task's in the suite, the env's own in ``composer``."""
        generator: Any = getattr(self.env, "random_state", None)
        if generator is None:
            generator = getattr(getattr(self.env, "task", None), "random", None)
        if not hasattr(generator, "seed"):
            raise EnvError(
                f"{self} has no generator that could be seeded (neither env.random_state nor env.task.random); give "
                "the seed where the env is made"
            )
        generator.seed(seed)

    def _close(self) -> None:
        super()._close()
        physics: Any = getattr(self.env, "physics", None)
        if hasattr(type(physics), "free"):  # not one that the env's close has freed already
            physics.free()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(getattr(self.env, 'task', self.env)).__name__})"


class DMControlEnv(DMControlWrapper):
    """A task of the dm_control suite by its names; other keywords go to ``dm_control.suite.load``.

    >>> DMControlEnv("cartpole", "balance").rollout(3)["velocity"].dtype  # doctest: +SKIP
    torch.float64
    """

    def __init__(
        self,
        domain: str,
        task: str,
        categorical_action_encoding: bool = False,
        *,
        device: torch.device | str | None = None,
        **load_kwargs: Any,
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no display, which only rendering needs
            suite = import_extra("dm_control.suite", "dm-control", f"DMControlEnv({domain!r}, {task!r})")
        if (domain, task) not in suite.ALL_TASKS:
            known = [f"{d}, {t}" for d, t in suite.ALL_TASKS]
            hint = did_you_mean(f"{domain}, {task}", known, "; see dm_control.suite.ALL_TASKS")
            raise ValueError(f"dm_control's suite has no task '{domain}, {task}'{hint}")
        super().__init__(suite.load(domain, task, **load_kwargs), categorical_action_encoding, device=device)


class DMStepper:
    """``DMControlWrapper`` bound to a strip."""

    fillers: list[tuple[int, list[int]]] | None = None

    def __init__(self, env: DMControlWrapper, strip: Strip) -> None:
        self._env = env
        self._strip = strip
        self._observations = [(leaf, strip.carried[leaf.key].in_numpy) for leaf in env.observation_leaves]
        self._actions = [(leaf, strip.outputs[leaf.key].in_numpy) for leaf in env.action_leaves]
        self._action_tree = env.env.action_spec()
        self._rewards = strip.outcomes["reward",].in_numpy

    def reset(self, row: int, env_ids: list[int], **kwargs: Any) -> None:
        if kwargs:
            raise TypeError(f"{self._env}: a dm_env.Environment is reset without arguments, got {sorted(kwargs)}")
        self._write(row, self._env.env.reset().observation)

    def step(self, t: int, env_ids: list[int] | None = None) -> list[int] | None:
        values = [_decode(leaf, array[t, 0]) for leaf, array in self._actions]
        step = self._env.env.step(_build(self._action_tree, values))
        self._write(t + 1, step.observation)
        self._rewards[t, 0] = step.reward
        if not step.last():
            return None
        terminated = bool(np.all(np.asarray(step.discount) == 0))
        self._strip.terminated[t, 0] = terminated
        self._strip.truncated[t, 0] = not terminated
        return [0]

    def _write(self, row: int, observation: Any) -> None:
        for leaf, array in self._observations:
            value = np.asarray(leaf.pick(observation))
            if value.shape != array.shape[2:] or not np.can_cast(value.dtype, array.dtype, "same_kind"):
                raise EnvDataError(
                    f"{self._env}: observation {show(leaf.key)} has shape {value.shape} and dtype {value.dtype}, its "
                    f"spec says {array.shape[2:]} and {array.dtype}"
                )
            array[row, 0] = value


def _leaves(node: Any, key: Key, path: tuple[str | int, ...], categorical: bool) -> list[_Leaf]:
    """The arrays of a nested spec; a list's entries are called "0", "1", …"""
    if isinstance(node, Mapping):
        items = [(str(name), name, sub) for name, sub in node.items()]
    elif isinstance(node, (list, tuple)):
        key = key or ("observation",)
        items = [(str(i), i, sub) for i, sub in enumerate(node)]
    else:
        return [_Leaf(key, path, node, _spec(node, categorical))]
    return [leaf for name, part, sub in items for leaf in _leaves(sub, (*key, name), (*path, part), categorical)]


def _spec(array: Any, categorical: bool) -> Spec:
    if hasattr(array, "num_values"):
        return Categorical(array.num_values) if categorical else OneHot(array.num_values)
    dtype = torch_dtype(array.dtype, f"the spec {array.name!r}")
    if not hasattr(array, "minimum"):
        return Unbounded(array.shape, dtype)
    return Bounded(np.array(array.minimum), np.array(array.maximum), array.shape, dtype)  # copies: theirs are read-only


def _decode(leaf: _Leaf, value: np.ndarray) -> Any:
    if isinstance(leaf.spec, OneHot):
        value = np.asarray(value.argmax())
    return value.astype(leaf.array_spec.dtype)  # always a copy: an env may keep it, and the row is written again


def _build(node: Any, values: list[Any]) -> Any:
    """Arrays put together as the spec ``node`` has them."""
    if isinstance(node, Mapping):
        return {name: _build(sub, values) for name, sub in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(_build(sub, values) for sub in node)
    return values.pop(0)


__all__ = ["DMControlEnv", "DMControlWrapper"]

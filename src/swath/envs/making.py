"""From whatever says which env is meant to an env."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from swath.envs.base import EnvBase
from swath.envs.gym import GymEnv, GymWrapper
from swath.envs.known import wrap_known


def make_env(create_env_fn: Any, kwargs: Mapping[str, Any] | None = None) -> EnvBase:
    """The env that ``create_env_fn`` is or makes; Gymnasium's own are wrapped."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        if len(create_env_fn) != 1:
            raise ValueError(f"a Collector has one env, got {len(create_env_fn)}; put several into SerialEnv(n, fn)")
        create_env_fn = create_env_fn[0]
    if isinstance(create_env_fn, str):
        return GymEnv(create_env_fn, **(kwargs or {}))
    create_env_fn = wrap_known(create_env_fn)
    ready = isinstance(create_env_fn, (EnvBase, gymnasium.Env, gymnasium.vector.VectorEnv))
    if ready and kwargs:
        raise RuntimeError("create_env_kwargs are for a function that makes the env; this env is made already")
    if not ready and not callable(create_env_fn):
        raise TypeError(
            f"create_env_fn must be an env or a function that makes one, got {type(create_env_fn).__name__}"
        )
    env = create_env_fn if ready else wrap_known(create_env_fn(**(kwargs or {})))
    if isinstance(env, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        env = GymWrapper(env)
    if not isinstance(env, EnvBase):
        raise TypeError(f"create_env_fn made a {type(env).__name__}, which is no env; wrap it with GymWrapper")
    return env


def resolve_factories(
    who: str,
    num_envs: int,
    create_env_fn: Any,
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
) -> tuple[list[Any], list[Mapping[str, Any]]]:
    """A factory and keywords for each env."""
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"{who}: the number of envs must be a positive integer, got {num_envs!r}")
    if callable(create_env_fn) or isinstance(create_env_fn, str):
        create_env_fn = [create_env_fn] * num_envs
    factories: list[Any] = list(create_env_fn)
    kwargs = create_env_kwargs or {}
    all_kwargs = [kwargs] * num_envs if isinstance(kwargs, Mapping) else list(kwargs)
    for name, given in (("factories", factories), ("create_env_kwargs", all_kwargs)):
        if len(given) != num_envs:
            raise RuntimeError(f"{who}: {num_envs} envs were asked for, but {len(given)} {name} given")
    return factories, all_kwargs

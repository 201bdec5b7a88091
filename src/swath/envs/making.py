"""From whatever says which env is meant to an env."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import cloudpickle
import gymnasium
from torch import nn

from swath.envs.base import EnvBase
from swath.envs.guest import GuestEnv, is_guest
from swath.envs.gym import GymEnv, GymWrapper
from swath.envs.known import wrap_known, wrapper_of
from swath.hints import unknown_arguments
from swath.process.pickling import dumps

#: Arguments of TorchRL's batches of envs about processes that there are not here, or memory that is always as it is.
OF_BUFFERS = ("use_buffers", "shared_memory", "memmap", "share_individual_td", "daemon")


def make_env(create_env_fn: Any, kwargs: Mapping[str, Any] | None = None) -> EnvBase:
    """The env that ``create_env_fn`` is or makes; Gymnasium's own are wrapped."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        if len(create_env_fn) != 1:
            raise ValueError(f"a Collector has one env, got {len(create_env_fn)}; put several into SerialEnv(n, fn)")
        create_env_fn = create_env_fn[0]
    if isinstance(create_env_fn, str):
        return GymEnv(create_env_fn, **(kwargs or {}))
    create_env_fn = wrap_known(create_env_fn)
    ready = is_env(create_env_fn)
    if ready and kwargs:
        raise RuntimeError("create_env_kwargs are for a function that makes the env; this env is made already")
    if not ready and isinstance(create_env_fn, nn.Module):
        raise TypeError(
            f"create_env_fn is {shown(create_env_fn)}, a module; the env, or what makes it, comes first, the policy "
            "second"
        )
    if not ready and not callable(create_env_fn):
        raise TypeError(f"create_env_fn is {shown(create_env_fn)}; {ACCEPTED}")
    env = create_env_fn if ready else wrap_known(create_env_fn(**(kwargs or {})))
    if isinstance(env, EnvBase):
        return env
    if isinstance(env, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        return GymWrapper(env)
    if is_guest(env):
        return GuestEnv(env)
    raise TypeError(f"what create_env_fn made is {shown(env)}, which is no env; {ACCEPTED}")


def make_env_beside(create_env_fn: Any, kwargs: Mapping[str, Any] | None, others: Sequence[EnvBase]) -> EnvBase:
    """The env of a worker that has ``others``: where it was given one twice, or a function that returns the same one
    each time, a copy, which it would have got in a process of its own."""
    env = make_env(create_env_fn, kwargs)
    if any(innermost(env) is innermost(other) for other in others):
        return make_env(cloudpickle.loads(dumps(create_env_fn)), kwargs)
    return env


class MakesInThreads:
    """Makes envs for threads, which are all in this process and step at the same time: none may be there twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[Any] = []

    def __call__(self, create_env_fn: Any, kwargs: Mapping[str, Any] | None, others: Sequence[EnvBase]) -> EnvBase:
        """As ``make_env_beside``, for a thread that has ``others``."""
        env = make_env_beside(create_env_fn, kwargs, others)
        stepped = innermost(env)
        with self._lock:
            if any(stepped is other for other in self._made):
                raise ValueError(
                    "some of these envs are one and the same, which two threads would step at the same time; let "
                    "create_env_fn be a function that makes a new one at each call"
                )
            self._made.append(stepped)
        return env


def innermost(env: EnvBase) -> Any:
    """The object that is stepped, whatever is around it."""
    if isinstance(env, GuestEnv):
        return env.guest
    if isinstance(env, GymWrapper):
        return env.env.unwrapped
    base = vars(env).get("base_env")
    return env if base is None else innermost(base)


#: For errors.
ACCEPTED = (
    "a collector takes an env, or a function that makes one: of swath.envs (EnvBase), of Gymnasium (Env, VectorEnv, or "
    "an id such as 'CartPole-v1'), of EnvPool, ale-py, dm_control, PettingZoo or TorchRL, or any object with the "
    "methods of TorchRL's EnvBase (docs/torchrl.md says which)"
)


def is_env(thing: Any) -> bool:
    """Whether this is an env already, rather than a function that makes one."""
    known = (EnvBase, gymnasium.Env, gymnasium.vector.VectorEnv)
    return isinstance(thing, known) or is_guest(thing) or wrapper_of(thing) is not None


def is_ready_made(create_env_fn: Any) -> bool:
    """Whether ``make_env`` is given an env, which is then its user's, also where it is wrapped."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str) and len(create_env_fn) == 1:
        create_env_fn = create_env_fn[0]
    return is_env(create_env_fn)


def shown(thing: Any) -> str:
    kind = type(thing)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return "None" if thing is None else f"of type {name}"


def resolve_factories(
    who: str,
    num_envs: int,
    create_env_fn: Any,
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
) -> tuple[list[Any], list[Mapping[str, Any]]]:
    """A factory and keywords for each env."""
    if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
        raise ValueError(f"{who}: the number of envs must be a positive integer, got {num_envs!r}")
    if is_env(create_env_fn):
        raise TypeError(
            f"{who} makes its envs, and was given one that is made ({shown(create_env_fn)}): give a function that "
            f"makes one, {who}({num_envs}, make_env)"
        )
    if callable(create_env_fn) or isinstance(create_env_fn, str):
        create_env_fn = [create_env_fn] * num_envs
    factories: list[Any] = list(create_env_fn)
    kwargs = create_env_kwargs or {}
    all_kwargs = [kwargs] * num_envs if isinstance(kwargs, Mapping) else list(kwargs)
    for name, given in (("factories", factories), ("create_env_kwargs", all_kwargs)):
        if len(given) != num_envs:
            raise RuntimeError(f"{who}: {num_envs} envs were asked for, but {len(given)} {name} given")
    return factories, all_kwargs


def refuse_unknown(kind: type, others: Iterable[str], accepted: Collection[str]) -> None:
    """Of the arguments that TorchRL's batches of envs have: those that have no effect here are accepted."""
    for name in others:
        if name in ("pin_memory", "allow_step_when_done"):
            raise ValueError(f"{kind.__name__}: {name} is not supported")
        if name not in accepted:
            raise unknown_arguments(kind, [name], [*inspect.signature(kind).parameters, *accepted])

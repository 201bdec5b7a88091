"""Parts of envs by their path, such as ``"env.transform[0]"``: of each env by itself, where there are several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from swath.envs.parallel import CrewEnv
from swath.envs.serial import SerialGymEnv, SerialRowEnv
from swath.errors import EnvError
from swath.paths import parts_of_path, resolve_path


def is_in_env(path: str) -> bool:
    """Whether a path leads into a collector's env."""
    return path.startswith("env.")


def parts_of(collector: Any, path: str) -> list[Any]:
    """What a path leads to in a collector; in its envs, as many as there are."""
    return parts_of_env(collector.env, path) if is_in_env(path) else [resolve_path(collector, path)]


def parts_of_env(env: Any, path: str) -> list[Any]:
    """What ``"env.…"`` leads to, in each of the envs that are side by side in this one.

    >>> from swath.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv
    >>> env = SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter()))
    >>> parts_of_env(env, "env.transform[0]")
    [StepCounter(max_steps=None), StepCounter(max_steps=None)]
    """
    first = str(parts_of_path(path)[1])
    if first not in vars(env) and not hasattr(type(env), first):
        if isinstance(env, (SerialGymEnv, SerialRowEnv)):
            return [part for child in env.children for part in parts_of_env(child, path)]
        if isinstance(env, CrewEnv):
            raise EnvError(
                f"{path} is in the processes of {type(env).__name__}, and a path does not lead there. Put the "
                f"transforms around it, TransformedEnv({type(env).__name__}(...), ...), use a MultiSyncCollector, or "
                "load_state_dict"
            )
    return [resolve_path(SimpleNamespace(env=env), path)]

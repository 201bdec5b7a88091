"""From an arrangement to a collector: as an object, and as the code that makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from swath.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from swath.collectors.base import BaseCollector
from swath.costs.arrangement import Arrangement, Form
from swath.envs import ParallelEnv, SerialEnv
from swath.modules.random_policy import RandomPolicy

_WIDTH = 76
_CLASSES: dict[Form, type[BaseCollector]] = {
    Form.SINGLE: Collector,
    Form.PARALLEL: Collector,
    Form.SYNC: MultiSyncCollector,
    Form.ASYNC: MultiAsyncCollector,
    Form.BATCHED: AsyncBatchedCollector,
    Form.THREADED: AsyncBatchedCollector,
}


@dataclass(frozen=True)
class Made:
    """What is collected with.

    Args:
        create_env_fn: a function that makes one env, or a Gymnasium id.
        policy: None for random actions, or where there is a ``policy_factory``.
    """

    create_env_fn: Any
    policy: Any = None
    policy_factory: Callable[[], Any] | None = None

    def collector(self, arrangement: Arrangement, frames_per_batch: int, **options: Any) -> Any:
        """A collector that is arranged like this."""
        form, num_envs, workers = arrangement.form, arrangement.num_envs, arrangement.num_workers
        policy: Any = self.policy
        if self.policy_factory is not None:
            options["policy_factory"] = self.policy_factory
        elif policy is None and form in (Form.BATCHED, Form.THREADED):
            policy = RandomPolicy()
        env = self.create_env_fn
        if form == Form.SINGLE and num_envs > 1:
            env = partial(SerialEnv, num_envs, env)
        elif form == Form.PARALLEL:
            env = partial(ParallelEnv, num_envs, env, num_workers=workers)
        elif form != Form.SINGLE:
            env = [env] * num_envs
        if form == Form.THREADED:
            options["env_backend"] = "threading"
        elif form not in (Form.SINGLE, Form.PARALLEL):
            options["num_workers"] = workers
        made: Any = _CLASSES[form]
        return made(env, policy, frames_per_batch=frames_per_batch, **options)


def imports(arrangement: Arrangement, has_policy: bool = True) -> list[str]:
    """The lines that ``call`` needs."""
    lines = ["import torch", ""] if arrangement.threads is not None else []
    names = [_CLASSES[arrangement.form].__name__]
    if not has_policy and arrangement.form in (Form.BATCHED, Form.THREADED):
        names.append("RandomPolicy")
    lines.append(f"from swath.collectors import {', '.join(names)}")
    envs = _env_class(arrangement)
    return lines if envs is None else [*lines, f"from swath.envs import {envs}"]


def _env_class(arrangement: Arrangement) -> str | None:
    if arrangement.form == Form.PARALLEL:
        return "ParallelEnv"
    return "SerialEnv" if arrangement.form == Form.SINGLE and arrangement.num_envs > 1 else None


def call(
    arrangement: Arrangement, frames_per_batch: int, env: str = "create_env_fn", policy: str | None = "policy"
) -> list[str]:
    """The lines that make such a collector, in which env and policy have these names.

    >>> print(*call(Arrangement(Form.SYNC, 8, 2), 2048), sep="\\n")
    collector = MultiSyncCollector(
        [create_env_fn] * 8,
        policy,
        num_workers=2,
        frames_per_batch=2_048,
    )
    """
    form, num_envs, workers = arrangement.form, arrangement.num_envs, arrangement.num_workers
    if form == Form.SINGLE:
        arguments = [env if num_envs == 1 else f"SerialEnv({num_envs}, {env})"]
    elif form == Form.PARALLEL:
        arguments = [f"ParallelEnv({num_envs}, {env}, num_workers={workers})"]
    else:
        arguments = [f"[{env}] * {num_envs}"]
    if policy is not None:
        arguments.append(policy)
    elif form in (Form.BATCHED, Form.THREADED):
        arguments.append("RandomPolicy()")
    if form == Form.THREADED:
        arguments.append('env_backend="threading"')
    elif form not in (Form.SINGLE, Form.PARALLEL):
        arguments.append(f"num_workers={workers}")
    arguments.append(f"frames_per_batch={frames_per_batch:_}")
    made = shown_call(f"collector = {_CLASSES[form].__name__}", arguments)
    if arrangement.threads is None:
        return made
    why = "  # more wait for each other here"
    return [f"torch.set_num_threads({arrangement.threads}){why}", *made]


def shown_call(start: str, arguments: Sequence[str]) -> list[str]:
    one_line = f"{start}({', '.join(arguments)})"
    if len(one_line) <= _WIDTH:
        return [one_line]
    return [f"{start}(", *(f"    {argument}," for argument in arguments), ")"]


def name_of(arrangement: Arrangement) -> str:
    """What a user calls it."""
    name = _CLASSES[arrangement.form].__name__
    if arrangement.form == Form.THREADED:
        return f"{name}, threads"
    envs = _env_class(arrangement)
    return name if envs is None else f"{name}({envs})"

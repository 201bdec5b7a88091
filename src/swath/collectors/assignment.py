"""The arguments of collectors in several places, resolved once: who collects what, where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swath.collectors.config import WorkersConfig
from swath.collectors.devices import Devices
from swath.collectors.numbers import positive_int
from swath.envs.making import ACCEPTED, is_env, shown
from swath.workers.layout import AUTO, WorkerLayout


@dataclass(frozen=True)
class RequestedEnv:
    """One env that was asked for: how it is made, and what runs in it."""

    factory: Any
    kwargs: Mapping[str, Any]
    devices: Devices
    policy_factory: Callable[[], Any] | None
    frames: int

    @property
    def kind(self) -> tuple[Any, ...]:
        """Only members of the same kind can share a worker."""
        return self.devices, id(self.policy_factory), self.frames


@dataclass(frozen=True)
class Assignment:
    """All members, and the worker that each is in."""

    members: tuple[RequestedEnv, ...]
    layout: WorkerLayout

    def of_worker(self, worker: int) -> tuple[RequestedEnv, ...]:
        members = self.layout.members[worker]
        return self.members[members.start : members.stop]


def list_factories(create_env_fn: Any, num_workers: Any, envs_per_worker: int | None) -> list[Any]:
    """One factory for each env."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        factories = list(create_env_fn)
        if not factories:
            raise ValueError("create_env_fn is an empty list; give a factory for every env")
    else:
        if num_workers == AUTO:
            raise ValueError("num_workers='auto' spreads the envs of a list; give create_env_fn=[fn] * n")
        factories = [create_env_fn] * ((num_workers or 1) * (envs_per_worker or 1))
    for index, factory in enumerate(factories):
        if not (callable(factory) or isinstance(factory, str) or is_env(factory)):
            raise TypeError(f"create_env_fn of env {index} is {shown(factory)}; {ACCEPTED}")
    return factories


def list_nodes(create_env_fn: Any, num_collectors: Any) -> list[Any]:
    """A factory for each node."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        factories = list(create_env_fn)
        if not factories:
            raise ValueError("create_env_fn is an empty list; give a factory for every node")
        if num_collectors is not None and len(factories) not in (1, num_collectors):
            raise ValueError(
                f"create_env_fn has {len(factories)} entries for num_collectors={num_collectors}; give one for each, "
                "or one for all"
            )
        if num_collectors is not None and len(factories) == 1:
            factories = factories * num_collectors
        return factories
    return [create_env_fn] * (1 if num_collectors is None else positive_int("num_collectors", num_collectors))


def for_each(name: str, given: Any, count: int, error: type[Exception]) -> list[Any]:
    """A value for each env: the entries of a list, or the same for all."""
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise error(f"{name} has {len(given)} entries for {count} envs; give one for each, or one for all")
    return list(given)


def list_frames(frames_per_batch: Any, count: int, is_shared: bool) -> list[int]:
    """Frames of a batch for each env; ``is_shared``: a batch is put together from all of them."""
    if isinstance(frames_per_batch, (list, tuple)):
        if len(frames_per_batch) != count:
            raise ValueError(
                f"frames_per_batch has {len(frames_per_batch)} entries for {count} envs; give one for each, or a number"
            )
        return [positive_int("frames_per_batch", frames) for frames in frames_per_batch]
    frames = positive_int("frames_per_batch", frames_per_batch)
    return [-(-frames // count) if is_shared else frames] * count


def resolve_members(
    config: WorkersConfig, is_shared: bool, num_workers: Any, envs_per_worker: int | None
) -> tuple[RequestedEnv, ...]:
    factories = list_factories(config.create_env_fn, num_workers, envs_per_worker)
    count = len(factories)
    named_devices = {
        "device": config.device,
        "env_device": config.env_device,
        "policy_device": config.policy_device,
        "storing_device": config.storing_device,
    }
    each = {name: for_each(name, given, count, RuntimeError) for name, given in named_devices.items()}
    return tuple(
        RequestedEnv(factory, kwargs or {}, devices, make_policy, frames)
        for factory, kwargs, devices, make_policy, frames in zip(
            factories,
            for_each("create_env_kwargs", config.create_env_kwargs, count, ValueError),
            [Devices.resolve(**{name: values[i] for name, values in each.items()}) for i in range(count)],
            for_each("policy_factory", config.policy_factory, count, ValueError),
            list_frames(config.frames_per_batch, count, is_shared),
            strict=True,
        )
    )


def check_counts(num_workers: Any, envs_per_worker: Any) -> tuple[Any, int | None]:
    if num_workers is not None and num_workers != AUTO:
        num_workers = positive_int("num_workers", num_workers)
    if envs_per_worker is not None:
        envs_per_worker = positive_int("envs_per_worker", envs_per_worker)
    return num_workers, envs_per_worker


def spread(members: Sequence[RequestedEnv], num_workers: int | None, envs_per_worker: int | None) -> WorkerLayout:
    if num_workers is not None and envs_per_worker is not None and num_workers * envs_per_worker != len(members):
        raise ValueError(
            f"num_workers={num_workers} times envs_per_worker={envs_per_worker} is not the {len(members)} envs of "
            "create_env_fn; leave one of the two out"
        )
    return WorkerLayout.resolve(len(members), num_workers, envs_per_worker, [member.kind for member in members])

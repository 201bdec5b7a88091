"""One front door: ``Collector(..., num_collectors=N, backend=...)`` makes the collector that runs there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swath.collectors.assignment import list_nodes
from swath.collectors.numbers import flag, positive_int
from swath.errors import require_one_of

BACKENDS = ("direct", "process", "ray", "distributed", "rpc", "submitit")
#: What the front door itself takes.
_RESERVED = ("create_env_fn", "policy", "num_collectors", "backend_options", "sync")


#: Arguments of ``Collector`` that say where to run.
FRONT_DOOR = ("num_collectors", "backend", "backend_options", "sync")


def is_asked_for(kwargs: Mapping[str, Any]) -> bool:
    """Whether these arguments of ``Collector`` say where to run."""
    return any(kwargs.get(name) is not None for name in FRONT_DOOR)


def refuse_front_door(kind: type, kwargs: Mapping[str, Any], but: Callable[..., None] | None) -> None:
    """A subclass of ``Collector`` is no front door; ``but`` its own constructor may have arguments of these names."""
    own = () if but is None else inspect.signature(but).parameters
    if wrong := [name for name in FRONT_DOOR if kwargs.get(name) is not None and name not in own]:
        raise TypeError(
            f"{', '.join(wrong)}: for Collector(...), which makes the collector that runs there; a "
            f"{kind.__name__} is made as it is"
        )


def make_collector(create_env_fn: Any, policy: Any, kwargs: dict[str, Any]) -> Any:
    """The collector for these arguments of ``Collector``."""
    kwargs = dict(kwargs)
    num_collectors = kwargs.pop("num_collectors", None)
    backend = kwargs.pop("backend", None)
    options = kwargs.pop("backend_options", None)
    sync = kwargs.pop("sync", None)
    if num_collectors is not None:
        num_collectors = positive_int("num_collectors", num_collectors)
    if backend is None:
        backend = "direct" if num_collectors is None else "process"
    require_one_of("backend", backend, BACKENDS)
    if backend == "direct":
        return _make_direct(create_env_fn, policy, num_collectors, sync, options, kwargs)
    options = dict(options or {})
    for name in options:
        if name in _RESERVED:
            raise ValueError(f"backend_options: {name} is an argument of Collector itself")
        if name in kwargs:
            raise ValueError(f"backend_options: {name} was given as an argument already")
    kwargs |= options
    factories = _one_for_each(create_env_fn, num_collectors)
    kwargs["sync"] = flag("sync", sync)
    if backend == "process":
        from swath.collectors.multi import MultiCollector

        return MultiCollector(factories, policy, **kwargs)
    return _node_collector(backend)(factories, policy, **kwargs)


def _node_collector(backend: str) -> Any:
    from functools import partial

    from swath.collectors import distributed

    if backend == "ray":
        return distributed.RayCollector
    if backend == "rpc":
        return distributed.RPCCollector
    if backend == "submitit":
        return partial(distributed.DistributedCollector, launcher="submitit")
    return distributed.DistributedCollector


def _make_direct(
    create_env_fn: Any, policy: Any, num_collectors: int | None, sync: Any, options: Any, kwargs: dict[str, Any]
) -> Any:
    """In this process; several envs are stepped one after the other."""
    from swath.collectors.single import Collector
    from swath.envs.serial import SerialEnv

    if sync is not None:
        raise ValueError("sync goes with workers: backend='direct' has none")
    if options:
        raise ValueError("backend_options go with workers: backend='direct' has none")
    factories = _one_for_each(create_env_fn, num_collectors)
    if len(factories) == 1:
        return Collector(factories[0], policy, **kwargs)
    env_kwargs = kwargs.pop("create_env_kwargs", None)
    return Collector(SerialEnv(len(factories), factories, create_env_kwargs=env_kwargs), policy, **kwargs)


def _one_for_each(create_env_fn: Any, num_collectors: int | None) -> list[Any]:
    is_list = isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str)
    return list_nodes(create_env_fn if is_list else [create_env_fn], num_collectors)
